// tensor/fp_compiled.cpp -- the functions for compiled autograd, which traces a backward. It can trace the node behind
// views of a flat tensor. It cannot trace a unit, whose hooks and collectives are no operations: that is refused.
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>

#include "tensor/fp_graph.hpp"

namespace fp {

void
refuse_tracing(const UnitRef &ref)
{
    TORCH_CHECK_NOT_IMPLEMENTED(false, "flatparam: compiled autograd cannot trace the backward of ", ref.name,
                                ", whose hooks and collectives are not in its graph: call backward() outside of "
                                "compiled autograd. torch.compile of the model traces its forward");
}

// Put all that apply() depends on into the key of the compiled graph.
void
ViewsBackward::compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const
{
    if (unit) {
        refuse_tracing(*unit);
    }
    args.collect(geometry->total);
    for (const View &view : geometry->views) {
        args.collect(view.offset);
        args.collect(view.shape);
        args.collect(view.stride);
        args.collect(view.contiguous);
    }
    args.collect(options);
    args.collect(task_should_compute_output(0));
}

// While a backward is traced there are no gradients yet: put a call of pack() into the graph.
torch::autograd::variable_list
ViewsBackward::apply_with_saved(const torch::autograd::variable_list &grads,
                                torch::dynamo::autograd::SwapSavedVariables &saved)
{
    namespace compiled = torch::dynamo::autograd;
    const auto call = [places = geometry, made = options](const torch::autograd::variable_list &given,
                                                          const std::vector<c10::IValue> &) {
        const bool any = std::any_of(given.begin(), given.end(), [](const at::Tensor &grad) { return grad.defined(); });
        return torch::autograd::variable_list{any ? pack(*places, given, made) : at::Tensor()};
    };
    const auto &compiler = compiled::getPyCompilerInterface();
    PyObject *tracer = saved.get_py_compiler();
    const std::string bound = compiler->bind_function(tracer, views_name, call, {}, /* is_custom_function */ true,
                                                      /* is_traceable */ false);
    return compiler->call_function(
        tracer, "apply_functional", bound, grads, {},
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges())));
}

} // namespace fp
