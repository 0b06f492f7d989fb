// tensor/fp_graph.cpp -- the code that autograd calls: the node behind views, and for a unit the hooks on its inputs,
// outputs and parameters, and the end of a backward. See fp_graph.h for the callbacks. Hooks run without the GIL and take
// it to call a unit.
#include "tensor/fp_graph.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tensor/fp_convert.hpp"
#include "tensor/fp_modes.hpp"

struct fp_range {
    at::RecordFunction function;

    explicit fp_range(at::StepCallbacks &&callbacks) : function(std::move(callbacks)) {}
};

namespace fp {
namespace {

// Call the unit behind ref from a thread of autograd, with the GIL taken. RuntimeError if the unit is gone. An exception of the
// unit goes through the engine to the caller of backward().
template <class Call>
void
call_unit(const UnitRef &ref, Call &&call)
{
    const WithGil gil;
    const HiddenCheckpoints hidden;
    TORCH_CHECK(ref.unit != nullptr, "flatparam: ", ref.name,
                " was deleted, or moved to other ranks, before the backward pass of a graph that used its parameters "
                "had ended");
    if (call(ref.unit) < 0) {
        python_error error;
        error.persist();
        throw error;
    }
}

// On an output of a unit: before_backward. `waits`: it counts among the graph's hooks that have not run.
struct BeforeBackward final : UnitHook {
    std::shared_ptr<Graph> graph; // or null: a graph need not keep the unit for it
    std::atomic<uint64_t> began;
    bool waits;

    BeforeBackward(std::shared_ptr<UnitRef> unit, std::shared_ptr<Graph> hooked, uint64_t since)
        : UnitHook(std::move(unit)), graph(std::move(hooked)), began(since), waits(graph != nullptr)
    {
        if (waits) {
            graph->waiting++;
        }
    }

    ~BeforeBackward() override
    {
        waits_no_more();
    }

    void waits_no_more()
    {
        if (std::exchange(waits, false)) {
            graph->waiting--;
        }
    }

    torch::autograd::variable_list operator()(const torch::autograd::variable_list &grads) override
    {
        waits_no_more();
        call_unit(*ref, [&](void *unit) { return ref->calls.before_backward(unit, began.load()); });
        return grads;
    }
};

// Let node call before_backward before it runs. A node behind a unit's views gets one hook, whose `began` is updated: it
// lives as long as that unit, and would collect hooks.
void
hook(torch::autograd::Node &node, const std::shared_ptr<UnitRef> &ref, uint64_t began)
{
    const auto *behind_views = dynamic_cast<const ViewsBackward *>(&node);
    if (behind_views == nullptr || !behind_views->unit) {
        std::shared_ptr<Graph> graph = ref->graph.lock();
        if (graph == nullptr) {
            graph = std::make_shared<Graph>();
            ref->graph = graph;
        }
        node.add_tensor_pre_hook(std::make_unique<BeforeBackward>(ref, std::move(graph), began));
        return;
    }
    for (const auto &each : node.tensor_pre_hooks()) { // hooked before
        auto *known = dynamic_cast<BeforeBackward *>(each.get());
        if (known != nullptr && known->ref == ref) {
            known->began = began;
            return;
        }
    }
    node.add_tensor_pre_hook(std::make_unique<BeforeBackward>(ref, nullptr, began));
}

// The nodes that have computed the inputs of one forward, without those that are deleted. Their hooks share it.
struct Inputs {
    std::mutex mutex; // the nodes may run, and be deleted, in several threads
    std::vector<const torch::autograd::Node *> nodes;
    int64_t when = 0;                             // as given to fp_graph_hook_inputs
    std::unordered_map<int, std::ptrdiff_t> left; // by graph task: how many of the nodes it has still to run

    // The running graph task runs one of the nodes: whether it is the last one in this task.
    bool is_last()
    {
        const std::lock_guard lock(mutex);
        const auto [place, is_first] = left.try_emplace(torch::autograd::get_current_graph_task_id(), 0);
        if (is_first) {
            place->second = std::count_if(nodes.begin(), nodes.end(), will_run);
        }
        if (place->second > 1) {
            place->second--;
            return false;
        }
        left.erase(place);
        return true;
    }

    void forget(const torch::autograd::Node *node)
    {
        const std::lock_guard lock(mutex);
        nodes.erase(std::remove(nodes.begin(), nodes.end(), node), nodes.end());
    }

    // Whether the running graph task runs node, as torch._C._will_engine_execute_node tells it.
    static bool will_run(const torch::autograd::Node *node)
    {
        auto *key = const_cast<torch::autograd::Node *>(node);
        const auto &of_some = *torch::autograd::get_current_graph_task_exec_info(); // empty: all run
        const auto info = of_some.find(key);
        return torch::autograd::get_current_graph_task_nodes_in_graph()->count(key) != 0 &&
               (of_some.empty() || (info != of_some.end() && info->second.should_execute()));
    }
};

// On each of these nodes: inputs_done after the last one.
struct AfterInputs final : UnitHook {
    std::shared_ptr<Inputs> inputs;
    const torch::autograd::Node *node; // the node with this hook; borrowed

    AfterInputs(std::shared_ptr<UnitRef> unit, std::shared_ptr<Inputs> shared, const torch::autograd::Node *hooked)
        : UnitHook(std::move(unit)), inputs(std::move(shared)), node(hooked)
    {
    }

    ~AfterInputs() override
    {
        inputs->forget(node);
    }

    torch::autograd::variable_list operator()(const torch::autograd::variable_list &grads) override
    {
        if (inputs->is_last()) {
            const WithGil gil;
            if (ref->unit != nullptr) {
                call_unit(*ref, [&](void *unit) { return ref->calls.inputs_done(unit, inputs->when); });
            }
        }
        return grads;
    }
};

// Whether the running node adds to .grad. torch.autograd.grad() calls the hooks of a parameter, too, but returns the gradient.
bool
accumulates()
{
    const auto &of_some = *torch::autograd::get_current_graph_task_exec_info(); // empty: all run
    const auto node = torch::autograd::get_current_node();
    const auto info = of_some.find(node.get());
    return info == of_some.end() || info->second.needed_;
}

// On a parameter: before_accumulation, or param_gradient where the unit takes the gradient. A parameter itself gets a
// gradient if it was used past its views.
struct BeforeAccumulation final : UnitHook {
    int index;
    size_t param, n; // its number among n parameters, if the unit takes the gradient; n = 0: the unit does not

    BeforeAccumulation(std::shared_ptr<UnitRef> unit, int flat, size_t which, size_t of)
        : UnitHook(std::move(unit)), index(flat), param(which), n(of)
    {
    }

    torch::autograd::variable_list operator()(const torch::autograd::variable_list &grads) override
    {
        if (!accumulates()) {
            return grads;
        }
        const WithGil gil;
        int taken = 0;
        if (ref->unit != nullptr && n > 0 && grads.at(0).defined()) {
            TORCH_CHECK(
                !at::GradMode::is_enabled(), "flatparam: ", ref->name,
                " cannot take part in backward(create_graph=True): its gradients are reduced without a history");
            torch::autograd::variable_list of_all(n);
            of_all[param] = grads[0];
            fp_gradients gradients{of_all};
            call_unit(*ref, [&](void *unit) {
                taken = ref->calls.param_gradient(unit, index, static_cast<Py_ssize_t>(param), &gradients);
                return taken;
            });
        }
        else if (ref->unit != nullptr) {
            call_unit(*ref, [&](void *unit) { return ref->calls.before_accumulation(unit, index); });
        }
        return taken > 0 ? torch::autograd::variable_list(1) : grads;
    }
};

// The number of a user's thread, left by fp_graph_keep_caller() among the thread-local states that autograd copies to the
// threads of a backward. Where a thread has none, the queue of the thread that has called backward() serves as its number.
struct Caller final : c10::SafePyObject {
    static inline const std::string key = "flatparam"; // a string made once, as each hook looks it up
    uintptr_t number;

    explicit Caller(uintptr_t thread) : SafePyObject(nullptr, nullptr), number(thread) {}
};

// The graph task that runs in this thread; null: none. libtorch gives the address of a member, exec_info_, alone.
const torch::autograd::GraphTask *
current_task()
{
    const auto *info = torch::autograd::get_current_graph_task_exec_info();
    if (info == nullptr) {
        return nullptr;
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
    constexpr size_t offset = offsetof(torch::autograd::GraphTask, exec_info_);
#pragma GCC diagnostic pop
    return reinterpret_cast<const torch::autograd::GraphTask *>(reinterpret_cast<const char *>(info) - offset);
}

} // namespace

ViewsBackward::ViewsBackward(std::shared_ptr<const Geometry> places, const at::Tensor &flat)
    : geometry(std::move(places)), options(flat.options())
{
    add_next_edge(torch::autograd::impl::gradient_edge(flat));
    input_metadata_.reserve(geometry->views.size());
}

ViewsBackward::ViewsBackward(std::shared_ptr<const Geometry> places, std::shared_ptr<UnitRef> told, int flat)
    : Node(/*sequence_nr=*/UINT64_MAX), // the highest priority, as AccumulateGrad has: it runs as soon as it is ready
      geometry(std::move(places)), unit(std::move(told)), index(flat)
{
    input_metadata_.reserve(geometry->views.size());
}

void
ViewsBackward::run_on_current_stream(const at::Tensor &view)
{
    torch::autograd::InputMetadata &first = input_metadata_[0]; // the engine takes the stream from it
    if (view.is_cpu() || first.stream() == c10::impl::VirtualGuardImpl(view.device().type()).getStream(view.device())) {
        return;
    }
    std::destroy_at(&first);
    std::construct_at(&first, view);
}

torch::autograd::variable_list
ViewsBackward::apply(torch::autograd::variable_list &&grads)
{
    const bool any = std::any_of(grads.begin(), grads.end(), [](const at::Tensor &grad) { return grad.defined(); });
    if (unit) {
        TORCH_CHECK(!at::GradMode::is_enabled(), "flatparam: ", unit->name,
                    " cannot take part in backward(create_graph=True): its gradients are reduced without a history");
        if (any) {
            check_gradients(*geometry, grads, unit->name);
            fp_gradients gradients{grads};
            call_unit(*unit, [&](void *told) { return unit->calls.gradients_ready(told, index, &gradients); });
        }
        return {};
    }
    return {any && task_should_compute_output(0) ? pack(*geometry, grads, options) : at::Tensor()};
}

at::Tensor
ViewsBackward::pack(const Geometry &geometry, const torch::autograd::variable_list &grads,
                    const at::TensorOptions &options)
{
    check_gradients(geometry, grads, views_name);
    const bool packable =
        !at::GradMode::is_enabled() && !fp_torch_modes_active() &&
        std::all_of(grads.begin(), grads.end(), [&](const at::Tensor &grad) {
            return !grad.defined() || (is_plain_tensor(grad) && grad.scalar_type() == options.dtype().toScalarType() &&
                                       grad.device() == options.device());
        });
    if (!packable) {
        return flatten_by_ops(geometry, grads, options);
    }
    const at::Tensor flat = at::empty({geometry.total}, options);
    pack_pieces(flat, geometry, grads, options, {});
    return flat;
}

} // namespace fp

extern "C" {

fp_unit_ref *
fp_unit_ref_new(void *unit, const char *name, const fp_unit_callbacks *calls)
{
    return fp::guarded<fp_unit_ref *>(nullptr, [&] {
        auto shared = std::make_shared<fp::UnitRef>();
        shared->unit = unit;
        shared->name = name;
        shared->calls = *calls;
        return new fp_unit_ref{std::move(shared)};
    });
}

void
fp_unit_ref_keep(fp_unit_ref *ref, PyObject *unit)
{
    const std::shared_ptr<fp::Graph> graph = ref->shared->graph.lock();
    if (graph != nullptr && graph->waiting != 0 && graph->unit == nullptr) {
        graph->unit = Py_NewRef(unit);
    }
}

void
fp_unit_ref_drop(fp_unit_ref *ref)
{
    if (ref != nullptr) {
        ref->shared->unit = nullptr;
        delete ref;
    }
}

uint64_t
fp_graph_now(void) noexcept
{
    return at::sequence_number::get_and_increment();
}

int
fp_graph_hook(PyObject *tensor_object, fp_unit_ref *ref, uint64_t began)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &tensor = THPVariable_Unpack(tensor_object);
        const auto &node = tensor.grad_fn();
        if (!node) {
            return 0;
        }
        fp::hook(*node, ref->shared, began);
        if (tensor.is_view()) { // an in-place change gives a view a new node, and its base keeps the old one
            const auto &of_base = tensor._base().grad_fn();
            if (of_base && of_base != node && of_base->sequence_nr() >= began) {
                fp::hook(*of_base, ref->shared, began);
            }
        }
        return 1;
    });
}

int
fp_graph_hook_inputs(PyObject *tensors, fp_unit_ref *ref, int64_t when)
{
    return fp::guarded(-1, [&] {
        const auto inputs = std::make_shared<fp::Inputs>();
        std::vector<torch::autograd::Node *> nodes;
        for (const at::Tensor &tensor :
             fp::unpack_all(PySequence_Fast_ITEMS(tensors), PySequence_Fast_GET_SIZE(tensors))) {
            torch::autograd::Node *node = tensor.requires_grad() ? tensor.grad_fn().get() : nullptr;
            const auto *behind_views = dynamic_cast<const fp::ViewsBackward *>(node);
            if (tensor.requires_grad() && (node == nullptr || (behind_views != nullptr && behind_views->unit))) {
                return 0;
            }
            if (node != nullptr && std::find(nodes.begin(), nodes.end(), node) == nodes.end()) {
                nodes.push_back(node);
            }
        }
        inputs->when = when;
        inputs->nodes.assign(nodes.begin(), nodes.end());
        for (torch::autograd::Node *node : nodes) {
            node->add_tensor_pre_hook(std::make_unique<fp::AfterInputs>(ref->shared, inputs, node));
        }
        return nodes.empty() ? 0 : 1;
    });
}

int
fp_graph_watch(PyObject *const *params, Py_ssize_t n, fp_unit_ref *ref, int index, int takes)
{
    return fp::guarded(-1, [&] {
        const std::vector<at::Tensor> targets = fp::unpack_all(params, n);
        for (size_t i = 0; i < targets.size(); i++) {
            auto &hooks =
                torch::autograd::impl::materialize_autograd_meta(targets[i])->hooks_; // in the list of the user's hooks
            if (std::none_of(hooks.begin(), hooks.end(), [&](const auto &hook) {
                    const auto *ours = dynamic_cast<const fp::BeforeAccumulation *>(hook.get());
                    return ours != nullptr && ours->ref == ref->shared;
                })) {
                hooks.push_back(
                    std::make_unique<fp::BeforeAccumulation>(ref->shared, index, i, takes != 0 ? targets.size() : 0));
            }
        }
        return 0;
    });
}

int
fp_graph_has_hooks(PyObject *param)
{
    return fp::guarded(-1, [&] { return fp::has_hooks_of_users(fp::unpack(param)) ? 1 : 0; });
}

int
fp_graph_task(void) noexcept
{
    return torch::autograd::get_current_graph_task_id();
}

uintptr_t
fp_graph_caller(void) noexcept
{
    if (at::impl::ThreadLocalPythonObjects::contains(fp::Caller::key)) {
        return static_cast<const fp::Caller *>(at::impl::ThreadLocalPythonObjects::get(fp::Caller::key).get())->number;
    }
    const torch::autograd::GraphTask *task = fp::current_task();
    return task == nullptr ? PyThread_get_thread_ident() : reinterpret_cast<uintptr_t>(task->cpu_ready_queue_.get());
}

int
fp_graph_keep_caller(void)
{
    return fp::guarded(-1, [] {
        if (!at::impl::ThreadLocalPythonObjects::contains(fp::Caller::key)) {
            at::impl::ThreadLocalPythonObjects::set(fp::Caller::key, std::make_shared<fp::Caller>(fp_graph_caller()));
        }
    });
}

int
fp_graph_at_end(fp_unit_ref *ref)
{
    return fp::guarded(-1, [&] {
        torch::autograd::Engine::get_default_engine().queue_callback([shared = ref->shared] {
            fp::call_unit(*shared, [&](void *unit) { return shared->calls.before_backward(unit, 0); });
        });
        ref->shared->task = fp::current_task()->weak_from_this();
    });
}

int
fp_graph_is_running(const fp_unit_ref *ref) noexcept
{
    const auto task = ref->shared->task.lock();
    return task &&
           !task->has_error_; /* after backward() has raised, a thread of a device may have the task for a moment */
}

int
fp_graph_grad_enabled(void) noexcept
{
    return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

int
fp_graph_is_retained(void) noexcept
{
    return torch::autograd::get_current_graph_task_keep_graph();
}

fp_range *
fp_range_begin(const char *what, PyObject *name) noexcept
{
    fp_range *begun = fp::guarded<fp_range *>(nullptr, [&]() -> fp_range * {
        auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
        const char *text = callbacks ? PyUnicode_AsUTF8(name) : nullptr;
        if (text == nullptr) {
            return nullptr;
        }
        auto range = std::make_unique<fp_range>(std::move(*callbacks));
        range->function.before(std::string("flatparam ") + what + ": " + text);
        return range.release();
    });
    if (begun == nullptr) {
        PyErr_Clear(); /* a failure of the profiler must not fail the operation */
    }
    return begun;
}

void
fp_range_end(fp_range *range)
{
    delete range;
}

} // extern "C"
