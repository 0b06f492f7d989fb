// tensor/fp_channel.hpp -- a process group for the C++ side: issue its collectives, and wait for them. The GIL is held, and
// released during collectives and waits: threads of gloo need it.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <array>
#include <optional>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_channel.h"
#include "tensor/fp_streams.hpp"

struct fp_group {
    c10::intrusive_ptr<c10d::ProcessGroup> native;  // null: Python issues all collectives
    c10::intrusive_ptr<c10d::ProcessGroup> host;    // the same ranks, for tensors on the host; may be null
    PyObject *object = nullptr;                     // the Python process group, owned
    std::array<PyObject *, FP_WATCHERS> watchers{}; // owned; null: there is none
    const fp_group_calls *calls = nullptr;
    std::array<uint32_t, FP_WATCHERS> numbers{}; // of the unit, for each watcher
    bool sliced = false;                         // waits are cut into slices of 300 ms, and watchers hear of each
    mutable std::optional<c10::Device> device;   // of the last collective; none yet: there is no communicator
    bool registers = true;                       // memory can be registered; false after a failure
    bool given_up = false; // a give_up() has waited in vain since the last announce(): the next give_up() does not wait
};

namespace fp {

// A collective that was issued from C++ and has not ended.
struct Pending {
    c10::intrusive_ptr<c10d::Work> work; // null: none is under way
    fp_group *group = nullptr;           // the group of the last collective, borrowed
    // may: between fp_flat_buffers_begin() and _end(), where collectives join into one call. joined: this one has begun there,
    // and the work of that call replaces its work.
    enum class Join { alone, may, joined } join = Join::alone;

    explicit operator bool() const
    {
        return work != nullptr;
    }
    void begin(fp_group &over, c10::intrusive_ptr<c10d::Work> begun)
    {
        group = &over;
        work = std::move(begun);
        join = join == Join::may ? Join::joined : join;
    }
    void end_join(const c10::intrusive_ptr<c10d::Work> &all)
    {
        if (join == Join::joined && work && all) {
            work = all;
        }
        join = Join::alone;
    }
};

// Tell the watchers which collective is about to begin over group. If a watcher raises, its exception is thrown, and the
// collective must not be issued.
void announce(fp_group &group, unsigned kind, uint32_t trained = 0);

// A hash of numbers for announce(), of FP_EVENT_TRAINED_BITS.
template <class Numbers, class NumberOf>
uint32_t
hash_of(const Numbers &numbers, NumberOf &&number_of)
{
    uint64_t hash = 1;
    for (const auto &each : numbers) {
        hash = hash * UINT64_C(0x9E3779B97F4A7C15) + number_of(each);
    }
    hash = (hash ^ hash >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    return static_cast<uint32_t>(hash >> (64 - FP_EVENT_TRAINED_BITS));
}

// Whether the backend can multiply tensors like this one by a factor as it adds them up. NCCL can, here in fp32 and fp64 only:
// in bf16 torch 2.13 passes it the upper half of a wide factor.
bool premultiplies(const fp_group &group, const at::Tensor &tensor);

// Whether to register memory of device with the backend of group, so that NCCL needs no copy of its own. true if
// FLATPARAM_REGISTERED=1 asks for it and it has not failed yet. false before the group's first collective, as there is no
// communicator, and in a capture, whose memory NCCL registers itself.
bool registers(const fp_group &group, const c10::Device &device);

// A 1-D tensor of numel elements in registered memory, so that collectives take no copy. Undefined where registers() is false,
// or where the backend cannot register: a warning says so once.
at::Tensor registered(fp_group *group, int64_t numel, const at::TensorOptions &options);

// A 1-D tensor of numel elements, in registered() memory, or in the device's usual memory where that gives none.
at::Tensor empty_for(fp_group *group, int64_t numel, const at::TensorOptions &options);

// Issue a collective from C++ and return its work; announce() it before. factor: each addend is multiplied by it; other
// than 1.0 only if premultiplies().
c10::intrusive_ptr<c10d::Work> all_gather(const fp_group &group, const at::Tensor &gathered, const at::Tensor &own);
c10::intrusive_ptr<c10d::Work> reduce_scatter(const fp_group &group, const at::Tensor &reduced, const at::Tensor &whole,
                                              double factor = 1.0);
c10::intrusive_ptr<c10d::Work> all_reduce(const fp_group &group, const at::Tensor &tensor, double factor = 1.0);
// Each rank sends each rank, itself too, an equal part of `sent`, in rank order. only_other: of two ranks, each sends the other
// all of it.
c10::intrusive_ptr<c10d::Work> exchange(const fp_group &group, const at::Tensor &received, const at::Tensor &sent,
                                        bool only_other);

// Issue a collective from Python: call collectives.name(output, input, group), which also waits. announce() it before.
void call_python(PyObject *collectives, const char *name, const at::Tensor &output, const at::Tensor &input,
                 const fp_group &group);

// Wait for work over group; null: return at once. work becomes null when it has ended or failed; a failure is thrown. If a
// watcher ends the wait, its exception is thrown and work stays: the collective goes on, and can be waited for again.
void wait_for(c10::intrusive_ptr<c10d::Work> &work, const fp_group *group);
void wait_for(Pending &pending);
// Wait as above for work of another backend than group's (a sum on the host). sliced: whether that backend's waits are cut.
void wait_for(c10::intrusive_ptr<c10d::Work> &work, const fp_group *group, bool sliced);

// Wait 300 ms at most for a collective that is under way, of an interrupted pass: other ranks may never issue their part.
// Returns whether it has ended; true without a wait if waits are not sliced. A failure of the work is not thrown.
bool give_up(const Pending &pending);

// Whether a watcher says that pending collectives of group may never end (is_broken() of fp_group_calls).
bool is_broken(const fp_group &group);

} // namespace fp
