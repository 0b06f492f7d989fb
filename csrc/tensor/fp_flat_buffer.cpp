// tensor/fp_flat_buffer.cpp -- the storage of one flat parameter: make it for a shard, free it with a reason, leave it to a
// borrower; see fp_flat_buffer.h.
#include "tensor/fp_flat_buffer.hpp"

#include <cstdio>
#include <cstdlib>

#include <ATen/ops/empty.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include "tensor/fp_convert.hpp"

namespace fp {
namespace {

std::optional<at::ScalarType>
dtype_from(PyObject *object)
{
    if (object == Py_None) {
        return std::nullopt;
    }
    TORCH_CHECK_TYPE(THPDtype_Check(object), "expected a torch.dtype, got ", Py_TYPE(object)->tp_name);
    const at::ScalarType dtype = reinterpret_cast<THPDtype *>(object)->scalar_type;
    TORCH_CHECK_TYPE(at::isFloatingType(dtype) || at::isComplexType(dtype),
                     "expected a floating-point torch.dtype to compute or reduce in, got ", dtype);
    return dtype;
}

std::optional<c10::Device>
device_from(PyObject *object)
{
    if (object == Py_None) {
        return std::nullopt;
    }
    TORCH_CHECK_TYPE(THPDevice_Check(object), "expected a torch.device, got ", Py_TYPE(object)->tp_name);
    return reinterpret_cast<THPDevice *>(object)->device;
}

// A new freed storage for the unsharded tensor.
at::Tensor
freed_unsharded(const fp_flat_buffer &flat, const at::TensorOptions &options, const char *reason)
{
    return freed_source(options, static_cast<size_t>(flat.geometry->total) * options.dtype().itemsize(), reason,
                        flat.keeps_size);
}

// Move our tensors to the storage of source. Others that hold the old storage keep it, with its values.
void
leave_storage(fp_flat_buffer &flat, PyObject *const *views, const at::Tensor &source)
{
    for (size_t i = 0; views != nullptr && i < flat.geometry->views.size(); i++) {
        if (is_view_at(flat, views[i], i)) {
            move_to_storage(THPVariable_Unpack(views[i]), source);
        }
    }
    move_to_storage(flat.unsharded, source);
    move_to_storage(flat.unsharded_data, source);
}

// Make source's storage that of the unsharded tensor. borrowed: source is the shard; else the storage is freed.
void
set_storage(fp_flat_buffer &flat, const at::Tensor &source, bool borrowed)
{
    const int64_t total = flat.geometry->total, offset = borrowed ? source.storage_offset() : 0;
    at::Tensor unsharded = alias(source, total, int64_t{1}, offset);
    at::Tensor unsharded_data = alias(source, total, int64_t{1}, offset);
    move(flat, borrowed ? FP_DATA_BORROW : FP_DATA_PREPARE);
    flat.is_hidden = false;
    flat.unsharded = std::move(unsharded);
    flat.unsharded_data = std::move(unsharded_data);
    flat.shown_version = flat.seen_version = flat.unsharded._version();
}

// Copy this rank's part of the gathered values into a new secondary shard, if there is to be one and is none.
void
cut_secondary_shard(fp_flat_buffer &flat)
{
    if (flat.is_gathered() && flat.secondary.group != nullptr && !flat.secondary_shard.defined()) {
        const int64_t numel = flat.part_numel();
        const Plainly plainly;
        check_memory(flat.unsharded_data, name_of(flat));
        flat.secondary_shard = alias(flat.unsharded_data, numel, int64_t{1}, flat.secondary.rank * numel).clone();
    }
}

// The state after event; RuntimeError, which names the unit, where the table has no such move.
unsigned
next_state(const fp_flat_buffer &flat, const fp_state_table &table, unsigned state, unsigned event)
{
    unsigned next = state;
    if (fp_state_next(&table, state, event, &next) != FP_OK) {
        char text[FP_STATE_MESSAGE_BYTES];
        fp_state_message(&table, state, event, text, sizeof text);
        TORCH_CHECK(false, flat.unit ? flat.unit->name : "a flat parameter", ": ", text);
    }
    return next;
}

} // namespace

void
leave_memory(fp_flat_buffer &flat, PyObject *shard_object, PyObject *const *views)
{
    const at::Tensor &shard = unpack(shard_object);
    const size_t ours = 4 + flat.geometry->views.size(); // shard, its _local_shard; unsharded, unsharded_data, views
    // A shard that is a part of a secondary shard cannot move alone
    if (shard.storage().use_count() > ours && shard.storage_offset() == 0 && flat.outer_group == nullptr) {
        const at::Tensor source = shard.detach().clone();
        move_to_storage(shard, source);
        leave_storage(flat, views, source);
        THPObjectPtr local(THPVariable_Wrap(source));
        if (local.get() == nullptr || PyObject_SetAttrString(shard_object, "_local_shard", local.get()) < 0) {
            throw python_error();
        }
    }
}

void
move(fp_flat_buffer &flat, fp_data_event event)
{
    flat.data = static_cast<fp_data_state>(next_state(flat, fp_data_moves, flat.data, event));
}

void
move(fp_flat_buffer &flat, fp_gradient_event event)
{
    flat.gradient = static_cast<fp_gradient_state>(next_state(flat, fp_gradient_moves, flat.gradient, event));
}

void
check(const fp_flat_buffer &flat, fp_gradient_event event)
{
    next_state(flat, fp_gradient_moves, flat.gradient, event);
}

} // namespace fp

extern "C" {

fp_flat_buffer *
fp_flat_buffer_new(const fp_flat_buffer_options *options)
{
    return fp::guarded<fp_flat_buffer *>(nullptr, [&] {
        const fp_flat_buffer_plan &plan = options->plan;
        TORCH_CHECK_VALUE(plan.primary.n >= 1 && plan.primary.rank >= 0 && plan.primary.rank < plan.primary.n &&
                              plan.shard_numel >= 1,
                          "expected 0 <= rank < shards and a shard of at least 1 element, got rank ", plan.primary.rank,
                          ", shards ", plan.primary.n, ", shard_numel ", plan.shard_numel);
        TORCH_CHECK_VALUE((plan.primary.n == 1) == (plan.primary.group == nullptr),
                          "a group to shard over goes with more than one shard");
        const int per_part = plan.secondary.n >= 1 ? plan.primary.n / plan.secondary.n : 0;
        TORCH_CHECK_VALUE(per_part >= 1 && plan.primary.n % plan.secondary.n == 0 && plan.secondary.rank >= 0 &&
                              plan.secondary.rank < plan.secondary.n,
                          "expected the copy to be shared by a divisor of ", plan.primary.n, " ranks, got rank ",
                          plan.secondary.rank, " of ", plan.secondary.n);
        TORCH_CHECK_VALUE((plan.secondary.n == 1) == (plan.secondary.group == nullptr) &&
                              (plan.secondary.group != nullptr || plan.outer_group == nullptr),
                          "a group to gather over goes with a copy that is shared");
        TORCH_CHECK_VALUE(plan.outer_group == nullptr || plan.primary.rank / per_part == plan.secondary.rank,
                          "expected shard ", plan.primary.rank, " to lie in part ", plan.secondary.rank, " of ",
                          plan.secondary.n);
        const fp::Precision precision = {.compute_dtype = fp::dtype_from(options->compute_dtype),
                                         .reduce_dtype = fp::dtype_from(options->reduce_dtype),
                                         .keep_reduce_dtype = options->keep_reduce_dtype != 0,
                                         .full_precision = options->full_precision != 0};
        auto flat = std::make_unique<fp_flat_buffer>(plan, precision);
        flat->geometry = options->geometry->shared;
        flat->device = fp::device_from(options->device);
        return flat.release();
    });
}

const fp_flat_buffer_plan *
fp_flat_buffer_plan_of(const fp_flat_buffer *flat) noexcept
{
    return flat;
}

void
fp_flat_buffer_free_groups(const fp_flat_buffer_plan *plan)
{
    for (fp_group *group : {plan->primary.group, plan->replicate_group, plan->secondary.group, plan->outer_group}) {
        fp_group_free(group);
    }
}

void
fp_flat_buffer_free(fp_flat_buffer *flat)
{
    if (flat == nullptr) {
        return;
    }
    fp::unless_failed([&] { fp::wait_for_fill(*flat); });
    fp::unless_failed([&] { flat->accumulated.drop_reload(); });
    const fp_flat_buffer_plan plan = *flat;
    delete flat;
    fp_flat_buffer_free_groups(&plan);
}

int
fp_flat_buffer_prepare(fp_flat_buffer *flat, PyObject *shard_object, const char *reason)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &shard = fp::unpack(shard_object);
        TORCH_CHECK_VALUE(shard.dim() == 1 && shard.numel() == flat->shard_numel && shard.is_contiguous(),
                          "expected a contiguous shard of ", flat->shard_numel, " elements, got shape ", shard.sizes(),
                          " and strides ", shard.strides());
        const at::ScalarType dtype = flat->precision.computes_in(shard);
        const c10::Device device = flat->device_for(shard);
        const bool borrowed = flat->primary.n == 1 && dtype == shard.scalar_type() && device == shard.device();
        if (flat->unsharded.defined() && flat->unsharded.scalar_type() == dtype && flat->unsharded.device() == device &&
            (flat->data == FP_DATA_BORROWED) == borrowed &&
            (!borrowed || (fp::storage_of(flat->unsharded) == fp::storage_of(shard) &&
                           flat->unsharded.storage_offset() == shard.storage_offset()))) {
            return 0;
        }
        const fp::Plainly plainly;
        const at::TensorOptions options = shard.options().dtype(dtype).device(device).requires_grad(false);
        fp::set_storage(*flat, borrowed ? shard : fp::freed_unsharded(*flat, options, reason), borrowed);
        flat->secondary_shard.reset();
        return 1;
    });
}

int
fp_flat_buffer_renew(fp_flat_buffer *flat, const char *reason)
{
    return fp::guarded(-1, [&] {
        if (!flat->is_borrowed()) {
            return 0;
        }
        const fp::Plainly plainly;
        fp::wait_for_gather(*flat);
        flat->unsharded.unsafeGetTensorImpl()->bump_version(); /* autograd refuses graphs that need the old values */
        c10::StorageImpl *storage = fp::storage_of(flat->unsharded);
        fp::set_freed_reason(storage, fp::has_borrower(storage) ? nullptr : reason);
        fp::set_storage(*flat, fp::freed_unsharded(*flat, flat->unsharded_data.options(), reason), false);
        return 1;
    });
}

void
fp_flat_buffer_lose_size(fp_flat_buffer *flat) noexcept
{
    flat->keeps_size = false;
}

void
fp_flat_buffer_compute_in_full(fp_flat_buffer *flat, int in_full) noexcept
{
    flat->precision.in_full = in_full != 0;
}

int
fp_flat_buffer_has_full_precision(const fp_flat_buffer *flat) noexcept
{
    return flat->precision.full_precision ? 1 : 0;
}

int
fp_flat_buffer_lacks_memory(const fp_flat_buffer *flat, PyObject *shard_object, int64_t *present, int64_t *needed)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &shard = fp::unpack(shard_object);
        const bool is_there =
            flat->is_gathered() && fp::memory_of(fp::storage_of(flat->unsharded)) < fp::bytes_of(*flat);
        const at::Tensor &tensor = is_there ? flat->unsharded : shard;
        *present = static_cast<int64_t>(fp::memory_of(fp::storage_of(tensor)));
        *needed = static_cast<int64_t>(fp::bytes_for(tensor));
        return *present < *needed ? 1 : 0;
    });
}

int64_t
fp_flat_buffer_sources(fp_flat_buffer *flat, PyObject *shard_object)
{
    return flat->sources.see(THPVariable_Unpack(shard_object).storage());
}

int
fp_flat_buffer_release(fp_flat_buffer *flat, PyObject *const *views, const char *reason)
{
    return fp::guarded(-1, [&] {
        if (fp::is_lost(*flat)) {
            return; /* the gather may still write to the memory */
        }
        fp::wait_for_gather(*flat);
        if (flat->data != FP_DATA_BORROWED && !flat->stays_full && flat->unsharded.defined()) {
            fp::cut_secondary_shard(*flat);
            fp::move(*flat, FP_DATA_FORGET);
            flat->home.move_out();
            if (fp::has_borrower(fp::storage_of(flat->unsharded))) {
                const fp::Plainly plainly;
                fp::leave_storage(*flat, views, fp::freed_unsharded(*flat, flat->unsharded_data.options(), reason));
            }
            else if (flat->is_borrowed()) {
                fp::set_freed_reason(fp::storage_of(flat->unsharded),
                                     reason); /* the storage is freed with its last reference */
            }
            else {
                fp::resize_storage(fp::storage_of(flat->unsharded), 0, reason, flat->keeps_size);
            }
        }
    });
}

int
fp_flat_buffer_cut_secondary_shard(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] { fp::cut_secondary_shard(*flat); });
}

int
fp_flat_buffer_is_void(const fp_flat_buffer *flat) noexcept
{
    return flat->home.is_void();
}

int
fp_flat_buffer_is_captured(const fp_flat_buffer *flat) noexcept
{
    return flat->unsharded.defined() && fp::is_captured(flat->unsharded.device());
}

int
fp_flat_buffer_is_gathered(const fp_flat_buffer *flat) noexcept
{
    return flat->is_gathered();
}

int
fp_flat_buffer_has_values(const fp_flat_buffer *flat) noexcept
{
    return flat->is_gathered() || flat->secondary_shard.defined();
}

int
fp_flat_buffer_has_values_of(fp_flat_buffer *flat, PyObject *shard_object)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        fp::wait_for_gather(*flat);
        const at::Tensor &values = flat->is_gathered() ? flat->unsharded_data : flat->secondary_shard;
        const int64_t first = flat->primary.rank * flat->shard_numel -
                              (flat->is_gathered() ? 0 : flat->secondary.rank * flat->part_numel());
        if (!values.defined() || first < 0 || first + flat->shard_numel > values.numel()) {
            return 0;
        }
        fp::check_memory(shard, fp::name_of(*flat));
        fp::check_memory(values, fp::name_of(*flat));
        const at::Tensor now = at::empty({flat->shard_numel}, values.options());
        fp::convert(now, shard.to(now.device()), {});
        return fp::has_same_bytes(now,
                                  fp::alias(values, flat->shard_numel, int64_t{1}, values.storage_offset() + first))
                   ? 1
                   : 0;
    });
}

int
fp_flat_buffer_forget_gathered(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        if (!fp::is_lost(*flat)) {
            fp::wait_for_gather(*flat);
            fp::move(*flat, FP_DATA_FORGET);
        }
    });
}

int
fp_flat_buffer_forget_values(fp_flat_buffer *flat)
{
    const int status = fp_flat_buffer_forget_gathered(flat); /* first: a wait may read the two below */
    flat->secondary_shard.reset();
    flat->next_secondary_shard.reset();
    return status;
}

PyObject *
fp_flat_buffer_secondary_shard(fp_flat_buffer *flat)
{
    if (!flat->secondary_shard.defined()) {
        Py_RETURN_NONE;
    }
    return fp::guarded<PyObject *>(nullptr, [&] { return THPVariable_Wrap(flat->secondary_shard); });
}

PyObject *
fp_flat_buffer_unsharded(fp_flat_buffer *flat)
{
    return fp::guarded<PyObject *>(nullptr, [&] { return THPVariable_Wrap(flat->unsharded_data); });
}

#ifdef FP_CHECK

void
fp_flat_buffer_check(const fp_flat_buffer *flat, const char *where) noexcept
{
    const auto hold = [&](bool holds, const char *condition) {
        if (!holds) {
            std::fprintf(stderr, "flatparam: %s: in %s does not hold: %s\n", flat->unit ? fp::name_of(*flat) : "a unit",
                         where, condition);
            std::abort();
        }
    };
#define HOLDS(condition) hold(condition, #condition)
#define IMPLIES(condition, other) hold(!(condition) || (other), #condition " implies " #other)
    HOLDS(flat->unsharded.defined() == flat->unsharded_data.defined());
    IMPLIES(flat->data != FP_DATA_SHARDED, flat->unsharded.defined());
    IMPLIES(flat->gather, flat->is_under_way());
    IMPLIES(flat->node != nullptr, flat->unit != nullptr);
    IMPLIES(flat->gather, flat->gather.group != nullptr);
    IMPLIES(flat->reduction, flat->reduction.group != nullptr);
    IMPLIES(flat->secondary_shard.defined(), flat->secondary.group != nullptr);
    IMPLIES(flat->next_secondary_shard.defined(), flat->outer_group != nullptr);
    IMPLIES(flat->unreduced.defined(), flat->outer_group != nullptr);
    IMPLIES(flat->accumulated.on_host, flat->offloads && flat->accumulated.host.defined());
    IMPLIES(flat->accumulated.on_host, !flat->accumulated.tensor.defined());
    IMPLIES(flat->accumulated.coming.defined(), flat->accumulated.on_host);
    IMPLIES(flat->gradient == FP_GRADIENT_NONE || flat->gradient == FP_GRADIENT_PACKED, !flat->reduction);
    IMPLIES(flat->gradient == FP_GRADIENT_NONE, !flat->reduce_input.defined() && !flat->reduce_output.defined());
    IMPLIES(flat->gradient == FP_GRADIENT_PACKED, flat->reduce_input.defined());
    IMPLIES(flat->seen_version != flat->shown_version, flat->node != nullptr || flat->unsharded.defined());
#undef HOLDS
#undef IMPLIES
}

#endif

} // extern "C"
