// tensor/fp_graph.hpp -- a unit as autograd's graph knows it, for the C++ side.
#pragma once

#include <atomic>
#include <string>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_graph.h"

namespace fp {

// What the hooks on outputs of a unit have in common: it lives as long as a graph that comes to one of them.
struct Graph {
    std::atomic<int> waiting{0}; // hooks that have not run
    PyObject *unit = nullptr;    // owned: kept for them after everybody else has let go of it

    Graph() = default;
    Graph(const Graph &) = delete;
    Graph &operator=(const Graph &) = delete;
    ~Graph()
    {
        if (unit != nullptr && Py_IsInitialized()) {
            const WithGil gil;
            Py_DECREF(unit);
        }
    }
};

struct UnitRef {
    void *unit = nullptr; // null once it is gone; changed with the GIL held
    std::string name;
    fp_unit_callbacks calls{};
    std::weak_ptr<const torch::autograd::GraphTask> task; // of the last callback
    std::weak_ptr<Graph> graph;
};

[[noreturn]] void refuse_tracing(const UnitRef &ref);

// The node behind the views of one flat tensor. It packs their gradients into the gradient of that tensor. That of a unit
// packs nothing: it tells the unit that all gradients of its views are there. One that was told so runs after all of the
// forward that it belongs to: reentrant checkpoints in it come to parameters, and give gradients of them, in graph tasks of
// their own, which this one's gradients do not wait for.
struct ViewsBackward final : torch::autograd::Node {
    const std::shared_ptr<const Geometry> geometry;
    const at::TensorOptions options;     // of the gradient that is packed
    const std::shared_ptr<UnitRef> unit; // or null: what flat was made of gets the gradient
    const int index = 0;                 // of the flat parameter in unit

    ViewsBackward(std::shared_ptr<const Geometry> places, const at::Tensor &flat);
    ViewsBackward(std::shared_ptr<const Geometry> places, std::shared_ptr<UnitRef> told, int flat);

    static constexpr const char *views_name = "FlatParamViewsBackward";
    std::string name() const override
    {
        return unit ? "FlatParamUnitBackward" : views_name;
    }

    bool has_hooks() noexcept
    {
        return !tensor_pre_hooks().empty() || !pre_hooks().empty() || !post_hooks().empty() ||
               !retains_grad_hooks().empty();
    }

    // From now on it runs on the stream that is current now: a node runs on that of its forward, and this one is of many.
    // view: the first one.
    void run_on_current_stream(const at::Tensor &view);

    torch::autograd::variable_list apply(torch::autograd::variable_list &&grads) override;
    // The gradient of the flat tensor: all of the views', one of which at least is defined.
    static at::Tensor pack(const Geometry &geometry, const torch::autograd::variable_list &grads,
                           const at::TensorOptions &options);

    // What compiled autograd calls: fp_compiled.cpp.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override;
    torch::autograd::variable_list apply_with_saved(const torch::autograd::variable_list &grads,
                                                    torch::dynamo::autograd::SwapSavedVariables &saved) override;
};

// A hook that calls ref's unit. Compiled autograd, which would have to trace it, is told so.
struct UnitHook : torch::autograd::FunctionPreHook {
    const std::shared_ptr<UnitRef> ref;

    explicit UnitHook(std::shared_ptr<UnitRef> unit) : ref(std::move(unit)) {}

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override
    {
        refuse_tracing(*ref);
    }
};

// Whether somebody has called register_hook() of tensor.
inline bool
has_hooks_of_users(const at::Tensor &tensor)
{
    const auto *meta = torch::autograd::impl::get_autograd_meta(tensor);
    return meta != nullptr && std::any_of(meta->hooks_.begin(), meta->hooks_.end(), [](const auto &hook) {
               return dynamic_cast<const UnitHook *>(hook.get()) == nullptr;
           });
}

} // namespace fp

struct fp_unit_ref {
    std::shared_ptr<fp::UnitRef> shared;
};

struct fp_gradients {
    std::vector<at::Tensor> &list;
};
