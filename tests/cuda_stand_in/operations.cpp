// operations.cpp -- torch's operations on CUDA tensors done by those for the CPU, on the same memory, in the order of streams.
//
// They take the place of torch's kernels at the dispatch key CUDA. What allocates, views, copies between host and device or
// asks for a value stays torch's own.
#include "boxed.hpp"
#include "stand_in.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceGuard.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>

namespace {

void
put(std::function<void()> work)
{
    stand_in_put(c10::cuda::getCurrentCUDAStream(), std::move(work));
}

// The device's own numbers: the host's are not used up by streams.
at::Generator
generator()
{
    static auto *made = new at::Generator(at::make_generator<at::CPUGeneratorImpl>(0));
    return *made;
}

// What gives sizes that depend on values, or to tensors that have none: as torch does it, which waits then too.
void
at_once(const c10::OperatorHandle &op, torch::jit::Stack *stack, const Values &arguments, c10::Device device)
{
    c10::cuda::getCurrentCUDAStream().synchronize();
    const Values there = all_changed(arguments, [](const at::Tensor &tensor) {
        return tensor.is_cuda() && tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU))
                                                       : on_cpu(tensor);
    });
    const Values results = called(op, there);
    const size_t n = arguments.size();
    stack->erase(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
    const at::AutoDispatchBelowADInplaceOrView below;
    bool has_out = false;
    for (size_t i = 0; i < n; i++) {
        if (op.schema().arguments()[i].is_out() && arguments[i].isTensor()) {
            has_out = true;
            const at::Tensor &out = arguments[i].toTensor(), &made = there[i].toTensor();
            out.resize_(made.sizes());
            out.copy_(made);
            stack->push_back(out);
        }
    }
    if (!has_out) {
        const Values moved = all_changed(results, [&](const at::Tensor &tensor) { return tensor.to(device); });
        stack->insert(stack->end(), moved.begin(), moved.end());
    }
}

void
fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const size_t n = op.schema().arguments().size();
    const Values arguments(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
    std::optional<c10::Device> device;
    for_each_tensor(arguments, [&](const at::Tensor &tensor) {
        if (tensor.is_cuda() && !device) {
            device = tensor.device();
        }
    });
    for (const c10::IValue &value : arguments) {
        if (value.isDevice() && !device) {
            device = value.toDevice();
        }
    }
    TORCH_CHECK(device, op.schema().name(), " has no tensor of the device");
    const c10::DeviceGuard guard(*device);
    Values there = all_on_cpu(arguments);
    for (size_t i = 0; i < n; i++) {
        if (op.schema().arguments()[i].name() == "generator") {
            there[i] = generator();
        }
    }
    bool resizes = false;
    for (size_t i = 0; i < n; i++) {
        if (op.schema().arguments()[i].is_out()) { // a result that is given its size
            resizes = resizes || (arguments[i].isTensor() && arguments[i].toTensor().numel() == 0);
        }
    }
    if (resizes || op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
        at_once(op, stack, arguments, *device);
        return;
    }
    stack->erase(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
    if (returns_new(op)) {
        // sizes and strides of what is returned, from values of no meaning
        const Values like = called(op, all_changed(arguments, [](const at::Tensor &tensor) {
                                       if (tensor.is_cpu()) {
                                           return tensor.dim() == 0 ? tensor.clone() : tensor;
                                       }
                                       at::Tensor other =
                                           at::empty_strided(tensor.sizes(), tensor.strides(),
                                                             tensor.options().device(at::kCPU).requires_grad(false));
                                       return other.zero_();
                                   }));
        const Values made = all_changed(like, [&](const at::Tensor &tensor) {
            return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device));
        });
        std::vector<at::Tensor> to;
        for_each_tensor(made, [&](const at::Tensor &tensor) { to.push_back(on_cpu(tensor)); });
        put([op, there, to] {
            size_t next = 0;
            for_each_tensor(called(op, there), [&](const at::Tensor &tensor) {
                const at::AutoDispatchBelowADInplaceOrView below;
                at::Tensor(to[next++]).copy_(tensor);
            });
        });
        stack->insert(stack->end(), made.begin(), made.end());
        return;
    }
    put([op, there] { called(op, there); });
    push_written(op, arguments, *stack);
}

at::Tensor &
copy_(at::Tensor &self, const at::Tensor &source, bool non_blocking)
{
    if (!self.is_cuda() || !source.is_cuda()) {
        return at::native::copy_(self, source, non_blocking);
    }
    const c10::DeviceGuard guard(self.device());
    put([to = on_cpu(self), from = on_cpu(source)] {
        const at::AutoDispatchBelowADInplaceOrView below;
        at::Tensor(to).copy_(from);
    });
    return self;
}

// torch's own: memory, views, the size of a tensor, values for the host, record_stream.
bool
stays(const c10::OperatorHandle &op)
{
    static const std::set<std::string> names = {// clang-format off
        "empty", "empty_strided", "as_strided", "view", "_reshape_alias", "set_", "resize_", 
        "_local_scalar_dense", "record_stream", "is_set_to", "is_pinned", "_pin_memory", "unfold", "alias", 
        "view_as_real", "view_as_complex", "copy_", "_copy_from", "_efficientzerotensor", "_to_copy"}; // clang-format on
    const std::string name = op.schema().name().substr(op.schema().name().find("::") + 2);
    if (names.count(name) != 0) {
        return true;
    }
    for (const auto &argument : op.schema().arguments()) {
        if (argument.alias_info() != nullptr && !argument.alias_info()->isWrite()) {
            return true;
        }
    }
    return false;
}

torch::Library &
library()
{
    static auto *made = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    return *made;
}

struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning &) override {}
};

const bool registered = [] {
    Quiet quiet; // torch warns of kernels that take the place of others
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto &dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findSchema(name);
        if (name.name.rfind("aten::", 0) == 0 && op && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
            !stays(*op)) {
            const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
            library().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
        }
    }
    library().impl("copy_", copy_);
    // what the CPU has no operation for, and torch has others
    at::globalContext().setUserEnabledCuDNN(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseCuDNN(false);
    return true;
}();

} // namespace
