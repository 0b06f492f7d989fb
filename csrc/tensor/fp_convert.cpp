// tensor/fp_convert.cpp -- see fp_convert.hpp.
#include "tensor/fp_convert.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/empty.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "tensor/fp_launch.hpp"

namespace fp {

std::optional<fp_dtype>
core_dtype(at::ScalarType dtype)
{
    switch (dtype) {
        case at::kDouble:
            return FP_F64;
        case at::kFloat:
            return FP_F32;
        case at::kBFloat16:
            return FP_BF16;
        case at::kHalf:
            return FP_F16;
        default:
            return std::nullopt;
    }
}

namespace {

// The least bytes for one thread: fewer take less time than waking it.
constexpr int64_t grain_bytes = 1 << 18;

// Plain CPU tensors as segments for the core.
struct Sources {
    std::vector<fp_segment> segments; // without data for undefined pieces, and for those not in their view's order
    std::vector<size_t> strided;      // the numbers of the pieces that are not in their view's order
};

Sources
sources_of(const Geometry &geometry, const std::vector<at::Tensor> &pieces)
{
    Sources sources;
    sources.segments.resize(pieces.size());
    for (size_t i = 0; i < pieces.size(); i++) {
        const View &view = geometry.views[i];
        bool direct = false;
        if (pieces[i].defined()) {
            direct = same_layout(pieces[i], view);
            if (!direct) {
                sources.strided.push_back(i);
            }
        }
        sources.segments[i] = {
            .data = direct ? pieces[i].const_data_ptr() : nullptr, .start = view.offset, .numel = view.numel};
    }
    return sources;
}

// target (+)= the pieces at their places * scale, by kernels that each take many tensors. false: a piece is not plain or not on
// target's device, or the sum needs a scale, and nothing was done.
bool
pack_batched(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces, const How &how)
{
    if (launch_pack(target, geometry, pieces, how)) {
        return true;
    }
    std::vector<at::Tensor> places, values, gaps;
    int64_t end = 0; // of the pieces so far: they are in the order of their places
    const auto gap_until = [&](int64_t start) {
        if (!how.accumulate && start > end) {
            gaps.push_back(alias(target, start - end, int64_t{1}, target.storage_offset() + end));
        }
    };
    for (size_t i = 0; i < pieces.size(); i++) {
        const View &view = geometry.views[i];
        if (!pieces[i].defined()) {
            continue;
        }
        if (!is_plain_tensor(pieces[i]) || pieces[i].device() != target.device()) {
            return false;
        }
        places.push_back(alias(target, view));
        values.push_back(pieces[i]);
        gap_until(view.offset);
        end = view.offset + view.numel;
    }
    gap_until(target.numel());
    if (how.accumulate && how.scale) {
        return false;
    }
    if (!gaps.empty()) {
        at::_foreach_zero_(gaps);
    }
    if (!values.empty()) {
        how.accumulate ? at::_foreach_add_(places, values) : at::_foreach_copy_(places, values);
    }
    if (how.scale) {
        target.mul_(*how.scale);
    }
    return true;
}

// target (+)= source * scale, by torch's operations.
void
convert_by_ops(const at::Tensor &target, const at::Tensor &source, const How &how)
{
    if (how.accumulate) {
        const bool widens = at::promote_types(target.scalar_type(), source.scalar_type()) == target.scalar_type();
        const at::Tensor values = widens && !how.scale ? source : source.to(target.scalar_type());
        target.add_(how.scale ? values.mul(*how.scale) : values);
        return;
    }
    target.copy_(source);
    if (how.scale) {
        target.mul_(*how.scale);
    }
}

// Whether tensor / divisor may be computed as tensor * (1 / divisor), as kernels do: the result is exact, or torch computes
// it so on this device.
bool
divides_by_multiplying(const at::Tensor &tensor, double divisor)
{
    int exponent;
    return std::frexp(divisor, &exponent) == 0.5 || tensor.is_cuda();
}

} // namespace

bool
pack(const at::Tensor &target, at::ScalarType source_dtype, const std::vector<fp_segment> &segments, const How &how,
     const void *fill)
{
    const std::optional<fp_dtype> to = core_dtype(target.scalar_type()), from = core_dtype(source_dtype);
    const bool raw = target.scalar_type() == source_dtype && !how.scale && !how.accumulate;
    if (!raw && (!to || !from)) {
        return false;
    }
    const fp_pack_opts opts = {
        .scale = how.scale.value_or(1.0), .has_scale = how.scale.has_value(), .accumulate = how.accumulate};
    const auto item_bytes = static_cast<int64_t>(target.element_size());
    void *memory = target.mutable_data_ptr();
    at::parallel_for(0, target.numel(), std::max<int64_t>(1, grain_bytes / item_bytes),
                     [&](int64_t begin, int64_t end) {
                         const fp_status status =
                             raw ? fp_pack_raw(segments.data(), segments.size(), item_bytes, memory, begin, end, fill)
                                 : fp_pack(segments.data(), segments.size(), *from, memory, *to, begin, end, &opts);
                         TORCH_CHECK(status == FP_OK, "flatparam: packing failed with status ", status);
                     });
    return true;
}

void
pack_pieces(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces,
            const at::TensorOptions &options, const How &how, const char *name)
{
    const at::ScalarType dtype = options.dtype().toScalarType();
    check_memory(target, name);
    for (const at::Tensor &piece : pieces) {
        if (piece.defined()) {
            check_memory(piece, name);
        }
    }
    const bool plain =
        target.is_cpu() && std::all_of(pieces.begin(), pieces.end(), [&](const at::Tensor &piece) {
            return !piece.defined() || (is_plain_tensor(piece) && piece.is_cpu() && piece.scalar_type() == dtype);
        });
    if (plain && (core_dtype(dtype) || target.scalar_type() == dtype)) {
        const Sources sources = sources_of(geometry, pieces);
        if (pack(target, dtype, sources.segments, how)) {
            for (const size_t i : sources.strided) {
                convert_by_ops(alias(target, geometry.views[i]), pieces[i], how);
            }
            return;
        }
    }
    if (target.is_cpu() || !pack_batched(target, geometry, pieces, how)) {
        convert_by_ops(target, flatten_by_ops(geometry, pieces, options), how);
    }
}

void
convert(const at::Tensor &target, const at::Tensor &source, const How &how)
{
    check_memory(target);
    check_memory(source);
    if (target.is_cpu() && source.is_cpu() && source.is_contiguous() && target.is_contiguous()) {
        const std::vector<fp_segment> whole = {{.data = source.const_data_ptr(), .start = 0, .numel = source.numel()}};
        if (pack(target, source.scalar_type(), whole, how)) {
            return;
        }
    }
    if (!launch_convert(target, source, how)) {
        convert_by_ops(target, source, how);
    }
}

at::Tensor
divided(at::Tensor tensor, double divisor, at::ScalarType dtype)
{
    check_memory(tensor);
    if (divisor != 1.0 && dtype != tensor.scalar_type() && divides_by_multiplying(tensor, divisor)) {
        const at::Tensor converted = at::empty(tensor.sizes(), tensor.options().dtype(dtype));
        if (launch_convert(converted, tensor, {}, 1.0 / divisor)) {
            return converted;
        }
    }
    if (divisor != 1.0) {
        tensor.div_(divisor);
    }
    return tensor.to(dtype);
}

void
add_divided(const at::Tensor &target, const at::Tensor &tensor, double divisor)
{
    const How how = {.scale = std::nullopt, .accumulate = true};
    check_memory(target);
    check_memory(tensor);
    if (divisor != 1.0 && divides_by_multiplying(tensor, divisor) &&
        launch_convert(target, tensor, how, 1.0 / divisor)) {
        return;
    }
    if (divisor != 1.0) {
        tensor.div_(divisor);
    }
    convert(target, tensor, how);
}

} // namespace fp

int
fp_torch_convert(PyObject *target_object, PyObject *source_object, int accumulate)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &target = fp::unpack(target_object), &source = fp::unpack(source_object);
        TORCH_CHECK_VALUE(target.dim() == 1 && source.dim() == 1 && target.is_contiguous() && source.is_contiguous() &&
                              target.numel() == source.numel(),
                          "expected two contiguous 1-D tensors of one length, got sizes ", target.sizes(), " and ",
                          source.sizes());
        TORCH_CHECK_VALUE(!target.is_alias_of(source), "expected two tensors in separate memory");
        const fp::Plainly plainly;
        const at::Tensor values = target.detach(); // shares target's version counter
        fp::convert(values, source, {.scale = std::nullopt, .accumulate = accumulate != 0});
        values.unsafeGetTensorImpl()->bump_version();
    });
}
