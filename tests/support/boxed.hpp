// boxed.hpp -- an operator called on memory of the host, for devices of tests whose memory that is.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <vector>

namespace {

using Values = std::vector<c10::IValue>;

// What runs later does so as kernels do, whatever the thread that comes to it is within.
template <class Work>
void
as_a_kernel(const Work &work)
{
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset | c10::python_ks);
    work();
}

// The same memory as a CPU tensor sees it. It is not kept alive: a device does not either.
at::Tensor
on_cpu(const at::Tensor &tensor)
{
    if (tensor.is_cpu()) {
        return tensor;
    }
    return at::from_blob(const_cast<void *>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                         tensor.options().device(at::kCPU).requires_grad(false));
}

// value with change(tensor) in place of each tensor of the device.
template <class Change>
c10::IValue
changed(const c10::IValue &value, const Change &change)
{
    if (value.isTensor()) {
        const at::Tensor &tensor = value.toTensor();
        return tensor.defined() ? c10::IValue(change(tensor)) : value;
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector()) {
            list.push_back(change(tensor));
        }
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto &tensor : value.toOptionalTensorVector()) {
            list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : tensor);
        }
        return list;
    }
    return value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
}

template <class Change>
Values
all_changed(const Values &values, const Change &change)
{
    Values result;
    for (const c10::IValue &value : values) {
        result.push_back(changed(value, change));
    }
    return result;
}

template <class Look>
void
for_each_tensor(const Values &values, const Look &look)
{
    all_changed(values, [&](const at::Tensor &tensor) {
        look(tensor);
        return tensor;
    });
}

Values
called(const c10::OperatorHandle &op, Values stack)
{
    as_a_kernel([&] { op.callBoxed(&stack); });
    return stack;
}

// Arguments as the CPU sees them. Numbers are copies: the host may change them before they are read.
Values
all_on_cpu(const Values &arguments)
{
    return all_changed(arguments, [](const at::Tensor &tensor) {
        return tensor.is_cpu() && tensor.dim() == 0 ? tensor.clone() : on_cpu(tensor);
    });
}

// Whether an operator returns none of its arguments.
bool
returns_new(const c10::OperatorHandle &op)
{
    const auto &returns = op.schema().returns();
    return std::all_of(returns.begin(), returns.end(),
                       [](const auto &result) { return result.alias_info() == nullptr; });
}

// Return the arguments that an operator has written to.
void
push_written(const c10::OperatorHandle &op, const Values &arguments, std::vector<c10::IValue> &stack)
{
    for (const auto &result : op.schema().returns()) {
        for (size_t i = 0; i < arguments.size(); i++) {
            const auto *alias = op.schema().arguments()[i].alias_info();
            if (alias != nullptr && result.alias_info() != nullptr && *alias == *result.alias_info()) {
                stack.push_back(arguments[i]);
                break;
            }
        }
    }
}

} // namespace
