// tensor/fp_flat_buffer.hpp -- one flat parameter, for the C++ side.
#pragma once

#include "tensor/fp_channel.hpp"
#include "tensor/fp_flat_buffer.h"
#include "tensor/fp_graph.hpp"

extern "C" {
#include "core/fp_state.h"
}

struct fp_flat_buffer : fp_flat_buffer_plan {
    std::shared_ptr<const fp::Geometry> geometry;
    std::optional<at::ScalarType> compute_dtype, reduce_dtype;
    bool in_full = false;              // everything is in the shard's dtype for the time being
    std::optional<c10::Device> device; // to compute on, where it is not the shard's

    at::Tensor unsharded; // [total] in the compute dtype; its storage has 0 bytes while freed
    at::Tensor
        unsharded_data;     // the same memory under another version counter: autograd sees no change of what is written
    at::Tensor filling;     // the same memory by a storage of its own, for a gather
    bool is_hidden = false; // the values are not known to be there: whoever reads unsharded or a view gets the reason
    fp_data_state data = FP_DATA_SHARDED; // of unsharded; see fp::move
    at::Tensor secondary_shard;           // [total / param_shards] in the compute dtype: what param_group gathers from
    at::Tensor next_secondary_shard;      // nested: the same while it is gathered
    c10::intrusive_ptr<c10d::Work> work;  // of a gather
    fp_group *work_group = nullptr;       // over which
    bool may_join = false;                // one call of the backend for several; see fp_flat_buffers_begin
    bool has_joined = false;              // what was begun is that call's work, once it has ended
    at::Tensor accumulated_grad;          // [total] in accumulated_dtype_of(shard): gradients that are not reduced yet
    at::Tensor partial_reduce_output;     // nested: [total / param_shards] of it, added over param_group
    at::Tensor reduce_input, reduce_output;
    at::Tensor reduce_slice; // of reduce_input, where that is added up in place: what becomes reduce_output
    c10::intrusive_ptr<c10d::Work> reduction;
    bool is_divided = false;                       // what is reduced: the collective multiplies it by 1 / postdivide
    at::Tensor arriving_grad;                      // the reduced gradient on the host, once has_arrived
    std::optional<fp::Mark> was_read;              // recorded after the copy from a shard on the host
    std::optional<fp::Mark> was_filled;            // the same after a gather that is no work
    std::optional<fp::Mark> has_arrived;           // and after the copy to a shard's gradient on the host
    fp::Home home;                                 // of the memory of unsharded
    fp::Home accumulated_home;                     // of what is accumulated
    fp_gradient_state gradient = FP_GRADIENT_NONE; // see fp::move
    at::Tensor host;                  // where what was accumulated is between backwards; pinned beside an accelerator
    bool host_valid = false;          // it is there now
    std::optional<fp::Mark> has_left; // recorded after the copy to it
    at::Tensor reload_buffer;         // a copy of host on the device that was started in time
    std::optional<fp::Mark> has_come; // recorded after it
    uint32_t trained = 0;             // a hash of who requires grad
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> source; // where the shard was seen last
    int64_t sources = 0;                                             // how often that changed
    std::shared_ptr<fp::UnitRef> unit;                               // whose views they are; null before there are any
    fp::NodePtr node;                                                // behind the views; null if they have none
    int64_t shown_version = 0; // the version of unsharded that autograd knows of the views
    int64_t seen_version = 0;  // up to which what was written to them in place has been taken into the shard

    explicit fp_flat_buffer(const fp_flat_buffer_plan &plan) : fp_flat_buffer_plan(plan) {}

    // Somebody outside reads the memory of unsharded, which may not be freed or written to then.
    bool is_borrowed() const
    {
        return unsharded.defined() && data != FP_DATA_BORROWED &&
               (!fp::has_own_memory(fp::storage_of(unsharded)) || fp::has_borrower(fp::storage_of(unsharded)));
    }
    bool is_under_way() const
    {
        return data == FP_DATA_REFRESHING || data == FP_DATA_GATHERING || data == FP_DATA_ABANDONED;
    }
    // What was gathered is there, or about to be.
    bool is_gathered() const
    {
        return data == FP_DATA_GATHERING || data == FP_DATA_UNSHARDED;
    }
    int64_t part_numel() const
    {
        return geometry->total / param_shards;
    }

    c10::Device device_for(const at::Tensor &shard) const
    {
        return device.value_or(shard.device());
    }
    at::ScalarType dtype_of(const at::Tensor &shard) const
    {
        return in_full ? shard.scalar_type() : compute_dtype.value_or(shard.scalar_type());
    }
    at::ScalarType reduce_dtype_of(const at::Tensor &shard) const
    {
        const at::ScalarType otherwise = full_precision ? shard.scalar_type() : dtype_of(shard);
        return in_full ? shard.scalar_type() : reduce_dtype.value_or(otherwise);
    }
    at::ScalarType accumulated_dtype_of(const at::Tensor &shard) const
    {
        return fp::is_low(shard.scalar_type()) ? at::kFloat : shard.scalar_type();
    }
};

namespace fp {

// Of the unsharded tensor.
inline size_t
bytes_of(const fp_flat_buffer &flat)
{
    return static_cast<size_t>(flat.geometry->total) * flat.unsharded.itemsize();
}

// In errors; null before there are views.
inline const char *
name_of(const fp_flat_buffer &flat)
{
    return flat.unit ? flat.unit->name.c_str() : nullptr;
}

// The only way to another state; RuntimeError, with nothing changed, where the core's table has no such move.
void move(fp_flat_buffer &flat, fp_data_event event);
void move(fp_flat_buffer &flat, fp_gradient_event event);
void check(const fp_flat_buffer &flat, fp_gradient_event event); // the same error, before what cannot be taken back

// ---- fp_gather.cpp ----

// Whether the gather under way may never end: it is abandoned then, and its memory cannot be freed. If it has ended, however
// it did, it is forgotten.
bool is_lost(fp_flat_buffer &flat);

// Wait for a gather. One that has failed leaves nothing; where the wait was broken off, nothing changes.
void wait_for_gather(fp_flat_buffer &flat);

// The same on the current stream for what is written without a work: nothing else may come to that memory before.
void wait_for_fill(fp_flat_buffer &flat);

// ---- fp_buffer_views.cpp ----

bool is_view_at(const fp_flat_buffer &flat, PyObject *view, size_t i);

bool has_same_bytes(const at::Tensor &a, const at::Tensor &b);

// Let autograd take the views for what they were made as, though unsharded has been changed in place since; else it would
// look for another history of them.
void show_version(fp_flat_buffer &flat, PyObject *const *views);
void change_version(fp_flat_buffer &flat, PyObject *const *views);

// ---- fp_offload.cpp ----

// What lies in host memory comes back into an empty accumulator, in time for what the current stream does next.
void reload(fp_flat_buffer &flat, at::Tensor &accumulator);

// The current stream uses what is accumulated, or has used it: see Home::share().
void share_accumulated(fp_flat_buffer &flat);

// What was accumulated goes to host memory.
void offload(fp_flat_buffer &flat, at::Tensor &accumulator);

} // namespace fp
