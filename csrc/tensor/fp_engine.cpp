// tensor/fp_engine.cpp -- one flat parameter at work: gathered into one buffer, its gradients packed and reduced.
#include "tensor/fp_engine.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_convert.hpp"

// ---- what the C names stand for ----

struct fp_group {
    c10::intrusive_ptr<c10d::ProcessGroup> native;  // or null: Python's way only
    PyObject *object = nullptr;                     // owned
    std::array<PyObject *, FP_WATCHERS> watchers{}; // owned, or null: nobody is told of its collectives
    const fp_group_calls *calls = nullptr;
    std::array<uint32_t, FP_WATCHERS> numbers{};
    bool sliced = false;   // waits are interrupted to tell the watcher
    bool given_up = false; // what is under way may not end soon: nobody waits for it when a pass is forgotten
};

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
    fp_module_params_calls calls{};
    std::weak_ptr<const void> task; // of the last callback, which goes with its graph task
    std::weak_ptr<Graph> graph;
};

// Call the unit behind ref, from a thread of autograd; an exception goes on through the engine.
template <class Call>
void
call_unit(const UnitRef &ref, Call &&call)
{
    const WithGil gil;
    TORCH_CHECK(ref.unit != nullptr, "flatparam: ", ref.name,
                " was deleted before the backward pass of a graph that used its parameters had ended");
    if (call(ref.unit) < 0) {
        python_error error;
        error.persist();
        throw error;
    }
}

} // namespace fp

struct fp_range {
    at::RecordFunction function;

    explicit fp_range(at::StepCallbacks &&callbacks) : function(std::move(callbacks)) {}
};

struct fp_params_ref {
    std::shared_ptr<fp::UnitRef> shared;
};

struct fp_sum {
    fp_group *group = nullptr;
    at::Tensor here, there; // on the host and on the device; the same tensor where that is the host
    c10::intrusive_ptr<c10d::Work> work;
    std::optional<c10::Event> is_here; // recorded after the copy to the host
};

struct fp_gradients {
    std::vector<at::Tensor> &list;
};

static bool
is_low(at::ScalarType dtype)
{
    return dtype == at::kBFloat16 || dtype == at::kHalf;
}

struct fp_flat_buffer {
    std::shared_ptr<const fp::Geometry> geometry;
    int64_t shard_numel = 0;
    int rank = 0, shards = 1;
    fp_group *shard_group = nullptr, *replicate_group = nullptr;
    int param_rank = 0, param_shards = 1;
    fp_group *param_group = nullptr, *refresh_group = nullptr;
    double predivide = 1.0, postdivide = 1.0;
    std::optional<at::ScalarType> compute_dtype, reduce_dtype;
    bool full_precision = false, keep_reduce_dtype = false, stays_full = false;
    bool in_full = false;              // everything is in the shard's dtype for the time being
    std::optional<c10::Device> device; // to compute on, where it is not the shard's

    at::Tensor full; // [total] in the compute dtype; its storage has 0 bytes while freed
    at::Tensor io;   // the same memory under another version counter: what is written here is no change to autograd
    bool borrowed = false;               // full is the shard itself
    bool whole = false;                  // full has, or is about to get, what was gathered
    at::Tensor copy;                     // [total / param_shards] in the compute dtype: what param_group gathers from
    at::Tensor next_copy;                // nested: the same while it is gathered
    c10::intrusive_ptr<c10d::Work> work; // of a gather
    fp_group *work_group = nullptr;      // over which
    bool abandoned = false;              // a pass was forgotten before work had ended: its memory cannot be freed yet
    at::Tensor kept;                     // [total] in kept_dtype_of(shard): gradients that are not reduced yet
    at::Tensor partial;                  // nested: [total / param_shards] of it, added over param_group
    at::Tensor wire, reduced;            // of a reduction: its input and output
    at::Tensor summed;                   // the part of wire that becomes reduced, if wire is added up in place
    c10::intrusive_ptr<c10d::Work> reduction;
    at::Tensor arriving;                             // the reduced gradient on the host, once has_arrived
    std::optional<c10::Event> was_read, has_arrived; // recorded after copies from and to a shard on the host
    enum { NOTHING, FIRST, LAST } stage = NOTHING;
    bool stops_at_partial = false; // nested: the reduction under way goes no further
    bool offloads = false;
    at::Tensor host;         // where kept, nested: partial, is between backwards; pinned beside an accelerator
    bool host_valid = false; // it is there now
    std::optional<c10::Event> has_left; // recorded after the copy to it
    at::Tensor ahead;                   // a copy of host on the device that was started in time
    std::optional<c10::Event> has_come; // recorded after it
    bool packed = false;                // wire is to be reduced
    uint32_t trained = 0;               // a hash of who requires grad
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> source; // where the shard was seen last
    int64_t sources = 0;                                             // how often that changed
    decltype(torch::autograd::Edge::function) node;                  // behind the views; null if they have none
    int64_t shown_version = 0; // the version of full that autograd knows of the views
    int64_t seen_version = 0;  // up to which what was written to them in place has been taken into the shard

    // Somebody outside reads the memory of full, which may not be freed or written to then.
    bool is_lent() const
    {
        return full.defined() && !borrowed && (!fp::storage_of(full)->resizable() || fp::is_held(fp::storage_of(full)));
    }
    int64_t part_numel() const
    {
        return geometry->total / param_shards;
    }

    c10::Device device_for(const at::Tensor &shard) const
    {
        return device.value_or(shard.device());
    }
    at::ScalarType dtype_of(const at::Tensor &shard) const
    {
        return in_full ? shard.scalar_type() : compute_dtype.value_or(shard.scalar_type());
    }
    at::ScalarType wire_dtype_of(const at::Tensor &shard) const
    {
        const at::ScalarType otherwise = full_precision ? shard.scalar_type() : dtype_of(shard);
        return in_full ? shard.scalar_type() : reduce_dtype.value_or(otherwise);
    }
    at::ScalarType kept_dtype_of(const at::Tensor &shard) const
    {
        return is_low(shard.scalar_type()) ? at::kFloat : shard.scalar_type();
    }
};

namespace fp {
namespace {

// target (+)= the gradients at their places * scale; zeros where there is none.
void
pack_gradients(const fp_flat_buffer &flat, const at::Tensor &target, const std::vector<at::Tensor> &gradients,
               const How &how)
{
    const at::ScalarType dtype = flat.full.scalar_type();
    const bool plain =
        target.is_cpu() && std::all_of(gradients.begin(), gradients.end(), [&](const at::Tensor &grad) {
            return !grad.defined() || (is_plain_tensor(grad) && grad.is_cpu() && grad.scalar_type() == dtype);
        });
    const std::vector<View> &views = flat.geometry->views;
    if (plain && (is_known_to_core(dtype) || target.scalar_type() == dtype)) {
        const Sources sources = sources_of(*flat.geometry, gradients);
        if (pack(target, dtype, sources.segments, how)) {
            for (const size_t i : sources.strided) {
                convert_by_ops(alias(target, views[i].shape, views[i].stride, views[i].offset), gradients[i], how);
            }
            return;
        }
    }
    if (target.is_cpu() || !pack_batched(target, *flat.geometry, gradients, how)) {
        convert_by_ops(target, flatten_by_ops(*flat.geometry, gradients, flat.full.options(), 0.0), how);
    }
}

std::optional<at::ScalarType>
dtype_from(PyObject *object)
{
    if (object == nullptr || object == Py_None) {
        return std::nullopt;
    }
    TORCH_CHECK_TYPE(THPDtype_Check(object), "expected a torch.dtype, got ", Py_TYPE(object)->tp_name);
    return reinterpret_cast<THPDtype *>(object)->scalar_type;
}

std::optional<c10::Device>
device_from(PyObject *object)
{
    if (object == nullptr || object == Py_None) {
        return std::nullopt;
    }
    TORCH_CHECK_TYPE(THPDevice_Check(object), "expected a torch.device, got ", Py_TYPE(object)->tp_name);
    return reinterpret_cast<THPDevice *>(object)->device;
}

// Backends do not know complex numbers: those are sent as pairs.
at::Tensor
as_sent(const at::Tensor &tensor)
{
    return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

// The collectives; async, on the C++ group, under the names this torch has. Without the GIL: gloo's threads take it under
// the lock of the queue that these calls wait for.
template <class Group>
c10::intrusive_ptr<c10d::Work>
all_gather(Group &group, const at::Tensor &gathered, const at::Tensor &own)
{
    const WithoutGil released;
    at::Tensor output = as_sent(gathered), input = as_sent(own);
    if constexpr (requires { group.all_gather_single(output, input); }) {
        return group.all_gather_single(output, input);
    }
    else {
        return group._allgather_base(output, input);
    }
}

template <class Group>
c10::intrusive_ptr<c10d::Work>
reduce_scatter(Group &group, const at::Tensor &reduced, const at::Tensor &whole)
{
    const WithoutGil released;
    at::Tensor output = as_sent(reduced), input = as_sent(whole);
    if constexpr (requires { group.reduce_scatter_single(output, input); }) {
        return group.reduce_scatter_single(output, input);
    }
    else {
        return group._reduce_scatter_base(output, input);
    }
}

// The same through Python: collectives.name(output, input, group).
void
call_python(PyObject *collectives, const char *name, const at::Tensor &output, const at::Tensor &input,
            const fp_group &group)
{
    PyObject *out = THPVariable_Wrap(output);
    PyObject *in = out == nullptr ? nullptr : THPVariable_Wrap(input);
    PyObject *result = in == nullptr ? nullptr : PyObject_CallMethod(collectives, name, "OOO", out, in, group.object);
    Py_XDECREF(out);
    Py_XDECREF(in);
    if (result == nullptr) {
        throw python_error();
    }
    Py_DECREF(result);
}

void
announce(fp_group &group, unsigned kind, uint32_t trained = 0)
{
    group.given_up = false;
    for (size_t i = group.watchers.size(); i-- > 0;) {
        PyObject *watcher = group.watchers[i];
        if (watcher != nullptr && group.calls->before(watcher, fp_event(group.numbers[i], kind, trained)) < 0) {
            throw python_error();
        }
    }
}

constexpr std::chrono::milliseconds patience{300};

// Wait for a while; whether the work has ended. What it raises is raised.
bool
wait_a_while(c10d::Work &work)
{
    const WithoutGil released;
    try {
        work.wait(patience);
        return true;
    }
    catch (...) {
        if (!work.isCompleted()) { /* it is the time that ran out */
            return false;
        }
        work.wait();
        return true;
    }
}

// The same for work that is forgotten if it has failed.
bool
wait_a_while(c10d::Work &work, c10::intrusive_ptr<c10d::Work> &owner)
{
    try {
        return wait_a_while(work);
    }
    catch (...) {
        owner.reset();
        throw;
    }
}

// What call gives; if it fails, the watchers may know better why.
template <class Call>
auto
explained(const fp_group *group, Call &&call)
{
    try {
        return call();
    }
    catch (const python_error &) {
        throw;
    }
    catch (const std::exception &error) {
        for (size_t i = 0; group != nullptr && i < group->watchers.size(); i++) {
            if (group->watchers[i] != nullptr && group->calls->failed(group->watchers[i], error.what()) < 0) {
                throw python_error();
            }
        }
        throw;
    }
}

// Whether the gather under way may never end, so that its memory cannot be freed; if it has, however it did, it is
// forgotten.
bool
is_lost(fp_flat_buffer &flat)
{
    const fp_group *group = flat.work_group;
    if (!flat.work || group == nullptr ||
        (!flat.abandoned && std::none_of(group->watchers.begin(), group->watchers.end(), [&](PyObject *watcher) {
            return watcher != nullptr && group->calls->is_broken(watcher);
        }))) {
        return false;
    }
    if (flat.work->isCompleted()) {
        flat.work.reset();
        flat.abandoned = false;
    }
    return flat.work != nullptr;
}

// Wait for what was started over group. If its watcher ends the wait, the work stays: it goes on, its memory is written to,
// and it can be waited for again. What has ended, or failed, is forgotten.
void
wait_for(c10::intrusive_ptr<c10d::Work> &work, const fp_group *group)
{
    if (!work) {
        return;
    }
    const c10::intrusive_ptr<c10d::Work> waited = work;
    if (group != nullptr && group->sliced) {
        while (!explained(group, [&] { return wait_a_while(*waited, work); })) {
            for (PyObject *watcher : group->watchers) {
                if (watcher != nullptr && group->calls->waiting(watcher) < 0) {
                    throw python_error();
                }
            }
        }
        work.reset();
        return;
    }
    work.reset();
    explained(group, [&] {
        const WithoutGil released;
        waited->wait();
    });
}

// Wait for a gather. Of one that has failed nothing is there.
void
wait_for_gather(fp_flat_buffer &flat)
{
    try {
        wait_for(flat.work, flat.work_group);
    }
    catch (...) {
        if (!flat.work) {
            flat.whole = false;
            flat.next_copy.reset();
        }
        throw;
    }
}

// The group of the reduction under way.
const fp_group *
reducing_over(const fp_flat_buffer &flat)
{
    if (flat.stage == fp_flat_buffer::LAST && flat.replicate_group != nullptr) {
        return flat.replicate_group;
    }
    if (flat.refresh_group != nullptr) {
        return flat.stage == fp_flat_buffer::LAST ? flat.refresh_group : flat.param_group;
    }
    return flat.shard_group;
}

c10::intrusive_ptr<c10d::Work>
all_reduce(const fp_group &group, const at::Tensor &tensor)
{
    return explained(&group, [&] {
        std::vector<at::Tensor> tensors = {as_sent(tensor)};
        const WithoutGil released;
        return group.native->allreduce(tensors);
    });
}

// gloo's reduce_scatter is an all-reduce of a copy, and its wait cannot be interrupted: without the copy it can.
c10::intrusive_ptr<c10d::Work>
start_reduction(fp_flat_buffer &flat, const fp_group &group)
{
    if (!group.sliced) {
        return explained(&group, [&] { return reduce_scatter(*group.native, flat.reduced, flat.wire); });
    }
    const int64_t numel = flat.reduced.numel();
    flat.summed = alias(flat.wire, numel, int64_t{1}, flat.wire.storage_offset() + group.native->getRank() * numel);
    return all_reduce(group, flat.wire);
}

void
wait_for_reduction(fp_flat_buffer &flat)
{
    const c10::intrusive_ptr<c10d::Work> reduction = flat.reduction;
    try {
        wait_for(flat.reduction, reducing_over(flat));
    }
    catch (...) {
        flat.reduction = reduction; // what has failed fails again
        throw;
    }
    if (flat.summed.defined()) {
        flat.reduced.copy_(flat.summed);
        flat.summed.reset();
    }
}

// Start gathering or reducing over group; Python, where it does it, waits itself.
void
gather_over(fp_flat_buffer &flat, fp_group &group, at::Tensor &output, at::Tensor &input, PyObject *collectives)
{
    announce(group, FP_EVENT_GATHERS);
    flat.work_group = &group;
    if (collectives != nullptr || !group.native) {
        call_python(collectives, "all_gather", output, input, group);
    }
    else {
        flat.work = explained(&group, [&] { return all_gather(*group.native, output, input); });
    }
}

void
reduce_over(fp_flat_buffer &flat, fp_group &group, PyObject *collectives)
{
    announce(group, FP_EVENT_REDUCES, flat.trained);
    if (collectives != nullptr || !group.native) {
        call_python(collectives, "reduce_scatter", flat.reduced, flat.wire, group);
    }
    else {
        flat.reduction = start_reduction(flat, group);
    }
}

// Autograd's part of one flat: packs nothing itself, but tells the unit that all gradients of its views are there. One that
// was told so runs after all of the forward that it belongs to: reentrant checkpoints in it come to parameters, and give
// gradients of them, in graph tasks of their own, which this one's gradients do not wait for.
struct UnitBackward final : torch::autograd::Node {
    std::shared_ptr<UnitRef> ref;
    std::shared_ptr<const Geometry> geometry;
    int index = 0;

    UnitBackward() : Node(/*sequence_nr=*/UINT64_MAX) // as AccumulateGrad: as soon as it is ready
    {
    }

    std::string name() const override
    {
        return "FlatParamUnitBackward";
    }

    torch::autograd::variable_list apply(torch::autograd::variable_list &&grads) override
    {
        TORCH_CHECK(!at::GradMode::is_enabled(), "flatparam: ", ref->name,
                    " cannot take part in backward(create_graph=True): its gradients are reduced without a history");
        if (std::any_of(grads.begin(), grads.end(), [](const at::Tensor &grad) { return grad.defined(); })) {
            check_gradients(*geometry, grads, ref->name);
            fp_gradients gradients{grads};
            call_unit(*ref, [&](void *unit) { return ref->calls.gradients_ready(unit, index, &gradients); });
        }
        return {};
    }
};

struct BeforeBackward final : torch::autograd::FunctionPreHook {
    std::shared_ptr<UnitRef> ref;
    std::shared_ptr<Graph> graph; // or null: it is not waited for
    uint64_t began;
    bool waits;

    BeforeBackward(std::shared_ptr<UnitRef> unit, std::shared_ptr<Graph> hooked, uint64_t since)
        : ref(std::move(unit)), graph(std::move(hooked)), began(since), waits(graph != nullptr)
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
        call_unit(*ref, [&](void *unit) { return ref->calls.before_backward(unit, began); });
        return grads;
    }
};

// Of the unsharded tensor.
size_t
bytes_of(const fp_flat_buffer &flat)
{
    return static_cast<size_t>(flat.geometry->total) * flat.full.element_size();
}

// On a parameter: autograd is about to add a gradient that does not come from a view of it.
struct BeforeAccumulation final : torch::autograd::FunctionPreHook {
    std::shared_ptr<UnitRef> ref;
    int index;

    BeforeAccumulation(std::shared_ptr<UnitRef> unit, int flat) : ref(std::move(unit)), index(flat) {}

    torch::autograd::variable_list operator()(const torch::autograd::variable_list &grads) override
    {
        const WithGil gil;
        if (ref->unit != nullptr) {
            call_unit(*ref, [&](void *unit) { return ref->calls.before_accumulation(unit, index); });
        }
        return grads;
    }
};

// The graph task that runs in this thread; libtorch tells where some of its members are.
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

at::TensorOptions
wire_options(const fp_flat_buffer &flat, const at::Tensor &shard)
{
    return shard.options().device(flat.full.device()).requires_grad(false).dtype(flat.wire_dtype_of(shard));
}

// target (+)= source * scale where nothing else is to be done to source, else source itself, changed.
at::Tensor
on_the_wire(at::Tensor source, const at::TensorOptions &options, std::optional<double> scale)
{
    if (source.dtype() == options.dtype() && source.device() == options.device()) {
        if (scale) {
            source.mul_(*scale);
        }
        return source;
    }
    at::Tensor wire = at::empty(source.sizes(), options);
    convert(wire, source, {.scale = scale, .accumulate = false});
    return wire;
}

// Whether copies to and from host memory go over a stream of their own.
bool
has_streams(const at::Tensor &tensor)
{
    return !tensor.is_cpu();
}

// The stream for them, and what the last unit has copied out over it: freed when the next one comes or the backward ends,
// so that beside the gradient that is added to one comes and one goes at most.
struct Copying {
    std::mutex mutex;
    std::optional<c10::Stream> stream;
    at::Tensor leaving;
    std::optional<c10::Event> has_left;
};

Copying &
copying_of(const c10::Device &device)
{
    static std::array<Copying, 64> all;
    const auto index = static_cast<size_t>(device.index());
    TORCH_CHECK(index < all.size(), "flatparam: gradients on ", device, " cannot be offloaded");
    const std::lock_guard<std::mutex> lock(all[index].mutex);
    if (!all[index].stream) {
        const c10::impl::VirtualGuardImpl guard(device.type());
        all[index].stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
    }
    return all[index];
}

// target = source over the stream for it, in the order of the current one. The event is recorded after it.
c10::Event
copy_over(const at::Tensor &target, const at::Tensor &source, const c10::Device &device)
{
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream own = *copying_of(device).stream;
    c10::Event before(device.type()), after(device.type());
    before.record(guard.getStream(device));
    before.block(own);
    {
        const c10::StreamGuard on_own(own);
        target.copy_(source, /*non_blocking=*/true);
    }
    after.record(own);
    return after;
}

// What was copied out may be freed: the current stream, on which its memory will be used next, waits for the copy.
void
settle_copies(const c10::Device &device)
{
    Copying &copying = copying_of(device);
    if (copying.has_left) {
        copying.has_left->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
        copying.has_left.reset();
    }
    copying.leaving.reset();
}

// Start the copy of what lies in host memory to the device.
void
bring_back(fp_flat_buffer &flat)
{
    if (!flat.host_valid || flat.ahead.defined()) {
        return;
    }
    const c10::Device device = flat.full.device();
    flat.ahead = at::empty(flat.host.sizes(), flat.host.options().pinned_memory(false).device(device));
    if (has_streams(flat.ahead)) {
        flat.has_come = copy_over(flat.ahead, flat.host, device);
    }
    else {
        flat.ahead.copy_(flat.host);
    }
}

// What lies in host memory comes back into an empty accumulator, in time for what the current stream does next.
void
reload(fp_flat_buffer &flat, at::Tensor &accumulator)
{
    if (!flat.host_valid) {
        return;
    }
    bring_back(flat);
    if (flat.has_come) {
        const c10::Device device = flat.full.device();
        flat.has_come->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
        flat.has_come.reset();
        flat.has_left.reset();
    }
    accumulator = std::move(flat.ahead);
    flat.ahead.reset();
    flat.host_valid = false;
}

// What was accumulated goes to host memory.
void
offload(fp_flat_buffer &flat, at::Tensor &accumulator)
{
    if (!flat.offloads) {
        return;
    }
    if (!flat.host.defined() || flat.host.sizes() != accumulator.sizes() || flat.host.dtype() != accumulator.dtype()) {
        const at::TensorOptions options = accumulator.options().device(at::kCPU);
        flat.host = at::empty(accumulator.sizes(), options.pinned_memory(has_streams(accumulator)));
    }
    if (has_streams(accumulator)) {
        const c10::Device device = accumulator.device();
        settle_copies(device);
        flat.has_left = copy_over(flat.host, accumulator, device);
        Copying &copying = copying_of(device);
        c10::Event after(device.type());
        after.record(*copying.stream);
        copying.has_left = std::move(after);
        copying.leaving = std::move(accumulator);
    }
    else {
        flat.host.copy_(accumulator);
    }
    accumulator.reset();
    flat.host_valid = true;
}

c10::Event
recorded_now(const c10::Device &device)
{
    c10::Event event(device.type());
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return event;
}

void
wait_until(std::optional<c10::Event> &event)
{
    if (event) {
        const WithoutGil released;
        event->synchronize();
        event.reset();
    }
}

// slot = shard, from the host too.
void
fill(fp_flat_buffer &flat, const at::Tensor &slot, const at::Tensor &shard)
{
    if (slot.device() == shard.device()) {
        convert(slot, shard, {});
        return;
    }
    convert(slot, shard.to(slot.device(), /*non_blocking=*/true), {});
    flat.was_read = recorded_now(slot.device());
}

// What was reduced as the gradient of the shard, on its way to where that is.
at::Tensor
as_gradient(fp_flat_buffer &flat, const at::Tensor &shard)
{
    at::Tensor result = std::move(flat.reduced);
    flat.reduced.reset();
    flat.wire.reset();
    if (flat.postdivide != 1.0) {
        result.div_(flat.postdivide);
    }
    result = result.to(flat.keep_reduce_dtype ? result.scalar_type() : shard.scalar_type());
    if (result.device() == shard.device()) {
        return result;
    }
    at::Tensor there = at::empty(result.sizes(), result.options().device(shard.device()).pinned_memory(shard.is_cpu()));
    there.copy_(result, /*non_blocking=*/true);
    flat.has_arrived = recorded_now(result.device());
    return there;
}

// What is kept and the gradients, which may be null, as they are reduced.
void
make_wire(fp_flat_buffer &flat, const fp_gradients *gradients, const at::TensorOptions &options)
{
    const std::optional<double> scale =
        flat.predivide != 1.0 ? std::optional<double>(1.0 / flat.predivide) : std::nullopt;
    const WithoutGil released;
    if (flat.refresh_group == nullptr) {
        reload(flat, flat.kept);
    }
    if (flat.kept.defined()) {
        if (gradients != nullptr) {
            pack_gradients(flat, flat.kept, gradients->list, {.scale = std::nullopt, .accumulate = true});
        }
        flat.wire = on_the_wire(std::move(flat.kept), options, scale);
        flat.kept.reset();
    }
    else if (gradients != nullptr) {
        flat.wire = at::empty({flat.geometry->total}, options);
        pack_gradients(flat, flat.wire, gradients->list, {.scale = scale, .accumulate = false});
    }
    else {
        flat.wire = at::zeros({flat.geometry->total}, options);
    }
}

// What the ranks that share the copy have added up joins what they have added up before, in the shard's dtype.
void
add_to_partial(fp_flat_buffer &flat, const at::Tensor &shard)
{
    const WithoutGil released;
    reload(flat, flat.partial);
    if (flat.partial.defined()) {
        convert(flat.partial, flat.reduced, {.scale = std::nullopt, .accumulate = true});
    }
    else {
        flat.partial = flat.reduced.to(shard.scalar_type());
    }
    flat.reduced.reset();
    if (flat.stops_at_partial) {
        offload(flat, flat.partial);
    }
}

// Let autograd take the views for what they were made as, though full has been changed in place since; else it would look
// for another history of them.
void
show_version(fp_flat_buffer &flat, PyObject *const *views)
{
    const int64_t version = flat.full._version();
    if (version == flat.shown_version) {
        return;
    }
    for (size_t i = 0; i < flat.geometry->views.size(); i++) {
        if (auto *meta = torch::autograd::impl::get_view_autograd_meta(THPVariable_Unpack(views[i]))) {
            meta->set_attr_version(static_cast<uint32_t>(version));
        }
    }
    flat.shown_version = version;
}

void
change_version(fp_flat_buffer &flat, PyObject *const *views)
{
    const bool seen = flat.seen_version == flat.full._version();
    flat.full.unsafeGetTensorImpl()->bump_version();
    flat.seen_version += seen;
    show_version(flat, views);
}

bool
is_view_at(const fp_flat_buffer &flat, PyObject *view, size_t i)
{
    const View &place = flat.geometry->views[i];
    return is_at(THPVariable_Unpack(view), flat.full, place.shape, place.stride,
                 flat.full.storage_offset() + place.offset);
}

bool
has_same_bytes(const at::Tensor &a, const at::Tensor &b)
{
    return at::equal(a.view(at::kByte), b.view(at::kByte));
}

// What our shard has of values, elements [offset, ...) of the unsharded tensor, becomes so. What it has in a higher
// precision, and is the same in theirs, stays. Whether anything has changed.
bool
write_to_shard(const fp_flat_buffer &flat, const at::Tensor &shard, int64_t offset, const at::Tensor &values)
{
    const int64_t begin = flat.rank * flat.shard_numel;
    const int64_t first = std::max(begin, offset);
    const int64_t last = std::min(begin + flat.shard_numel, offset + values.numel());
    if (first >= last) {
        return false;
    }
    const at::Tensor target = alias(shard, last - first, int64_t{1}, shard.storage_offset() + first - begin);
    const at::Tensor mine =
        alias(values, last - first, int64_t{1}, values.storage_offset() + first - offset).to(shard.device());
    const at::Tensor now = at::empty_like(mine);
    convert(now, target, {});
    if (has_same_bytes(now, mine)) {
        return false;
    }
    if (mine.scalar_type() == shard.scalar_type()) {
        target.copy_(mine);
        return true;
    }
    const at::ScalarType bits = mine.element_size() == 1 ? at::kByte : mine.element_size() == 2 ? at::kShort : at::kInt;
    target.copy_(at::where(now.view(bits).eq(mine.view(bits)), target, mine.to(shard.scalar_type())));
    return true;
}

void
reduce_partial(fp_flat_buffer &flat, const at::Tensor &shard, PyObject *collectives)
{
    reload(flat, flat.partial);
    const at::TensorOptions options = wire_options(flat, shard);
    flat.wire = flat.partial.defined() ? on_the_wire(std::move(flat.partial), options, std::nullopt)
                                       : at::zeros({flat.part_numel()}, options);
    flat.partial.reset();
    flat.reduced = at::empty({flat.shard_numel}, options);
    flat.stage = fp_flat_buffer::LAST;
    reduce_over(flat, *flat.refresh_group, collectives);
}

at::Tensor
freed_full(const fp_flat_buffer &flat, const at::TensorOptions &options, const char *reason)
{
    return freed_source(options, static_cast<size_t>(flat.geometry->total) * options.dtype().itemsize(), reason, true);
}

// Leave the memory, and what is made of it, to whoever has the storage; our tensors are freed.
void
leave_storage(fp_flat_buffer &flat, PyObject *const *views, const char *reason)
{
    const Plainly plainly;
    const at::Tensor source = freed_full(flat, flat.io.options(), reason);
    for (size_t i = 0; views != nullptr && i < flat.geometry->views.size(); i++) {
        if (is_view_at(flat, views[i], i)) {
            move_to_storage(THPVariable_Unpack(views[i]), source);
        }
    }
    move_to_storage(flat.full, source);
    move_to_storage(flat.io, source);
}

// Let source's storage, which is freed unless it is the borrowed shard, be that of the unsharded tensor.
void
make_full(fp_flat_buffer &flat, const at::Tensor &source, bool borrowed)
{
    const int64_t total = flat.geometry->total, offset = borrowed ? source.storage_offset() : 0;
    flat.full = alias(source, total, int64_t{1}, offset);
    flat.io = alias(source, total, int64_t{1}, offset);
    flat.borrowed = borrowed;
    flat.whole = false;
    flat.shown_version = flat.seen_version = flat.full._version();
}

} // namespace
} // namespace fp

extern "C" {

fp_group *
fp_group_new(PyObject *object, const char *name)
{
    return fp::guarded<fp_group *>(nullptr, [&] {
        auto group = std::make_unique<fp_group>();
        if (name != nullptr) {
            group->native = c10d::resolve_process_group(name);
        }
        group->object = Py_NewRef(object);
        return group.release();
    });
}

void
fp_group_free(fp_group *group)
{
    if (group != nullptr) {
        Py_XDECREF(group->object); /* torch lets go of the GIL for the last one */
        for (PyObject *watcher : group->watchers) {
            Py_XDECREF(watcher);
        }
        const fp::WithoutGil released; /* the last one waits for collectives, whose threads take it */
        delete group;
    }
}

void
fp_group_watch(fp_group *group, int which, PyObject *watcher, const fp_group_calls *calls, uint32_t number, int sliced)
{
    const auto i = static_cast<size_t>(which);
    group->calls = calls;
    group->numbers[i] = number;
    group->sliced = sliced != 0;
    Py_XSETREF(group->watchers[i], Py_NewRef(watcher));
}

fp_params_ref *
fp_params_ref_new(void *unit, const char *name, const fp_module_params_calls *calls)
{
    return fp::guarded<fp_params_ref *>(nullptr, [&] {
        auto shared = std::make_shared<fp::UnitRef>();
        shared->unit = unit;
        shared->name = name;
        shared->calls = *calls;
        return new fp_params_ref{std::move(shared)};
    });
}

int
fp_params_ref_keep(fp_params_ref *ref, PyObject *unit)
{
    const std::shared_ptr<fp::Graph> graph = ref->shared->graph.lock();
    if (graph == nullptr || graph->waiting == 0 || graph->unit != nullptr) {
        return 0;
    }
    graph->unit = Py_NewRef(unit);
    return 1;
}

void
fp_params_ref_drop(fp_params_ref *ref)
{
    if (ref != nullptr) {
        ref->shared->unit = nullptr;
        delete ref;
    }
}

fp_flat_buffer *
fp_flat_buffer_new(const fp_flat_buffer_options *options)
{
    return fp::guarded<fp_flat_buffer *>(nullptr, [&] {
        TORCH_CHECK_VALUE(options->shards >= 1 && options->rank >= 0 && options->rank < options->shards &&
                              options->shard_numel >= 1,
                          "expected 0 <= rank < shards and a shard of at least 1 element, got rank ", options->rank,
                          ", shards ", options->shards, ", shard_numel ", options->shard_numel);
        TORCH_CHECK_VALUE(options->geometry->shared->total == options->shards * options->shard_numel, "expected ",
                          options->shards, " shards of ", options->shard_numel, " elements, got ",
                          options->geometry->shared->total);
        TORCH_CHECK_VALUE((options->shards == 1) == (options->shard_group == nullptr),
                          "a group to shard over goes with more than one shard");
        const int per_part = options->param_shards >= 1 ? options->shards / options->param_shards : 0;
        TORCH_CHECK_VALUE(per_part >= 1 && options->shards % options->param_shards == 0 && options->param_rank >= 0 &&
                              options->param_rank < options->param_shards,
                          "expected the copy to be shared by a divisor of ", options->shards, " ranks, got rank ",
                          options->param_rank, " of ", options->param_shards);
        TORCH_CHECK_VALUE((options->param_shards == 1) == (options->param_group == nullptr) &&
                              (options->param_group != nullptr || options->refresh_group == nullptr),
                          "a group to gather over goes with a copy that is shared");
        TORCH_CHECK_VALUE(options->refresh_group == nullptr || options->rank / per_part == options->param_rank,
                          "expected shard ", options->rank, " to lie in part ", options->param_rank, " of ",
                          options->param_shards);
        auto flat = std::make_unique<fp_flat_buffer>();
        flat->geometry = options->geometry->shared;
        flat->shard_numel = options->shard_numel;
        flat->rank = options->rank;
        flat->shards = options->shards;
        flat->shard_group = options->shard_group;
        flat->replicate_group = options->replicate_group;
        flat->param_rank = options->param_rank;
        flat->param_shards = options->param_shards;
        flat->param_group = options->param_group;
        flat->refresh_group = options->refresh_group;
        flat->predivide = options->predivide;
        flat->postdivide = options->postdivide;
        flat->compute_dtype = fp::dtype_from(options->compute_dtype);
        flat->reduce_dtype = fp::dtype_from(options->reduce_dtype);
        flat->full_precision = options->full_precision != 0;
        flat->keep_reduce_dtype = options->keep_reduce_dtype != 0;
        flat->stays_full = options->stays_full != 0;
        flat->offloads = options->offloads != 0;
        flat->device = fp::device_from(options->device);
        return flat.release();
    });
}

void
fp_flat_buffer_free(fp_flat_buffer *flat)
{
    delete flat;
}

int
fp_flat_buffer_prepare(fp_flat_buffer *flat, PyObject *shard_object, const char *reason)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &shard = fp::unpack(shard_object);
        TORCH_CHECK_VALUE(shard.dim() == 1 && shard.numel() == flat->shard_numel && shard.is_contiguous(),
                          "expected a shard of ", flat->shard_numel, " elements, got shape ", shard.sizes());
        const at::ScalarType dtype = flat->dtype_of(shard);
        const c10::Device device = flat->device_for(shard);
        const bool borrowed = flat->shards == 1 && dtype == shard.scalar_type() && device == shard.device();
        if (flat->full.defined() && flat->full.scalar_type() == dtype && flat->full.device() == device &&
            flat->borrowed == borrowed &&
            (!borrowed || (fp::storage_of(flat->full) == fp::storage_of(shard) &&
                           flat->full.storage_offset() == shard.storage_offset()))) {
            return 0;
        }
        const fp::Plainly plainly;
        const at::TensorOptions options = shard.options().dtype(dtype).device(device).requires_grad(false);
        fp::make_full(*flat, borrowed ? shard : fp::freed_full(*flat, options, reason), borrowed);
        flat->copy.reset();
        return 1;
    });
}

int
fp_flat_buffer_renew(fp_flat_buffer *flat, const char *reason)
{
    return fp::guarded(-1, [&] {
        if (!flat->is_lent()) {
            return 0;
        }
        const fp::Plainly plainly;
        fp::wait_for(flat->work, flat->work_group);
        flat->full.unsafeGetTensorImpl()->bump_version(); /* a graph that needs its values is refused */
        c10::StorageImpl *storage = fp::storage_of(flat->full);
        fp::set_freed_reason(storage, fp::is_held(storage) ? nullptr : reason);
        fp::make_full(*flat, fp::freed_full(*flat, flat->io.options(), reason), false);
        return 1;
    });
}

void
fp_flat_buffer_compute_in_full(fp_flat_buffer *flat, int in_full) noexcept
{
    flat->in_full = in_full != 0;
}

int
fp_flat_buffer_views(fp_flat_buffer *flat, fp_params_ref *ref, int index, int untracked, PyObject **out)
{
    Py_ssize_t made = 0;
    const int status = fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        auto node = fp::make_node<fp::UnitBackward>();
        node->ref = ref->shared;
        node->geometry = flat->geometry;
        node->index = index;
        flat->node = untracked ? nullptr : node;
        for (const fp::View &view : flat->geometry->views) {
            at::Tensor result =
                fp::alias(flat->full, view.shape, view.stride, flat->full.storage_offset() + view.offset);
            if (!untracked) {
                result = torch::autograd::make_variable_differentiable_view(
                    result, torch::autograd::ViewInfo(flat->full, nullptr, nullptr), std::nullopt,
                    /*shared_view_info=*/true, torch::autograd::CreationMeta::MULTI_OUTPUT_NODE);
                torch::autograd::impl::set_gradient_edge(result, {node, node->add_input_metadata(result)});
            }
            else {
                result.unsafeGetTensorImpl()->set_version_counter(torch::autograd::impl::version_counter(flat->full));
            }
            out[made] = THPVariable_Wrap(std::move(result));
            if (out[made] == nullptr) {
                return -1;
            }
            made++;
        }
        return 0;
    });
    if (status < 0) {
        while (made > 0) {
            Py_CLEAR(out[--made]);
        }
    }
    return status;
}

void
fp_flat_buffer_run_after(fp_flat_buffer *flat, uint64_t began) noexcept
{
    if (flat->node) {
        flat->node->set_sequence_nr(began);
    }
}

int
fp_flat_buffer_is_reached(const fp_flat_buffer *flat) noexcept
{
    auto *node = flat->node.get();
    const auto *info = torch::autograd::get_current_graph_task_exec_info();
    if (node == nullptr || info == nullptr) {
        return 0;
    }
    if (info->empty()) { /* all of the graph is executed */
        const auto *nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
        return nodes != nullptr && nodes->count(node) != 0;
    }
    const auto found = info->find(node);
    return found != info->end() && found->second.should_execute();
}

int
fp_flat_buffer_lacks_memory(const fp_flat_buffer *flat, PyObject *shard_object, int64_t *present, int64_t *needed)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &shard = fp::unpack(shard_object);
        const bool is_there =
            flat->whole && !flat->borrowed && fp::memory_of(fp::storage_of(flat->full)) < fp::bytes_of(*flat);
        const at::Tensor &tensor = is_there ? flat->full : shard;
        *present = static_cast<int64_t>(fp::memory_of(fp::storage_of(tensor)));
        *needed = static_cast<int64_t>(fp::bytes_for(tensor));
        return *present < *needed ? 1 : 0;
    });
}

int
fp_flat_buffer_gather(fp_flat_buffer *flat, PyObject *shard_object, PyObject *const *views, PyObject *collectives,
                      int changed, int refresh, int goes_on)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        if (changed) {
            fp::change_version(*flat, views);
        }
        fp::show_version(*flat, views);
        if (flat->borrowed) {
            return 1;
        }
        fp::wait_for_gather(*flat);
        flat->whole = flat->abandoned = false;
        if (!goes_on) {
            flat->next_copy.reset();
        }
        const bool from_shards = refresh || !flat->copy.defined();
        if (from_shards) {
            flat->copy.reset();
        }
        fp::resize_storage(fp::storage_of(flat->full), fp::bytes_of(*flat), nullptr, false);
        if (from_shards && flat->refresh_group != nullptr) {
            if (!flat->next_copy.defined()) {
                at::Tensor copy = at::empty({flat->part_numel()}, flat->io.options());
                const int64_t first = flat->rank * flat->shard_numel - flat->param_rank * flat->part_numel();
                at::Tensor slot = fp::alias(copy, flat->shard_numel, int64_t{1}, first);
                fp::fill(*flat, slot, shard);
                fp::gather_over(*flat, *flat->refresh_group, copy, slot, collectives);
                flat->next_copy = std::move(copy);
            }
            fp::wait_for_gather(*flat);
            flat->copy = std::move(flat->next_copy);
            flat->next_copy.reset();
        }
        if (flat->copy.defined()) {
            fp::gather_over(*flat, *flat->param_group, flat->io, flat->copy, collectives);
        }
        else {
            at::Tensor slot = fp::alias(flat->io, flat->shard_numel, int64_t{1}, flat->rank * flat->shard_numel);
            fp::fill(*flat, slot, shard);
            if (flat->shards > 1) {
                fp::gather_over(*flat, *flat->shard_group, flat->io, slot, collectives);
            }
        }
        flat->whole = true;
        return from_shards ? 1 : 0;
    });
}

void
fp_flat_buffer_refuse_graphs(fp_flat_buffer *flat, PyObject *const *views)
{
    fp::change_version(*flat, views);
}

int
fp_flat_buffer_is_written(const fp_flat_buffer *flat, PyObject *const *views) noexcept
{
    return flat->full._version() != flat->seen_version || fp_flat_buffer_moved_view(flat, views) >= 0;
}

Py_ssize_t
fp_flat_buffer_moved_view(const fp_flat_buffer *flat, PyObject *const *views) noexcept
{
    for (size_t i = 0; i < flat->geometry->views.size(); i++) {
        if (!fp::is_view_at(*flat, views[i], i)) {
            return static_cast<Py_ssize_t>(i);
        }
    }
    return -1;
}

void
fp_flat_buffer_forget_written(fp_flat_buffer *flat) noexcept
{
    if (flat->full.defined()) {
        flat->seen_version = flat->full._version();
    }
}

int
fp_flat_buffer_take_written(fp_flat_buffer *flat, PyObject *shard_object, PyObject *const *views, Py_ssize_t *misfit)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        const size_t n = flat->geometry->views.size();
        *misfit = -1;
        fp::wait_for(flat->work, flat->work_group);
        bool changed = false;
        if (flat->full._version() != flat->seen_version) {
            flat->seen_version = flat->full._version();
            fp::show_version(*flat, views);
            if (flat->whole) {
                changed = fp::write_to_shard(*flat, shard, 0, flat->io);
            }
            else if (!flat->borrowed) {
                *misfit = static_cast<Py_ssize_t>(n);
            }
        }
        std::vector<std::pair<size_t, at::Tensor>> given;
        for (size_t i = 0; i < n; i++) {
            if (fp::is_view_at(*flat, views[i], i)) {
                continue;
            }
            const fp::View &place = flat->geometry->views[i];
            const at::Tensor view = THPVariable_Unpack(views[i]);
            if (fp::is_plain_tensor(view) && view.sizes() == c10::IntArrayRef(place.shape) &&
                view.scalar_type() == flat->full.scalar_type() && view.device() == flat->full.device()) {
                fp::check_memory(view);
                const at::Tensor values = at::empty({place.numel}, flat->io.options());
                fp::alias(values, place.shape, place.stride, 0)
                    .copy_(fp::alias(view, view.sizes(), view.strides(), view.storage_offset()));
                given.emplace_back(i, values);
            }
            else {
                *misfit = static_cast<Py_ssize_t>(i);
            }
            view.set_data(fp::alias(flat->full, place.shape, place.stride, flat->full.storage_offset() + place.offset));
        }
        for (const auto &[i, values] : given) {
            const fp::View &place = flat->geometry->views[i];
            changed = (!flat->borrowed && fp::write_to_shard(*flat, shard, place.offset, values)) || changed;
            if (flat->borrowed || flat->whole) {
                const at::Tensor target =
                    fp::alias(flat->io, place.numel, int64_t{1}, flat->io.storage_offset() + place.offset);
                changed = (flat->borrowed && !fp::has_same_bytes(target, values)) || changed;
                target.copy_(values);
            }
        }
        if (changed) {
            shard.unsafeGetTensorImpl()->bump_version();
        }
        if (flat->whole && !given.empty()) {
            flat->copy.reset(); /* it is made anew of what is whole */
        }
        return changed ? 1 : 0;
    });
}

int
fp_flat_buffer_wait(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        fp::wait_for_gather(*flat);
        return 0;
    });
}

int
fp_flat_buffer_give_up(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        fp_group *group = flat->work_group;
        if (flat->work && group != nullptr && group->sliced && !flat->work->isCompleted()) {
            group->given_up = group->given_up || !fp::wait_a_while(*flat->work);
            flat->abandoned = !flat->work->isCompleted();
        }
        return 0;
    });
}

int
fp_flat_buffer_wait_read(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        std::optional<c10::Event> read = std::move(flat->was_read); /* the flat may go while nobody holds the GIL */
        flat->was_read.reset();
        fp::wait_until(read);
        return 0;
    });
}

int64_t
fp_flat_buffer_sources(fp_flat_buffer *flat, PyObject *shard_object)
{
    const c10::Storage &storage = THPVariable_Unpack(shard_object).storage();
    if (!flat->source || flat->source->_unsafe_get_target() != storage.unsafeGetStorageImpl()) {
        flat->source.emplace(storage.getWeakStorageImpl()); /* weak: no other one gets its address while we hold it */
        flat->sources++;
    }
    return flat->sources;
}

int
fp_flat_buffer_is_allocated(const fp_flat_buffer *flat) noexcept
{
    return flat->full.defined() && fp::memory_of(fp::storage_of(flat->full)) != 0;
}

int
fp_flat_buffer_release(fp_flat_buffer *flat, PyObject *const *views, const char *reason)
{
    return fp::guarded(-1, [&] {
        if (fp::is_lost(*flat)) {
            return 0; /* it may still be written to */
        }
        fp::wait_for_gather(*flat);
        if (!flat->borrowed && !flat->stays_full && flat->full.defined()) {
            if (flat->whole && flat->param_group != nullptr && !flat->copy.defined()) {
                const int64_t numel = flat->part_numel();
                const fp::Plainly plainly;
                flat->copy = fp::alias(flat->io, numel, int64_t{1}, flat->param_rank * numel).clone();
            }
            flat->whole = false;
            if (fp::is_held(fp::storage_of(flat->full))) {
                fp::leave_storage(*flat, views, reason);
            }
            else if (flat->is_lent()) {
                fp::set_freed_reason(fp::storage_of(flat->full), reason); /* it goes when nobody has it any more */
            }
            else {
                fp::resize_storage(fp::storage_of(flat->full), 0, reason, true);
            }
        }
        return 0;
    });
}

int
fp_flat_buffer_is_whole(const fp_flat_buffer *flat) noexcept
{
    return flat->whole;
}

int
fp_flat_buffer_has_values(const fp_flat_buffer *flat) noexcept
{
    return flat->whole || flat->copy.defined();
}

int
fp_flat_buffer_has_values_of(fp_flat_buffer *flat, PyObject *shard_object)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        fp::wait_for(flat->work, flat->work_group);
        const at::Tensor &values = flat->whole ? flat->io : flat->copy;
        const int64_t first =
            flat->rank * flat->shard_numel - (flat->whole ? 0 : flat->param_rank * flat->part_numel());
        if (!values.defined() || first < 0 || first + flat->shard_numel > values.numel()) {
            return 0;
        }
        const at::Tensor now = at::empty({flat->shard_numel}, values.options());
        fp::convert(now, shard.to(now.device()), {});
        return fp::has_same_bytes(now,
                                  fp::alias(values, flat->shard_numel, int64_t{1}, values.storage_offset() + first))
                   ? 1
                   : 0;
    });
}

int
fp_flat_buffer_forget_whole(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        if (!fp::is_lost(*flat)) {
            fp::wait_for_gather(*flat);
        }
        flat->whole = false;
        return 0;
    });
}

int
fp_flat_buffer_forget_values(fp_flat_buffer *flat)
{
    flat->copy.reset();
    flat->next_copy.reset();
    return fp_flat_buffer_forget_whole(flat);
}

PyObject *
fp_flat_buffer_copy(fp_flat_buffer *flat)
{
    if (!flat->copy.defined()) {
        Py_RETURN_NONE;
    }
    return fp::guarded<PyObject *>(nullptr, [&] { return THPVariable_Wrap(flat->copy); });
}

void
fp_flat_buffer_average_elsewhere(fp_flat_buffer *flat)
{
    flat->predivide = flat->postdivide = 1.0;
}

PyObject *
fp_flat_buffer_unsharded(fp_flat_buffer *flat)
{
    return fp::guarded<PyObject *>(nullptr, [&] { return THPVariable_Wrap(flat->io); });
}

int
fp_flat_buffer_keep(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard_object)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        const fp::WithoutGil released;
        if (flat->refresh_group == nullptr) {
            fp::reload(*flat, flat->kept);
        }
        const bool first = !flat->kept.defined();
        const at::TensorOptions options = fp::wire_options(*flat, shard).dtype(flat->kept_dtype_of(shard));
        at::Tensor target = first ? at::empty({flat->geometry->total}, options) : flat->kept;
        fp::pack_gradients(*flat, target, gradients->list, {.scale = std::nullopt, .accumulate = !first});
        flat->kept = std::move(target);
        if (flat->refresh_group == nullptr) {
            fp::offload(*flat, flat->kept);
        }
        return 0;
    });
}

int
fp_flat_buffer_pack(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard_object)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        fp::make_wire(*flat, gradients, fp::wire_options(*flat, fp::unpack(shard_object)));
        flat->packed = true;
        return 0;
    });
}

int
fp_flat_buffer_reduce(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard_object,
                      PyObject *collectives, int how_far)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        flat->stops_at_partial = flat->refresh_group != nullptr && how_far == FP_REDUCE_INNER;
        if (flat->refresh_group != nullptr && how_far == FP_REDUCE_OUTER) {
            fp::reduce_partial(*flat, shard, collectives);
            return 0;
        }
        const at::TensorOptions options = fp::wire_options(*flat, shard);
        if (!flat->packed) {
            fp::make_wire(*flat, gradients, options);
        }
        flat->packed = false;
        flat->stage = fp_flat_buffer::LAST;
        if (flat->shards > 1) {
            const bool nested = flat->refresh_group != nullptr;
            flat->reduced = at::empty({nested ? flat->part_numel() : flat->shard_numel}, options);
            flat->stage = nested || flat->replicate_group != nullptr ? fp_flat_buffer::FIRST : fp_flat_buffer::LAST;
            fp::reduce_over(*flat, nested ? *flat->param_group : *flat->shard_group, collectives);
            return 0;
        }
        flat->reduced = flat->wire;
        if (flat->replicate_group != nullptr) {
            flat->stage = fp_flat_buffer::FIRST;
            return fp_flat_buffer_advance(flat, shard_object, collectives);
        }
        return 0;
    });
}

void
fp_flat_buffer_note_trained(fp_flat_buffer *flat, PyObject *const *owners, Py_ssize_t n) noexcept
{
    uint64_t hash = 1;
    for (Py_ssize_t i = 0; i < n; i++) {
        hash = hash * UINT64_C(0x9E3779B97F4A7C15) + (THPVariable_Unpack(owners[i]).requires_grad() ? 1 : 0);
    }
    hash = (hash ^ hash >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    flat->trained = static_cast<uint32_t>(hash >> (64 - FP_EVENT_TRAINED_BITS));
}

int
fp_flat_buffer_advance(fp_flat_buffer *flat, PyObject *shard_object, PyObject *collectives)
{
    return fp::guarded(-1, [&] {
        if (flat->stage == fp_flat_buffer::NOTHING) {
            return 0;
        }
        if (flat->arriving.defined()) {
            return flat->has_arrived && flat->has_arrived->query() ? 1 : 0;
        }
        fp::wait_for_reduction(*flat);
        if (flat->shards > 1) {
            flat->wire.reset();
        }
        const fp::Plainly plainly;
        if (flat->stage == fp_flat_buffer::LAST) {
            const at::Tensor &shard = fp::unpack(shard_object);
            if (flat->full.device() == shard.device()) {
                return 1;
            }
            flat->arriving = fp::as_gradient(*flat, shard);
            return 0;
        }
        if (flat->refresh_group != nullptr) {
            const at::Tensor &shard = fp::unpack(shard_object);
            fp::add_to_partial(*flat, shard);
            flat->stage = fp_flat_buffer::NOTHING;
            if (!flat->stops_at_partial) {
                fp::reduce_partial(*flat, shard, collectives);
            }
            return 0;
        }
        fp::announce(*flat->replicate_group, FP_EVENT_REDUCES, flat->trained);
        flat->stage = fp_flat_buffer::LAST;
        if (collectives != nullptr || !flat->replicate_group->native) {
            fp::call_python(collectives, "all_reduce", flat->reduced, flat->reduced, *flat->replicate_group);
        }
        else {
            flat->reduction = fp::all_reduce(*flat->replicate_group, flat->reduced);
        }
        return 0;
    });
}

PyObject *
fp_flat_buffer_take(fp_flat_buffer *flat, PyObject *shard_object, PyObject *collectives)
{
    if (flat->stage == fp_flat_buffer::NOTHING) {
        Py_RETURN_NONE;
    }
    if (flat->stage == fp_flat_buffer::FIRST && fp_flat_buffer_advance(flat, shard_object, collectives) < 0) {
        return nullptr;
    }
    if (flat->stage == fp_flat_buffer::NOTHING) { /* it went no further than to partial */
        Py_RETURN_NONE;
    }
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        fp::wait_for_reduction(*flat);
        at::Tensor result = flat->arriving.defined() ? std::move(flat->arriving) : fp::as_gradient(*flat, shard);
        flat->arriving.reset();
        flat->stage = fp_flat_buffer::NOTHING;
        fp::wait_until(flat->has_arrived);
        return THPVariable_Wrap(std::move(result));
    });
}

int
fp_flat_buffer_has_kept(const fp_flat_buffer *flat) noexcept
{
    return flat->kept.defined() || flat->partial.defined() || flat->host_valid;
}

PyObject *
fp_flat_buffer_kept(fp_flat_buffer *flat)
{
    const at::Tensor &kept = flat->host_valid                 ? flat->host
                             : flat->refresh_group != nullptr ? flat->partial
                                                              : flat->kept;
    if (!kept.defined()) {
        Py_RETURN_NONE;
    }
    return fp::guarded<PyObject *>(nullptr, [&] {
        if (flat->host_valid && flat->has_left) { /* it may be read */
            const fp::WithoutGil released;
            flat->has_left->synchronize();
        }
        return THPVariable_Wrap(kept);
    });
}

void
fp_flat_buffer_forget(fp_flat_buffer *flat, int kept_too)
{
    flat->reduction.reset();
    flat->summed.reset();
    flat->wire.reset();
    flat->reduced.reset();
    flat->packed = false;
    flat->arriving.reset();
    flat->has_arrived.reset();
    flat->stage = fp_flat_buffer::NOTHING;
    if (kept_too) {
        flat->kept.reset();
        flat->partial.reset();
        flat->host_valid = false;
    }
    if (fp_flat_buffer_leave_there(flat) < 0) {
        PyErr_Clear(); /* the device has failed: whoever uses it next says so */
    }
}

int
fp_flat_buffer_bring_back(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        fp::bring_back(*flat);
        return 0;
    });
}

int
fp_flat_buffer_leave_there(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        if (flat->has_come) { /* the current stream uses its memory next */
            const c10::Device device = flat->ahead.device();
            flat->has_come->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
            flat->has_come.reset();
        }
        flat->ahead.reset();
        return 0;
    });
}

int
fp_flat_buffer_settle_copies(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        if (flat->offloads && flat->full.defined() && fp::has_streams(flat->full)) {
            fp::settle_copies(flat->full.device());
        }
        return 0;
    });
}

void
fp_flat_buffer_kept_bytes(const fp_flat_buffer *flat, int64_t *device, int64_t *host) noexcept
{
    *device = *host = 0;
    for (const at::Tensor &tensor : {flat->kept, flat->partial, flat->ahead}) {
        *device += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
    *host = flat->host.defined() ? static_cast<int64_t>(flat->host.nbytes()) : 0;
}

int
fp_engine_drop_frozen(fp_gradients *gradients, PyObject *const *params, Py_ssize_t n)
{
    return fp::guarded(-1, [&] {
        for (Py_ssize_t i = 0; i < n; i++) {
            at::Tensor &grad = gradients->list[static_cast<size_t>(i)];
            if (grad.defined() && !THPVariable_Unpack(params[i]).requires_grad()) {
                grad.reset();
            }
        }
        return 0;
    });
}

// ---- graph ----

uint64_t
fp_engine_now(void) noexcept
{
    return at::sequence_number::get_and_increment();
}

int
fp_engine_hook(PyObject *tensor_object, fp_params_ref *ref, uint64_t began)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &tensor = THPVariable_Unpack(tensor_object);
        const auto &node = tensor.grad_fn();
        if (!node) {
            return 0;
        }
        std::shared_ptr<fp::Graph> graph; // none where the output is a view, whose node lives as long as its unit
        if (dynamic_cast<const fp::UnitBackward *>(node.get()) == nullptr) {
            graph = ref->shared->graph.lock();
            if (graph == nullptr) {
                graph = std::make_shared<fp::Graph>();
                ref->shared->graph = graph;
            }
        }
        node->add_tensor_pre_hook(std::make_unique<fp::BeforeBackward>(ref->shared, std::move(graph), began));
        return 1;
    });
}

int
fp_engine_watch(PyObject *const *params, Py_ssize_t n, fp_params_ref *ref, int index)
{
    return fp::guarded(-1, [&] {
        const fp::Targets targets(params, n);
        for (size_t i = 0; i < targets.size(); i++) {
            auto &hooks = torch::autograd::impl::materialize_autograd_meta(targets[i])->hooks_; // beside the user's
            if (std::none_of(hooks.begin(), hooks.end(), [&](const auto &hook) {
                    const auto *ours = dynamic_cast<const fp::BeforeAccumulation *>(hook.get());
                    return ours != nullptr && ours->ref == ref->shared;
                })) {
                hooks.push_back(std::make_unique<fp::BeforeAccumulation>(ref->shared, index));
            }
        }
        return 0;
    });
}

int
fp_engine_task(void) noexcept
{
    return torch::autograd::get_current_graph_task_id();
}

fp_backward
fp_engine_backward(void) noexcept
{
    const torch::autograd::GraphTask *task = fp::current_task();
    if (task == nullptr) {
        return {.task = -1, .depth = 0, .device = -1, .queue = nullptr};
    }
    return {.task = torch::autograd::get_current_graph_task_id(),
            .depth = task->reentrant_depth_,
            .device = task->owner_,
            .queue = task->cpu_ready_queue_.get()};
}

int
fp_engine_at_end(fp_params_ref *ref)
{
    return fp::guarded(-1, [&] {
        const auto task = std::make_shared<const char>();
        torch::autograd::Engine::get_default_engine().queue_callback([shared = ref->shared, task] {
            fp::call_unit(*shared, [&](void *unit) { return shared->calls.before_backward(unit, 0); });
        });
        ref->shared->task = task;
        return 0;
    });
}

int
fp_engine_is_running(const fp_params_ref *ref) noexcept
{
    return !ref->shared->task.expired();
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
        PyErr_Clear(); /* measuring fails, what is measured does not */
    }
    return begun;
}

void
fp_range_end(fp_range *range)
{
    delete range;
}

int
fp_engine_grad_enabled(void) noexcept
{
    return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

int64_t
fp_engine_versions(PyObject *const *tensors, Py_ssize_t n) noexcept
{
    int64_t sum = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const c10::VariableVersion &version = THPVariable_Unpack(tensors[i]).unsafeGetTensorImpl()->version_counter();
        sum += version.enabled() ? static_cast<int64_t>(version.current_version()) : 0;
    }
    return sum;
}

Py_ssize_t
fp_engine_moved(PyObject *const *params, Py_ssize_t n, const fp_geometry *geometry, PyObject *shard_object,
                const int64_t *starts, const int64_t *numels) noexcept
{
    Py_ssize_t i = 0;
    try {
        const at::Tensor &shard = THPVariable_Unpack(shard_object);
        for (; i < n; i++) {
            const at::Tensor &param = THPVariable_Unpack(params[i]);
            if (numels[i] <= 0) {
                if (param.numel() != 0) {
                    return i;
                }
                continue;
            }
            const fp::View &view = geometry->shared->views[static_cast<size_t>(i)];
            const bool as_put = param.dim() == static_cast<int64_t>(view.shape.size()) ? fp::same_layout(param, view)
                                                                                       : param.is_contiguous();
            if (!as_put || !fp::is_piece(param, shard, starts[i], numels[i]) || param.dtype() != shard.dtype()) {
                return i;
            }
        }
    }
    catch (...) { /* data of a kind that has no layout or memory to ask for: not what was put there */
        return i;
    }
    return -1;
}

int
fp_engine_requires_grad(PyObject *tensor) noexcept
{
    return THPVariable_Unpack(tensor).requires_grad();
}

int
fp_engine_is_low(PyObject *tensor) noexcept
{
    return is_low(THPVariable_Unpack(tensor).scalar_type());
}

int
fp_engine_is_tensor(PyObject *object)
{
    return fp::guarded(-1, [&] { return THPVariable_Check(object) ? 1 : 0; }); /* it may ask the object's class */
}

int
fp_group_is_same(const fp_group *a, const fp_group *b) noexcept
{
    return a->object == b->object;
}

int
fp_group_place(const fp_group *group, int *rank, int *size)
{
    if (group->native) {
        *rank = group->native->getRank();
        *size = group->native->getSize();
        return 0;
    }
    PyObject *pair[2] = {PyObject_CallMethod(group->object, "rank", nullptr),
                         PyObject_CallMethod(group->object, "size", nullptr)};
    *rank = pair[0] == nullptr ? -1 : static_cast<int>(PyLong_AsLong(pair[0]));
    *size = pair[1] == nullptr ? -1 : static_cast<int>(PyLong_AsLong(pair[1]));
    Py_XDECREF(pair[0]);
    Py_XDECREF(pair[1]);
    return PyErr_Occurred() ? -1 : 0;
}

int
fp_group_world_rank(const fp_group *group, int rank)
{
    PyObject *module = PyImport_ImportModule("torch.distributed");
    PyObject *found =
        module == nullptr ? nullptr : PyObject_CallMethod(module, "get_global_rank", "Oi", group->object, rank);
    Py_XDECREF(module);
    const int world_rank = found == nullptr ? -1 : static_cast<int>(PyLong_AsLong(found));
    Py_XDECREF(found);
    return world_rank;
}

// On a stream of its own: what the host reads here waits for the other ranks, not for what this device still computes.
fp_sum *
fp_sum_start(fp_group *group, PyObject *like, const int32_t *flags, Py_ssize_t n, PyObject *collectives)
{
    return fp::guarded<fp_sum *>(nullptr, [&] {
        const fp::Plainly plainly;
        auto sum = std::make_unique<fp_sum>();
        const c10::Device device = fp::unpack(like).device();
        sum->group = group;
        sum->here = at::empty({static_cast<int64_t>(n)}, at::TensorOptions(at::kInt).pinned_memory(!device.is_cpu()));
        std::copy(flags, flags + n, sum->here.mutable_data_ptr<int32_t>());
        std::optional<c10::StreamGuard> on_own;
        if (!device.is_cpu()) {
            on_own.emplace(*fp::copying_of(device).stream);
        }
        sum->there = sum->here.to(device, at::kInt, /*non_blocking=*/true);
        fp::announce(*group, FP_EVENT_AGREES);
        if (collectives != nullptr || !group->native) {
            fp::call_python(collectives, "agree", sum->there, sum->there, *group);
        }
        else {
            sum->work = fp::all_reduce(*group, sum->there);
        }
        if (!device.is_cpu()) {
            fp::wait_for(sum->work, group); /* its stream does */
            sum->here.copy_(sum->there, /*non_blocking=*/true);
            sum->is_here.emplace(device.type());
            sum->is_here->record(*fp::copying_of(device).stream);
        }
        return sum.release();
    });
}

int
fp_sum_read(fp_sum *sum, int32_t *flags)
{
    return fp::guarded(-1, [&] {
        fp::wait_for(sum->work, sum->group);
        if (sum->is_here) {
            const fp::WithoutGil released;
            sum->is_here->synchronize();
        }
        const int32_t *read = sum->here.const_data_ptr<int32_t>();
        std::copy(read, read + sum->here.numel(), flags);
        return 0;
    });
}

void
fp_sum_free(fp_sum *sum)
{
    delete sum;
}

PyObject *
fp_engine_grad(PyObject *tensor)
{
    return fp::guarded<PyObject *>(nullptr, [&] { return THPVariable_Wrap(fp::unpack(tensor).grad()); });
}

} // extern "C"
