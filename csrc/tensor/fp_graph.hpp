// tensor/fp_graph.hpp -- the nodes and hooks by which autograd's graph refers to a unit, for the C++ side.
#pragma once

#include <atomic>
#include <string>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_graph.h"

namespace fp {

// Shared by the hooks on the outputs of a unit; it lives as long as a graph that has one of them. Any thread may destroy it.
struct Graph {
    std::atomic<int> waiting{0}; // hooks that have not run yet
    // Owned if nothing else refers to the unit (fp_unit_ref_keep), so that the hooks can still call it; else null.
    PyObject *unit = nullptr;

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

// A weak reference to a unit.
struct UnitRef {
    void *unit = nullptr; // null once the unit is gone; read and changed with the GIL held
    std::string name;     // the unit's name for errors
    fp_unit_callbacks calls{};
    std::weak_ptr<const torch::autograd::GraphTask> task; // the graph task of the last fp_graph_at_end()
    std::weak_ptr<Graph> graph;                           // of the last hooks on outputs
};

// Throw NotImplementedError: compiled autograd would have to trace hooks and collectives of a unit.
[[noreturn]] void refuse_tracing(const UnitRef &ref);

// The node behind the views of one flat tensor. Without a unit it packs their gradients into the gradient of that tensor.
// With a unit it packs nothing: it calls gradients_ready, and the runtime packs.
//
// After fp_flat_buffer_run_after() it runs after all nodes of its forward. Reentrant checkpoints in that forward give
// gradients of the parameters in graph tasks for which the engine does not make this node wait.
struct ViewsBackward final : torch::autograd::Node {
    const std::shared_ptr<const Geometry> geometry;
    const at::TensorOptions options;     // of the packed gradient
    const std::shared_ptr<UnitRef> unit; // null: the flat tensor gets the gradient
    const int index = 0;                 // the index of the flat parameter in unit

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

    // Let it run on the stream that is current now. The engine runs a node on the stream of its forward, and this node
    // serves many forwards. view: the first one.
    void run_on_current_stream(const at::Tensor &view);

    torch::autograd::variable_list apply(torch::autograd::variable_list &&grads) override;
    // Pack the gradients of the views into the 1-D gradient of the flat tensor. At least one is defined.
    static at::Tensor pack(const Geometry &geometry, const torch::autograd::variable_list &grads,
                           const at::TensorOptions &options);

    // Called by compiled autograd: fp_compiled.cpp.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override;
    torch::autograd::variable_list apply_with_saved(const torch::autograd::variable_list &grads,
                                                    torch::dynamo::autograd::SwapSavedVariables &saved) override;
};

// A hook that calls ref's unit. Compiled autograd cannot trace it, and is refused.
struct UnitHook : torch::autograd::FunctionPreHook {
    const std::shared_ptr<UnitRef> ref;

    explicit UnitHook(std::shared_ptr<UnitRef> unit) : ref(std::move(unit)) {}

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override
    {
        refuse_tracing(*ref);
    }
};

// Whether a user has called register_hook() of tensor; our hooks are in the same list.
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
