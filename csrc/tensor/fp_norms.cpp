// tensor/fp_norms.cpp -- the norm of gradients, and their scaling by it, in a few launches for all of them; see fp_gradients.h.
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/Device.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_gradients.h"
#include "tensor/fp_launch.hpp"

namespace fp {
namespace {

// The gradients of one device and dtype, for one call of torch's _foreach operations.
struct Kind {
    std::vector<at::Tensor> grads;
    std::vector<size_t> places; // the number of each one's parameter
};

std::vector<Kind>
by_kind(PyObject *const *params, Py_ssize_t n)
{
    std::vector<Kind> kinds;
    for (Py_ssize_t i = 0; i < n; i++) {
        TORCH_CHECK_TYPE(is_tensor(params[i]), "expected a tensor, got ", Py_TYPE(params[i])->tp_name);
        const at::Tensor &grad = THPVariable_Unpack(params[i]).grad();
        if (!grad.defined()) {
            continue;
        }
        check_memory(grad);
        auto kind = std::find_if(kinds.begin(), kinds.end(), [&grad](const Kind &other) {
            return other.grads[0].device() == grad.device() && other.grads[0].scalar_type() == grad.scalar_type();
        });
        if (kind == kinds.end()) {
            kind = kinds.emplace(kind);
        }
        kind->grads.push_back(grad);
        kind->places.push_back(static_cast<size_t>(i));
    }
    return kinds;
}

std::vector<at::Tensor>
all_of(const std::vector<Kind> &kinds)
{
    std::vector<at::Tensor> all;
    for (const Kind &kind : kinds) {
        all.insert(all.end(), kind.grads.begin(), kind.grads.end());
    }
    return all;
}

at::Tensor
norm_of(const std::vector<Kind> &kinds, double order, at::ScalarType precision, c10::Device device)
{
    std::vector<std::pair<size_t, at::Tensor>> found;
    for (const Kind &kind : kinds) {
        std::vector<at::Tensor> some;
        std::vector<size_t> places;
        for (size_t i = 0; i < kind.grads.size(); i++) {
            if (kind.grads[i].numel() > 0) {
                some.push_back(kind.grads[i]);
                places.push_back(kind.places[i]);
            }
        }
        if (!some.empty()) {
            const auto dtype = c10::promoteTypes(some[0].scalar_type(), precision);
            const std::vector<at::Tensor> norms = at::_foreach_norm(some, order, dtype);
            for (size_t i = 0; i < norms.size(); i++) {
                found.emplace_back(places[i], kinds.size() == 1 ? norms[i] : norms[i].to(device, precision));
            }
        }
    }
    if (found.empty()) {
        return at::zeros({}, at::TensorOptions().dtype(precision).device(device));
    }
    if (found.size() == 1 && (order == 2.0 || std::isinf(order))) {
        return found[0].second.to(device, precision); // one tensor: its norm is the result
    }
    std::sort(found.begin(), found.end(), [](const auto &a, const auto &b) { return a.first < b.first; });
    std::vector<at::Tensor> each;
    std::transform(found.begin(), found.end(), std::back_inserter(each), [](const auto &item) { return item.second; });
    return at::linalg_vector_norm(at::stack(each), order).to(device, precision);
}

// min(1, max_norm / (norm + 1e-6)). In fp32 on the host it is computed here: dispatching four operations of torch takes longer.
at::Tensor
factor_for(const at::Tensor &norm, double max_norm)
{
    if (norm.is_cpu() && norm.scalar_type() == at::kFloat) {
        const float factor = 1.0F / (*norm.const_data_ptr<float>() + 1e-6F) * static_cast<float>(max_norm);
        return at::detail::scalar_tensor_static(factor > 1.0F ? 1.0F : factor, at::kFloat, c10::kCPU);
    }
    return at::clamp(at::reciprocal(norm + 1e-6) * max_norm, std::nullopt, 1.0);
}

} // namespace
} // namespace fp

PyObject *
fp_gradients_norm(PyObject *const *params, Py_ssize_t n, double order, int in_fp64, PyObject *device)
{
    return fp::guarded<PyObject *>(nullptr, [&] {
        TORCH_CHECK_TYPE(THPDevice_Check(device), "expected a torch.device, got ", Py_TYPE(device)->tp_name);
        const at::NoGradGuard no_grad;
        const std::vector<fp::Kind> kinds = fp::by_kind(params, n);
        at::Tensor norm;
        {
            const fp::WithoutGil without;
            const at::ScalarType precision = in_fp64 ? at::kDouble : at::kFloat;
            const c10::Device there = reinterpret_cast<THPDevice *>(device)->device;
            if (!there.is_cpu() && (order == 2.0 || order == std::numeric_limits<double>::infinity())) {
                norm = fp::launch_norm(fp::all_of(kinds), order != 2.0, precision);
            }
            if (norm.defined()) {
                norm = norm.to(there);
            }
            else {
                norm = fp::norm_of(kinds, order, precision, there);
                norm = std::isinf(order) ? norm : at::pow(norm, order);
            }
        }
        return THPVariable_Wrap(norm);
    });
}

PyObject *
fp_gradients_clip(PyObject *const *params, Py_ssize_t n, PyObject *sum, double root, double max_norm)
{
    return fp::guarded<PyObject *>(nullptr, [&] {
        at::Tensor norm = fp::unpack(sum);
        const at::NoGradGuard no_grad;
        const std::vector<fp::Kind> kinds = fp::by_kind(params, n);
        {
            const fp::WithoutGil without;
            norm = root == 1.0 ? norm : at::pow(norm, root);
            const at::Tensor factor = fp::factor_for(norm, max_norm);
            std::optional<at::ScalarType> widest;
            const bool scaled = !factor.is_cpu() && fp::launch_scale(fp::all_of(kinds), factor);
            for (const fp::Kind &kind : kinds) {
                const at::ScalarType dtype = kind.grads[0].scalar_type();
                if (!scaled) {
                    at::_foreach_mul_(kind.grads, factor.to(kind.grads[0].device(), c10::toRealValueType(dtype)));
                }
                widest = widest ? c10::promoteTypes(*widest, dtype) : dtype;
            }
            norm = widest ? norm.to(c10::toRealValueType(*widest)) : norm;
        }
        return THPVariable_Wrap(norm);
    });
}
