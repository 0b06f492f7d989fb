// tensor/fp_flat_buffer.hpp -- the struct behind fp_flat_buffer.h, and the functions that its files share:
// fp_flat_buffer.cpp (the storage), fp_buffer_views.cpp, fp_gather.cpp, fp_reduce.cpp, fp_accumulated.cpp. The GIL protects it.
//
// [total] is the numel of all shards together.
#pragma once

#include "tensor/fp_accumulated.hpp"
#include "tensor/fp_channel.hpp"
#include "tensor/fp_flat_buffer.h"
#include "tensor/fp_graph.hpp"

extern "C" {
#include "core/fp_state.h"
}

namespace fp {

// The gather of several flat parameters as one.
struct Pack {
    at::Tensor own;        // bytes that this rank sends
    at::Tensor whole;      // bytes of all ranks, rank by rank
    int64_t stride;        // the bytes of one rank
    bool given_up = false; // as in fp_group
};

// The part of a flat parameter in a pack: fp_flat_buffers_gather_pack().
struct Packed {
    bool may = false;           // true from fp_flat_buffers_begin_pack() to _gather_pack(): a gather joins the pack
    at::Tensor own;             // the elements that it sends, until the gather has begun
    std::shared_ptr<Pack> pack; // until its values are taken
    int64_t first = 0;          // the first of its bytes among those of a rank
};

// The dtypes of one flat parameter. They follow the shard's, which may change.
struct Precision {
    std::optional<at::ScalarType> compute_dtype, reduce_dtype; // as in fp_flat_buffer_options
    bool keep_reduce_dtype, full_precision;
    bool in_full = false; // compute and reduce in the shard's dtype, whatever the options say

    at::ScalarType computes_in(const at::Tensor &shard) const
    {
        return in_full ? shard.scalar_type() : compute_dtype.value_or(shard.scalar_type());
    }
    at::ScalarType reduces_in(const at::Tensor &shard) const
    {
        const at::ScalarType otherwise = full_precision ? shard.scalar_type() : computes_in(shard);
        return in_full ? shard.scalar_type() : reduce_dtype.value_or(otherwise);
    }
    at::ScalarType accumulates_in(const at::Tensor &shard) const
    {
        return is_low(shard.scalar_type()) ? at::kFloat : shard.scalar_type();
    }
    // The dtype of the shard's gradient. result: the output of the reduction.
    at::ScalarType of_gradient(const at::Tensor &result, const at::Tensor &shard) const
    {
        return keep_reduce_dtype ? result.scalar_type() : shard.scalar_type();
    }
};

// A count of the storages that a tensor has had.
class StorageCount {
  public:
    int64_t see(const c10::Storage &storage)
    {
        if (!last_ || last_->_unsafe_get_target() != storage.unsafeGetStorageImpl()) {
            last_.emplace(storage.getWeakStorageImpl()); // weak: keeps the address, so that no other storage gets it
            count_++;
        }
        return count_;
    }

  private:
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> last_;
    int64_t count_ = 0;
};

} // namespace fp

struct fp_flat_buffer : fp_flat_buffer_plan {
    std::shared_ptr<const fp::Geometry> geometry;
    fp::Precision precision;
    std::optional<c10::Device> device; // the device to compute on; none: the shard's

    at::Tensor unsharded;      // [total] in the compute dtype; its storage has no memory while it is freed
    at::Tensor unsharded_data; // the same memory, another version counter: autograd does not see writes to it
    at::Tensor filling;        // the same memory, another storage: a gather writes to it while unsharded is hidden
    bool keeps_size = true;    // the storage of unsharded tells its size while it is freed
    bool is_hidden = false;    // an access to unsharded or a view raises, as values may be missing
    fp_data_state data = FP_DATA_SHARDED; // the state of unsharded; only fp::move changes it
    at::Tensor secondary_shard;           // [total / secondary.n] in the compute dtype: secondary.group gathers from it
    at::Tensor next_secondary_shard;      // nested: the next one, while it is gathered
    fp::Pending gather;
    fp::Packed packed;
    // [total] in precision.accumulates_in(shard); nested: [total / secondary.n], reduced over the secondary group
    fp::Accumulated accumulated;
    at::Tensor unreduced;    // nested: [total], gradients of this backward; they are reduced once no more can come
    at::Tensor reduce_input; // of the pending reduction, in precision.reduces_in(shard)
    // Before the wait: where the reduction writes. It may be a slice of reduce_input, or the other rank's part, which is added
    // after the wait (Way in fp_reduce.cpp). After the wait: the reduced gradient; on the host it is valid after has_arrived.
    at::Tensor reduce_output;
    fp::Pending reduction;
    bool is_divided = false;                       // the reduced gradient is divided by postdivide already
    std::optional<fp::Mark> was_read;              // after the copy from a shard on the host; none: nothing to wait for
    std::optional<fp::Mark> was_filled;            // after a gather by a copy, without a collective
    std::optional<fp::Mark> has_arrived;           // after the copy to a shard's gradient on the host
    fp::Home home;                                 // of the memory of unsharded
    fp_gradient_state gradient = FP_GRADIENT_NONE; // only fp::move changes it
    uint32_t trained = 0;                          // a hash of which parameters require grad
    fp::StorageCount sources;                      // storages of the shard
    std::shared_ptr<fp::UnitRef> unit;             // the unit of the views; null before there are any
    fp::NodePtr node;                              // behind the views; null: they have none
    int64_t shown_version = 0;                     // the version of unsharded for which show_version() was called last
    int64_t seen_version = 0;                      // the version of unsharded up to which user writes were taken

    fp_flat_buffer(const fp_flat_buffer_plan &plan, fp::Precision dtypes) : fp_flat_buffer_plan(plan), precision(dtypes)
    {
    }

    // Whether code outside may read the memory of unsharded by its address: then it must not be freed or written to. The state
    // FP_DATA_BORROWED is another thing: unsharded is in the shard's memory.
    bool is_borrowed() const
    {
        return unsharded.defined() && data != FP_DATA_BORROWED &&
               (!fp::has_own_memory(fp::storage_of(unsharded)) || fp::has_borrower(fp::storage_of(unsharded)));
    }
    bool is_under_way() const
    {
        return data == FP_DATA_REFRESHING || data == FP_DATA_GATHERING || data == FP_DATA_ABANDONED;
    }
    // The gathered values are there, or a pending gather writes them.
    bool is_gathered() const
    {
        return data == FP_DATA_GATHERING || data == FP_DATA_UNSHARDED;
    }
    int64_t part_numel() const
    {
        return geometry->total / secondary.n;
    }

    c10::Device device_for(const at::Tensor &shard) const
    {
        return device.value_or(shard.device());
    }
};

namespace fp {

// The bytes of the unsharded tensor.
inline size_t
bytes_of(const fp_flat_buffer &flat)
{
    return static_cast<size_t>(flat.geometry->total) * flat.unsharded.itemsize();
}

// The unit's name for errors; null before there are views.
inline const char *
name_of(const fp_flat_buffer &flat)
{
    return flat.unit ? flat.unit->name.c_str() : nullptr;
}

// The only way to another state. RuntimeError, with nothing changed, where the table in core/fp_state.c has no such move.
void move(fp_flat_buffer &flat, fp_data_event event);
void move(fp_flat_buffer &flat, fp_gradient_event event);
void check(const fp_flat_buffer &flat, fp_gradient_event event); // the same error, without the move

// The unsharded tensor is in the shard's memory. If others hold that memory (`kept = weight.data`), leave it to them with its
// values, and move the shard and our tensors to a copy. FlatParam.leave_memory() does this with original parameters.
void leave_memory(fp_flat_buffer &flat, PyObject *shard, PyObject *const *views);

// ---- fp_gather.cpp ----

// Whether the pending gather may never end: then it becomes abandoned, and its memory must not be freed. An abandoned gather
// that has ended since counts as failed; then the result is false.
bool is_lost(fp_flat_buffer &flat);

// Wait for the pending gather, if there is one. It throws if the gather has failed: then nothing is gathered. It also throws if
// the wait was interrupted: then the gather goes on, and the wait may be repeated.
void wait_for_gather(fp_flat_buffer &flat);

// Let the current stream wait for a gather without a work, before it uses the memory.
void wait_for_fill(fp_flat_buffer &flat);

// ---- fp_buffer_views.cpp ----

// Whether view lies at the place of parameter i in the flat buffer.
bool is_view_at(const fp_flat_buffer &flat, PyObject *view, size_t i);

// Whether a and b, equally long and of one dtype, have the same bits. So a NaN equals itself, and 0.0 is not -0.0.
bool has_same_bytes(const at::Tensor &a, const at::Tensor &b);

// Tell autograd that the views are up to date with unsharded, which was changed in place; without it autograd would make
// another history for them.
void show_version(fp_flat_buffer &flat, PyObject *const *views);
// Count one more change of unsharded, so that autograd refuses graphs that need the old values. Then show_version().
void change_version(fp_flat_buffer &flat, PyObject *const *views);

} // namespace fp
