// tensor/fp_flatten.cpp -- see fp_flatten.h.
#include "tensor/fp_flatten.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "tensor/fp_convert.hpp"

namespace fp {
namespace {

// Whether two of the ranges [first, second) overlap. Sorts ranges.
bool
overlap(std::vector<std::pair<uintptr_t, uintptr_t>> &ranges)
{
    std::sort(ranges.begin(), ranges.end());
    return std::adjacent_find(ranges.begin(), ranges.end(),
                              [](const auto &a, const auto &b) { return b.first < a.second; }) != ranges.end();
}

// The parts of original parameters in one range of the flat parameter.
struct Runs {
    std::vector<at::Tensor> sources; // dense
    std::vector<fp_param_part> parts;
    int64_t numel = 0;
};

Runs
runs_in(const std::vector<at::Tensor> &originals, const fp_layout &layout, int64_t begin, int64_t end)
{
    Runs runs;
    size_t first, last;
    fp_layout_params_in(&layout, begin, end, &first, &last);
    for (size_t i = first; i < last; i++) {
        const fp_param_part part = fp_layout_part(&layout, i, begin, end);
        if (part.numel == 0) {
            continue;
        }
        check_memory(originals[i]);
        runs.sources.push_back(originals[i].is_non_overlapping_and_dense() ? originals[i] : originals[i].contiguous());
        runs.parts.push_back(part);
        runs.numel += part.numel;
    }
    return runs;
}

void
copy_on_host(const at::Tensor &target, const Runs &runs, double fill)
{
    std::vector<fp_segment> segments;
    segments.reserve(runs.parts.size());
    for (size_t i = 0; i < runs.parts.size(); i++) {
        const fp_param_part &part = runs.parts[i];
        const auto *data = static_cast<const char *>(runs.sources[i].const_data_ptr()) +
                           part.start * static_cast<int64_t>(target.element_size());
        segments.push_back({.data = data, .start = part.offset, .numel = part.numel});
    }
    const at::Tensor fill_item = runs.numel < target.numel() ? at::full({1}, fill, target.options()) : at::Tensor();
    const WithoutGil released;
    pack(target, target.scalar_type(), segments, {}, fill_item.defined() ? fill_item.const_data_ptr() : nullptr);
}

void
copy_by_ops(const at::Tensor &target, const Runs &runs, double fill)
{
    std::vector<at::Tensor> places, values;
    for (size_t i = 0; i < runs.parts.size(); i++) {
        const fp_param_part &part = runs.parts[i];
        places.push_back(target.narrow(0, part.offset, part.numel));
        values.push_back(alias(runs.sources[i], {part.numel}, {1}, runs.sources[i].storage_offset() + part.start));
    }
    if (runs.numel < target.numel()) {
        target.fill_(fill);
    }
    if (!values.empty()) {
        at::_foreach_copy_(places, values);
    }
}

} // namespace
} // namespace fp

int
fp_torch_survey(PyObject *const *tensors, Py_ssize_t n, int64_t *numels, Py_ssize_t *trained)
{
    return fp::guarded(-1, [&] {
        if (n == 0 || !fp_torch_all_plain(tensors, n)) {
            return 0;
        }
        const at::Tensor first = fp::unpack(tensors[0]);
        if (!at::isFloatingType(first.scalar_type()) && !at::isComplexType(first.scalar_type())) {
            return 0;
        }
        std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
        ranges.reserve(static_cast<size_t>(n));
        *trained = 0;
        for (Py_ssize_t i = 0; i < n; i++) {
            const at::Tensor &tensor = THPVariable_Unpack(tensors[i]);
            if (tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device() ||
                !tensor.is_contiguous() || (tensor.dim() > 0 && tensor.stride(-1) != 1) || !fp::has_memory(tensor)) {
                return 0;
            }
            numels[i] = tensor.numel();
            *trained += tensor.requires_grad();
            if (tensor.numel() > 0) {
                const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
                ranges.emplace_back(start, start + tensor.nbytes());
            }
        }
        return fp::overlap(ranges) ? 0 : 1;
    });
}

PyObject *
fp_torch_flatten(PyObject *const *tensors, const fp_layout *layout, double fill, int64_t begin, int64_t end)
{
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        const at::NoGradGuard no_grad;
        const std::vector<at::Tensor> originals = fp::unpack_all(tensors, static_cast<Py_ssize_t>(layout->num_params));
        for (size_t i = 0; i < originals.size(); i++) {
            TORCH_CHECK_VALUE(originals[i].numel() == layout->numels[i] &&
                                  originals[i].scalar_type() == originals[0].scalar_type() &&
                                  originals[i].device() == originals[0].device(),
                              "expected tensor ", i, " to have ", layout->numels[i], " elements and dtype ",
                              originals[0].scalar_type(), " on ", originals[0].device(), ", got ", originals[i].numel(),
                              ", ", originals[i].scalar_type(), " on ", originals[i].device());
        }
        at::Tensor flat = at::empty({end - begin}, originals[0].options());
        const int64_t held = std::clamp<int64_t>(layout->numel - begin, 0, end - begin);
        const at::Tensor body = held < end - begin ? flat.narrow(0, 0, held) : flat;
        if (held < end - begin) {
            flat.narrow(0, held, end - begin - held).zero_();
        }
        const fp::Runs runs = fp::runs_in(originals, *layout, begin, begin + held);
        flat.is_cpu() ? fp::copy_on_host(body, runs, fill) : fp::copy_by_ops(body, runs, fill);
        return THPVariable_Wrap(std::move(flat));
    });
}
