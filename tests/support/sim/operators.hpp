// operators.hpp -- operators: the CPU's, in the order of the stream.
#pragma once

#include "memory.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace {

auto &operations = for_good<std::map<std::string, int64_t>>(); // how often each that computes or copies was called

at::Tensor
copy_from(const at::Tensor &source, const at::Tensor &target, bool non_blocking)
{
    const Locked locked(mutex());
    operations["aten::copy_"]++;
    at::Tensor from = on_cpu(source);
    const at::Tensor to = on_cpu(target);
    const int64_t stream = current;
    if (target.is_cpu()) {
        const bool later = non_blocking && is_pinned(to.const_data_ptr());
        put_off += later && !is_late(stream);
        put(stream, [from, to, stream] {
            const at::Tensor now = from.clone(); // what the device reads; the host gets it later
            queues()[stream].landing.emplace_back(queues()[stream].done, [now, to] { at::Tensor(to).copy_(now); });
        });
        if (!later) {
            wait_for_stream(stream);
        }
    }
    else if (source.is_cpu()) {
        const bool later = non_blocking && is_pinned(from.const_data_ptr());
        from = later ? from : from.clone(); // what is not pinned is read at once
        put(stream, [from, to, stream] {
            land(stream, queues()[stream].done);
            at::Tensor(to).copy_(from);
        });
        if (!non_blocking) {
            wait_for_stream(stream);
        }
    }
    else {
        put(stream, [from, to] { at::Tensor(to).copy_(from); });
    }
    return target;
}

at::Tensor
copy_from_and_resize(const at::Tensor &source, const at::Tensor &target)
{
    if (target.sizes() != source.sizes()) { // else it would lose its strides
        target.resize_(source.sizes());
    }
    return copy_from(source, target, false);
}

at::Tensor
empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
      std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor
empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
              std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>)
{
    return at::detail::empty_strided_generic(
        size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor
as_strided(const at::Tensor &self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset)
{
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const at::Tensor &
resize(const at::Tensor &self, c10::IntArrayRef size, std::optional<at::MemoryFormat>)
{
    const at::Tensor sized = at::empty_strided(size, c10::contiguous_strides(size), self.options().device(at::kMeta));
    const size_t bytes = (self.storage_offset() + sized.numel()) * self.element_size();
    if (bytes > self.storage().nbytes()) {
        Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    return self;
}

at::Tensor &
set_storage(at::Tensor &self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride)
{
    return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

at::Scalar
local_scalar(const at::Tensor &self)
{
    const Locked locked(mutex());
    wait_for_stream(current);
    return on_cpu(self).item();
}

void
record_stream(at::Tensor &self, c10::Stream stream)
{
    keep_for_stream(self.storage().mutable_data_ptr(), stream);
}

// Whether what an operator returns has sizes that do not depend on values, so that it can be run on others before.
bool
can_be_put_off(const c10::OperatorHandle &op, const Values &arguments)
{
    bool can = !op.hasTag(at::Tag::nondeterministic_seeded) && !op.hasTag(at::Tag::dynamic_output_shape) &&
               !op.hasTag(at::Tag::data_dependent_output);
    for_each_tensor(arguments, [&](const at::Tensor &tensor) {
        const bool is_number = tensor.is_cpu() && tensor.dim() == 0;
        can = can && (is_number || at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()));
    });
    return can;
}

// An operator that changes or views an argument in another way than by writing to its elements.
bool
is_unusual(const c10::OperatorHandle &op, const Values &arguments)
{
    bool unusual = false;
    for (size_t i = 0; i < op.schema().arguments().size(); i++) {
        const auto *alias = op.schema().arguments()[i].alias_info();
        unusual = unusual || (alias != nullptr && !alias->isWrite()) ||
                  (op.schema().arguments()[i].is_out() && arguments[i].toTensor().numel() == 0); // it is given a size
    }
    for (const auto &result : op.schema().returns()) {
        unusual = unusual || (result.alias_info() != nullptr && !result.alias_info()->isWrite());
    }
    for_each_tensor(arguments, [&](const at::Tensor &tensor) {
        unusual = unusual || tensor.is_conj() || tensor.is_neg() || tensor.layout() != at::kStrided;
    });
    return unusual;
}

// What an operator returns, which is a new tensor, on the device.
at::Tensor
allocated(const at::Tensor &model)
{
    return at::empty_strided(model.sizes(), model.strides(), model.options().device(device_here()));
}

// Run op on the memory of the arguments, in the order of the current stream, and return what it does.
void
fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const Locked locked(mutex());
    operations[op.schema().name()]++;
    const size_t n = op.schema().arguments().size();
    const Values arguments(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
    const auto &returns = op.schema().returns();
    if (std::any_of(returns.begin(), returns.end(), [](const auto &result) {
            return result.type()->kind() == c10::TypeKind::BoolType ||
                   result.type()->kind() == c10::TypeKind::NumberType;
        })) {
        wait_for_stream(current); // the host is told of values
    }
    const int64_t before = waits;
    if (is_unusual(op, arguments)) {
        wait_for_stream(current);
        at::native::cpu_fallback(op, stack);
        waits = before; // it is not the program that has waited
        return;
    }
    const bool late = is_late(current) && can_be_put_off(op, arguments);
    if (!late) {
        run(current, queues()[current].put); // which is not the program's doing
    }
    const Values there = all_on_cpu(arguments);
    const bool all_new = returns_new(op);
    Values results = !late     ? called(op, there)
                     : all_new ? called(op, all_changed(arguments,
                                                        [](const at::Tensor &tensor) {
                                                            at::Tensor other = at::empty_strided(
                                                                tensor.sizes(), tensor.strides(),
                                                                tensor.options().device(at::kCPU).requires_grad(false));
                                                            return other.fill_(1);
                                                        }))
                               : Values();
    stack->erase(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
    if (all_new) {
        const Values made = all_changed(results, allocated);
        std::vector<at::Tensor> to;
        for_each_tensor(made, [&](const at::Tensor &tensor) { to.push_back(on_cpu(tensor)); });
        const auto fill = [to](const Values &values) {
            size_t next = 0;
            for_each_tensor(values, [&](const at::Tensor &tensor) { at::Tensor(to[next++]).copy_(tensor); });
        };
        if (late) {
            put(current, [op, there, fill] { fill(called(op, there)); });
        }
        else {
            as_a_kernel([&] { fill(results); });
        }
        stack->insert(stack->end(), made.begin(), made.end());
        return;
    }
    if (late) {
        put(current, [op, there] { called(op, there); });
    }
    push_written(op, arguments, *stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("as_strided", as_strided);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("record_stream", record_stream);
    m.impl("_foreach_zero_", torch::CppFunction::makeFromBoxedFunction<&fallback>()); // one kernel for all
    // torch's own for a device makes it of a batch norm, which rounds otherwise
    m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace
