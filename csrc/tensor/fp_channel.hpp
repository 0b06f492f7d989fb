// tensor/fp_channel.hpp -- ranks that share something, for the C++ side: collectives over them, and waiting for
// those.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <array>
#include <optional>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_channel.h"
#include "tensor/fp_streams.hpp"

struct fp_group {
    c10::intrusive_ptr<c10d::ProcessGroup> native;  // or null: Python's way only
    c10::intrusive_ptr<c10d::ProcessGroup> host;    // of the same ranks, for tensors on the host; or null
    PyObject *object = nullptr;                     // owned
    std::array<PyObject *, FP_WATCHERS> watchers{}; // owned, or null: nobody is told of its collectives
    const fp_group_calls *calls = nullptr;
    std::array<uint32_t, FP_WATCHERS> numbers{};
    bool sliced = false;                       // waits are interrupted to tell the watcher
    mutable std::optional<c10::Device> device; // of the last collective over it
    bool registers = true;                     // memory; not any more where it could not
    bool given_up = false; // what is under way may not end soon: nobody waits for it when a pass is forgotten
};

namespace fp {

// Tell the watchers which collective is about to begin over group.
void announce(fp_group &group, unsigned kind, uint32_t trained = 0);

// Whether the backend multiplies by a factor as it adds up tensors like this one. NCCL does. In bf16 torch 2.13 gives it
// the upper half of a wide factor, so there it is not asked to.
bool premultiplies(const fp_group &group, const at::Tensor &tensor);

// Whether memory of device for group's collectives is to be registered with its backend: FLATPARAM_REGISTERED=1 asks for
// that, and nothing is known to speak against it. Before a group's first collective it has no communicator to register
// memory with, and a captured graph has memory of its own, which NCCL registers itself.
bool registers(const fp_group &group, const c10::Device &device);

// A 1-D tensor in registered memory, so that collectives take no copy; undefined where registers() is false, or it cannot be:
// a line says so once.
at::Tensor registered(fp_group *group, int64_t numel, const at::TensorOptions &options);

// The same in the device's own memory otherwise.
at::Tensor empty_for(fp_group *group, int64_t numel, const at::TensorOptions &options);

// The collectives of the C++ group, started. factor: what is added up is multiplied by it before, if premultiplies().
c10::intrusive_ptr<c10d::Work> all_gather(const fp_group &group, const at::Tensor &gathered, const at::Tensor &own);
c10::intrusive_ptr<c10d::Work> reduce_scatter(const fp_group &group, const at::Tensor &reduced, const at::Tensor &whole,
                                              double factor = 1.0);
c10::intrusive_ptr<c10d::Work> all_reduce(const fp_group &group, const at::Tensor &tensor, double factor = 1.0);

// The same through Python: collectives.name(output, input, group).
void call_python(PyObject *collectives, const char *name, const at::Tensor &output, const at::Tensor &input,
                 const fp_group &group);

// Wait for what was started over group. If its watcher ends the wait, the work stays: it goes on, its memory is written to,
// and it can be waited for again. What has ended, or failed, is forgotten.
void wait_for(c10::intrusive_ptr<c10d::Work> &work, const fp_group *group);
// sliced: whether the waits of the backend that work is of are, where that is not the one of the units' device.
void wait_for(c10::intrusive_ptr<c10d::Work> &work, const fp_group *group, bool sliced);

// Wait for work over group no longer than a moment, as others may never come to it; whether it has ended. Where waits are
// not sliced, nobody waits.
bool give_up(c10d::Work &work, fp_group &group);

// Whether what is under way over group may never end.
bool is_broken(const fp_group &group);

} // namespace fp
