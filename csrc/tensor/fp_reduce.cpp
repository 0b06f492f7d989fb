// tensor/fp_reduce.cpp -- the gradients of one flat parameter: pack or accumulate them, and reduce them to the gradient of the
// shard; see fp_flat_buffer.h. [total] tensors unless a comment says otherwise:
//
//   gradients of views -> reduce_input           packed in reduce_dtype, divided by predivide
//   reduce_input -> reduce_output [shard_numel]  reduce-scatter over the primary group. in_order: an all-to-all to [total]
//   reduce_output                                all-reduce over replicate_group, if there is one
//   reduce_output                                divided by postdivide; copied if the shard lies on the host
//
//   nested, over two groups one after the other:
//   reduce_input -> reduce_output [part]         over the secondary group; added to accumulated
//   accumulated -> reduce_output [shard_numel]   over outer_group
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <span>

#include "tensor/fp_convert.hpp"
#include "tensor/fp_flat_buffer.hpp"
#include "tensor/fp_launch.hpp"

namespace fp {
namespace {

// Zeros for gradients that there are not. in_order: -0.0, to which a sum adds nothing, not even the sign of a zero.
at::Tensor
none(const fp_flat_buffer &flat, at::Tensor zeros)
{
    return flat.in_order != 0 ? zeros.neg_() : zeros;
}

// target (+)= the gradients at their places * scale; none() for undefined ones.
void
pack_gradients(const fp_flat_buffer &flat, const at::Tensor &target, const fp_gradients &gradients, const How &how)
{
    pack_pieces(target, *flat.geometry, gradients.list, flat.unsharded.options(), how, name_of(flat));
    for (size_t i = 0; flat.in_order != 0 && !how.accumulate && i < gradients.list.size(); i++) {
        if (!gradients.list[i].defined()) {
            none(flat, alias(target, flat.geometry->views[i]));
        }
    }
}

// Whether the first of two collectives is pending.
bool
is_reducing_inner(const fp_flat_buffer &flat)
{
    return flat.gradient == FP_GRADIENT_REDUCING_INNER || flat.gradient == FP_GRADIENT_REDUCING_PARTIAL;
}

// The factor by which the collective multiplies its addends, so that no division is left: 1 / postdivide where that is a
// power of two, and so exact, and where the backend can; else 1.
double
factor_over(const fp_flat_buffer &flat, const fp_group &group, const at::Tensor &tensor)
{
    int exponent;
    const bool exact = std::frexp(flat.postdivide, &exponent) == 0.5;
    return exact && flat.outer_group == nullptr && !flat.is_divided && premultiplies(group, tensor)
               ? 1.0 / flat.postdivide
               : 1.0;
}

// How a gradient is reduced over a group. All ranks of the group choose alike.
enum class Way {
    python,   // by a call of Python
    backend,  // by the backend's reduce-scatter
    in_place, // gloo, whose reduce-scatter is an all-reduce of a copy: by an all-reduce, whose wait can be interrupted
    ordered,  // each rank gets the parts of all ranks: none is added here
    exchange, // gloo with two ranks: each sends the other its part, and adds. The bits are the same in either order. It takes
              // 0.55 to 0.7 of the time of the all-reduce (4 to 64 MiB), as half of the bytes are sent
};

Way
way_over(const fp_flat_buffer &flat, const fp_group &group, PyObject *collectives)
{
    if (collectives != nullptr || !group.native) {
        return Way::python;
    }
    if (flat.in_order != 0) {
        return Way::ordered;
    }
    if (!group.sliced) {
        return Way::backend;
    }
    return group.native->getSize() == 2 && flat.reduce_input.is_cpu() ? Way::exchange : Way::in_place;
}

// The part of reduce_input that the rank `after` this one keeps: [total / size of group].
at::Tensor
part_of(const fp_flat_buffer &flat, const fp_group &group, int after)
{
    const int64_t size = group.native->getSize(), numel = flat.reduce_input.numel() / size;
    const int64_t rank = (group.native->getRank() + after) % size;
    return alias(flat.reduce_input, numel, int64_t{1}, flat.reduce_input.storage_offset() + rank * numel);
}

// Wait for the pending reduction, if there is one. Throws: it has failed, and fails again in the next call; or the wait was
// interrupted, and may be repeated.
void
wait_for_reduction(fp_flat_buffer &flat)
{
    const c10::intrusive_ptr<c10d::Work> reduction = flat.reduction.work;
    const bool scatters = flat.reduce_input.defined() && flat.reduce_output.numel() < flat.reduce_input.numel();
    try {
        wait_for(flat.reduction);
        if (reduction && scatters && way_over(flat, *flat.reduction.group, nullptr) == Way::exchange) {
            const How how = {.scale = std::nullopt, .accumulate = true};
            convert(flat.reduce_output, part_of(flat, *flat.reduction.group, 0), how);
            flat.reduce_input.reset();
        }
    }
    catch (...) {
        flat.reduction.work = reduction; // a failed work fails again
        throw;
    }
    if (scatters && flat.reduce_input.defined() &&
        storage_of(flat.reduce_output) == storage_of(flat.reduce_input)) { /* reduced in place */
        check_memory(flat.reduce_output, name_of(flat));
        flat.reduce_output = flat.reduce_output.clone();
    }
}

// Start to reduce reduce_input over group to reduce_output, which gets numel elements.
void
reduce_over(fp_flat_buffer &flat, fp_group &group, int64_t numel, PyObject *collectives)
{
    check_memory(flat.reduce_input, name_of(flat)); /* it may be the accumulated gradient, which users reach by .grad */
    const Way way = way_over(flat, group, collectives);
    if (way == Way::in_place) {
        flat.reduce_output = part_of(flat, group, 0);
    }
    else {
        flat.reduce_output = empty_for(&group, numel, flat.reduce_input.options());
    }
    announce(group, FP_EVENT_REDUCES, flat.trained);
    switch (way) {
        case Way::python:
            call_python(collectives, flat.in_order != 0 ? "exchange" : "reduce_scatter", flat.reduce_output,
                        flat.reduce_input, group);
            break;
        case Way::in_place:
            flat.reduction.begin(group, all_reduce(group, flat.reduce_input));
            break;
        case Way::exchange:
            flat.reduction.begin(group, exchange(group, flat.reduce_output, part_of(flat, group, 1), true));
            break;
        case Way::ordered:
            flat.reduction.begin(group, exchange(group, flat.reduce_output, flat.reduce_input, false));
            break;
        case Way::backend: {
            const double factor = factor_over(flat, group, flat.reduce_input);
            flat.reduction.begin(group, reduce_scatter(group, flat.reduce_output, flat.reduce_input, factor));
            flat.is_divided = factor != 1.0;
            break;
        }
    }
}

at::TensorOptions
reduce_options(const fp_flat_buffer &flat, const at::Tensor &shard)
{
    return shard.options().device(flat.unsharded.device()).requires_grad(false).dtype(flat.precision.reduces_in(shard));
}

// source * scale as it is reduced: source itself, changed in place, if it has the dtype and device of options; else a converted
// copy.
at::Tensor
as_reduce_input(at::Tensor source, const at::TensorOptions &options, std::optional<double> scale)
{
    check_memory(source);
    if (source.dtype() == options.dtype() && source.device() == options.device()) {
        if (scale) {
            source.mul_(*scale);
        }
        return source;
    }
    at::Tensor wire = at::empty(source.sizes(), options);
    convert(wire, source, {.scale = scale, .accumulate = false});
    return wire;
}

// The divisor that is left for the reduced gradient.
double
remaining_divisor(const fp_flat_buffer &flat)
{
    return flat.is_divided ? 1.0 : flat.postdivide;
}

// The gradient that the next reduction adds to what comes, on the device; undefined: there is none.
at::Tensor &
addend_of(fp_flat_buffer &flat)
{
    if (flat.outer_group != nullptr) {
        return flat.unreduced;
    }
    flat.accumulated.reload(flat.unsharded.device(), name_of(flat));
    return flat.accumulated.tensor;
}

// With offloads, move the accumulated gradient to host memory; else do nothing.
void
offload(fp_flat_buffer &flat)
{
    if (flat.offloads) {
        flat.accumulated.offload(name_of(flat));
    }
}

// Start to copy the reduced gradient to the device of the shard, divided and in its final dtype. On the same device it
// stays as it was reduced, and the reader of fp_reduced divides it.
void
send(fp_flat_buffer &flat, const at::Tensor &shard)
{
    check(flat, FP_GRADIENT_SEND);
    at::Tensor result = std::move(flat.reduce_output);
    flat.reduce_output.reset();
    flat.reduce_input.reset();
    try {
        if (result.device() != shard.device()) {
            const at::ScalarType dtype = flat.precision.of_gradient(result, shard);
            result = divided(std::move(result), remaining_divisor(flat), dtype);
            flat.is_divided = true;
            at::Tensor there = empty_beside(result.device(), result.sizes(), result.options().device(shard.device()));
            if (has_streams(result.device())) {
                flat.has_arrived.emplace(copy_out(there, std::move(result)));
            }
            else {
                there.copy_(result);
            }
            result = std::move(there);
        }
    }
    catch (...) {
        move(flat, FP_GRADIENT_FORGET); // the gradient may be divided already: it cannot be sent again
        throw;
    }
    flat.reduce_output = std::move(result);
    move(flat, FP_GRADIENT_SEND);
}

// The factor of packed gradients; none: 1.
std::optional<double>
predivision(const fp_flat_buffer &flat)
{
    return flat.predivide != 1.0 ? std::optional<double>(1.0 / flat.predivide) : std::nullopt;
}

// Make reduce_input of the accumulated gradient and gradients (null: none); zeros if there is neither. The accumulated
// gradient's memory is used for it where dtype and device allow.
void
make_reduce_input(fp_flat_buffer &flat, const fp_gradients *gradients, const at::TensorOptions &options)
{
    const std::optional<double> scale = predivision(flat);
    const WithoutGil released;
    at::Tensor &addend = addend_of(flat);
    if (addend.defined()) {
        if (gradients != nullptr) {
            pack_gradients(flat, addend, *gradients, {.scale = std::nullopt, .accumulate = true});
        }
        flat.reduce_input = as_reduce_input(std::move(addend), options, scale);
        addend.reset();
    }
    else if (gradients != nullptr) {
        flat.reduce_input = empty_for(flat.primary.group, flat.geometry->total, options);
        pack_gradients(flat, flat.reduce_input, *gradients, {.scale = scale, .accumulate = false});
    }
    else {
        flat.reduce_input = none(flat, at::zeros({flat.geometry->total}, options));
    }
}

// Add to reduce_input the gradients, and the gradient accumulated since it was made.
void
add_to_reduce_input(fp_flat_buffer &flat, const fp_gradients &gradients)
{
    const How how = {.scale = predivision(flat), .accumulate = true};
    const WithoutGil released;
    at::Tensor &addend = addend_of(flat);
    if (addend.defined()) {
        convert(flat.reduce_input, addend, how);
        addend.reset();
    }
    pack_gradients(flat, flat.reduce_input, gradients, how);
}

// Nested: add reduce_output, reduced over the secondary group, to the accumulated gradient, in the shard's dtype.
void
accumulate_partial(fp_flat_buffer &flat, const at::Tensor &shard)
{
    const WithoutGil released;
    flat.accumulated.reload(flat.unsharded.device(), name_of(flat));
    if (flat.accumulated.tensor.defined()) {
        convert(flat.accumulated.tensor, flat.reduce_output, {.scale = std::nullopt, .accumulate = true});
    }
    else {
        flat.accumulated.put(flat.reduce_output.to(shard.scalar_type()));
    }
    flat.reduce_output.reset();
    if (flat.gradient == FP_GRADIENT_REDUCING_PARTIAL) {
        offload(flat);
    }
}

// Nested: start to reduce the accumulated gradient over outer_group to the shard; zeros if there is none.
void
reduce_partial(fp_flat_buffer &flat, const at::Tensor &shard, PyObject *collectives)
{
    check(flat, FP_GRADIENT_REDUCE);
    flat.accumulated.reload(flat.unsharded.device(), name_of(flat));
    const at::TensorOptions options = reduce_options(flat, shard);
    flat.reduce_input = flat.accumulated.tensor.defined()
                            ? as_reduce_input(flat.accumulated.tensor, options, std::nullopt)
                            : at::zeros({flat.part_numel()}, options);
    flat.accumulated.tensor.reset();
    reduce_over(flat, *flat.outer_group, flat.shard_numel, collectives);
    move(flat, FP_GRADIENT_REDUCE);
}

} // namespace
} // namespace fp

extern "C" {

void
fp_flat_buffer_average_elsewhere(fp_flat_buffer *flat)
{
    flat->predivide = flat->postdivide = 1.0;
}

int
fp_flat_buffer_accumulate(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard_object)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        const bool nested = flat->outer_group != nullptr;
        const fp::WithoutGil released;
        at::Tensor &addend = fp::addend_of(*flat);
        const bool first = !addend.defined();
        const at::TensorOptions options = fp::reduce_options(*flat, shard).dtype(flat->precision.accumulates_in(shard));
        at::Tensor target = first ? at::empty({flat->geometry->total}, options) : addend;
        fp::pack_gradients(*flat, target, *gradients, {.scale = std::nullopt, .accumulate = !first});
        if (nested || !first) {
            addend = std::move(target);
        }
        else {
            flat->accumulated.put(std::move(target));
        }
        if (!nested) {
            fp::offload(*flat);
        }
    });
}

int
fp_flat_buffer_pack(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard_object)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        fp::check(*flat, FP_GRADIENT_PACK);
        if (flat->gradient == FP_GRADIENT_PACKED) {
            fp::add_to_reduce_input(*flat, *gradients);
        }
        else {
            fp::make_reduce_input(*flat, gradients, fp::reduce_options(*flat, shard));
        }
        fp::move(*flat, FP_GRADIENT_PACK);
    });
}

int
fp_flat_buffer_start_reduce(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard_object,
                            PyObject *collectives, int how_far)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        const bool nested = flat->outer_group != nullptr;
        if (nested && how_far == FP_REDUCE_OUTER) {
            fp::reduce_partial(*flat, shard, collectives);
            return 0;
        }
        const at::TensorOptions options = fp::reduce_options(*flat, shard);
        const bool inner = nested || flat->replicate_group != nullptr;
        const fp_gradient_event event = nested && how_far == FP_REDUCE_INNER ? FP_GRADIENT_REDUCE_PARTIAL
                                        : inner                              ? FP_GRADIENT_REDUCE_INNER
                                                                             : FP_GRADIENT_REDUCE;
        fp::check(*flat, event);
        if (flat->gradient != FP_GRADIENT_PACKED) {
            fp::make_reduce_input(*flat, gradients, options);
        }
        flat->is_divided = false;
        if (flat->primary.n > 1) {
            fp_group *const group = nested ? flat->secondary.group : flat->primary.group;
            const int64_t numel = nested                ? flat->part_numel()
                                  : flat->in_order != 0 ? flat->geometry->total
                                                        : flat->shard_numel;
            fp::reduce_over(*flat, *group, numel, collectives);
            fp::move(*flat, event);
            return 0;
        }
        flat->reduce_output = flat->reduce_input;
        fp::move(*flat, event);
        return inner ? fp_flat_buffer_advance_reduce(flat, shard_object, collectives) : 0;
    });
}

void
fp_flat_buffer_note_trained(fp_flat_buffer *flat, PyObject *const *owners, Py_ssize_t n) noexcept
{
    flat->trained = fp::hash_of(std::span(owners, static_cast<size_t>(n)),
                                [](PyObject *owner) { return THPVariable_Unpack(owner).requires_grad() ? 1U : 0U; });
}

int
fp_flat_buffer_is_packed(const fp_flat_buffer *flat) noexcept
{
    return flat->gradient == FP_GRADIENT_PACKED;
}

int
fp_flat_buffer_awaits_replicas(const fp_flat_buffer *flat) noexcept
{
    return flat->gradient == FP_GRADIENT_REDUCING_INNER && flat->replicate_group != nullptr;
}

int
fp_flat_buffer_advance_reduce(fp_flat_buffer *flat, PyObject *shard_object, PyObject *collectives)
{
    return fp::guarded(-1, [&] {
        if (flat->gradient == FP_GRADIENT_NONE || flat->gradient == FP_GRADIENT_PACKED) {
            return 0;
        }
        if (flat->gradient == FP_GRADIENT_ARRIVING) {
            return flat->has_arrived && fp::has_come(flat->has_arrived->event) ? 1 : 0;
        }
        fp::wait_for_reduction(*flat);
        if (flat->primary.n > 1) {
            flat->reduce_input.reset();
        }
        const fp::Plainly plainly;
        if (flat->gradient == FP_GRADIENT_REDUCING) {
            const at::Tensor &shard = fp::unpack(shard_object);
            if (flat->unsharded.device() == shard.device()) {
                return 1;
            }
            fp::send(*flat, shard);
            return 0;
        }
        if (flat->outer_group != nullptr) {
            const at::Tensor &shard = fp::unpack(shard_object);
            const bool goes_on = flat->gradient == FP_GRADIENT_REDUCING_INNER;
            fp::accumulate_partial(*flat, shard);
            fp::move(*flat, FP_GRADIENT_ACCUMULATE);
            if (goes_on) {
                fp::reduce_partial(*flat, shard, collectives);
            }
            return 0;
        }
        fp::announce(*flat->replicate_group, FP_EVENT_REDUCES, flat->trained);
        if (collectives != nullptr || !flat->replicate_group->native) {
            fp::call_python(collectives, "all_reduce", flat->reduce_output, flat->reduce_output,
                            *flat->replicate_group);
        }
        else {
            const double factor = fp::factor_over(*flat, *flat->replicate_group, flat->reduce_output);
            flat->reduction.begin(*flat->replicate_group,
                                  fp::all_reduce(*flat->replicate_group, flat->reduce_output, factor));
            flat->is_divided = flat->is_divided || factor != 1.0;
        }
        fp::move(*flat, FP_GRADIENT_REDUCE);
        return 0;
    });
}

int
fp_flat_buffer_finish_reduce(fp_flat_buffer *flat, PyObject *shard_object, PyObject *collectives, fp_reduced *reduced)
{
    if (fp::is_reducing_inner(*flat) && fp_flat_buffer_advance_reduce(flat, shard_object, collectives) < 0) {
        return -1;
    }
    if (flat->gradient != FP_GRADIENT_REDUCING && flat->gradient != FP_GRADIENT_ARRIVING) {
        return 0; /* nothing is reduced, or only over the secondary group */
    }
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        if (flat->gradient == FP_GRADIENT_REDUCING) {
            fp::wait_for_reduction(*flat);
            fp::send(*flat, shard);
        }
        fp::wait_until(flat->has_arrived);
        fp::check(*flat, FP_GRADIENT_TAKE);
        const at::ScalarType dtype = flat->precision.of_gradient(flat->reduce_output, shard);
        *reduced = {.tensor = THPVariable_Wrap(flat->reduce_output),
                    .divisor = fp::remaining_divisor(*flat),
                    .dtype = static_cast<int>(dtype),
                    .parts = flat->in_order != 0 ? flat->primary.n : 1};
        if (reduced->tensor == nullptr) {
            return -1;
        }
        flat->reduce_output.reset();
        fp::move(*flat, FP_GRADIENT_TAKE);
        return 1;
    });
}

int
fp_flat_buffer_has_accumulated(const fp_flat_buffer *flat) noexcept
{
    return flat->accumulated.exists() || flat->unreduced.defined();
}

int
fp_flat_buffer_has_unreduced(const fp_flat_buffer *flat) noexcept
{
    return flat->unreduced.defined();
}

PyObject *
fp_flat_buffer_accumulated_grad(fp_flat_buffer *flat)
{
    const at::Tensor &accumulated = flat->accumulated.on_host ? flat->accumulated.host : flat->accumulated.tensor;
    if (!accumulated.defined()) {
        Py_RETURN_NONE;
    }
    return fp::guarded<PyObject *>(nullptr, [&] {
        fp::check_memory(accumulated, fp::name_of(*flat)); /* users reach it by .grad */
        if (flat->accumulated.on_host) {                   /* the caller may read it at once */
            fp::wait_until(flat->accumulated.has_left);
        }
        return THPVariable_Wrap(accumulated);
    });
}

int
fp_flat_buffer_check_accumulated(const fp_flat_buffer *flat, PyObject *shard_object, PyObject *accumulated,
                                 const char *name)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &shard = fp::unpack(shard_object);
        const at::Tensor &grad = fp::unpack(accumulated);
        const int64_t numel = flat->outer_group != nullptr ? flat->part_numel() : flat->geometry->total;
        const at::ScalarType dtype = flat->precision.accumulates_in(shard);
        const c10::Device device = flat->unsharded.device();
        TORCH_CHECK_TYPE(fp::is_plain_tensor(grad), name, ": expected a plain dense tensor as accumulated gradient");
        TORCH_CHECK_VALUE(grad.dim() == 1 && grad.numel() == numel && grad.is_contiguous() &&
                              grad.scalar_type() == dtype && grad.device() == device,
                          name, ": expected an accumulated gradient of shape [", numel, "] and ", dtype, " on ", device,
                          ", got ", grad.sizes(), " and ", grad.scalar_type(), " on ", grad.device());
    });
}

int
fp_flat_buffer_set_accumulated(fp_flat_buffer *flat, PyObject *accumulated)
{
    fp_flat_buffer_drop_grads(flat, 1);
    const int status = fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        flat->accumulated.put(fp::unpack(accumulated));
        const fp::WithoutGil released;
        fp::offload(*flat);
        return 0;
    });
    if (status < 0) {
        fp_flat_buffer_drop_grads(flat, 1);
    }
    return status;
}

void
fp_flat_buffer_drop_grads(fp_flat_buffer *flat, int accumulated_too)
{
    flat->reduction.work.reset();
    flat->reduce_input.reset();
    flat->reduce_output.reset();
    flat->has_arrived.reset();
    fp::move(*flat, FP_GRADIENT_FORGET); /* legal in each state */
    if (accumulated_too) {
        flat->accumulated.drop();
        flat->unreduced.reset();
    }
    fp::unless_failed([&] { flat->accumulated.drop_reload(); });
}

} // extern "C"
