// tensor/fp_channel.cpp -- issue collectives over a group under the names that this torch has, wait for them, and add the
// flags by which ranks agree. See fp_channel.h.
#include "tensor/fp_channel.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <chrono>
#include <cstdlib>
#include <string_view>

#include "tensor/fp_begun.hpp"

struct fp_sum {
    fp_group *group = nullptr;
    bool sliced = false;    // waits for work are cut into slices
    at::Tensor here, there; // on the host, and on the device that adds; one tensor if the host adds
    c10::intrusive_ptr<c10d::Work> work;
    std::optional<fp::Mark> is_here; // after the copy to the host
};

struct fp_gather {
    std::unique_ptr<fp_group, void (*)(fp_group *)> group;
    c10::intrusive_ptr<c10d::Work> work;
};

namespace fp {
namespace {

// The tensor as collectives send it: complex numbers as pairs, as backends do not know them.
at::Tensor
as_sent(const at::Tensor &tensor)
{
    return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

constexpr std::chrono::milliseconds patience{300}; // one slice of a wait

// call(). If it fails, a watcher that knows the cause raises its own error instead.
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

// Tell each watcher that the announced collective has begun, or was launched: `what` is that function.
void
tell(const fp_group &group, void (*fp_group_calls::*what)(PyObject *watcher))
{
    for (PyObject *watcher : group.watchers) {
        if (watcher != nullptr) {
            (group.calls->*what)(watcher);
        }
    }
}

// Issue a collective: start(group) on the C++ group, or on the host group for tensors on the host. Returns its work. The GIL is
// released: gloo's threads take it while they hold the lock of the queue for which these calls wait.
template <class Start>
c10::intrusive_ptr<c10d::Work>
started(const fp_group &group, const at::Tensor &tensor, Start &&start)
{
    TORCH_CHECK(group.device || !is_captured(tensor.device()),
                "flatparam: a CUDA graph is captured before the first "
                "collective over a process group, which makes its communicator: run a few steps before");
    c10::intrusive_ptr<c10d::Work> begun = explained(&group, [&] {
        const WithoutGil released;
        const bool on_host = group.host && tensor.is_cpu();
        if (on_host) {
            return start(*group.host);
        }
        const FirstCollective connecting(*group.native, !group.device);
        c10::intrusive_ptr<c10d::Work> work = start(*group.native);
        group.device = tensor.device();
        note_begun(*group.native, work);
        return work;
    });
    tell(group, &fp_group_calls::begun);
    return begun;
}

// The operation "sum of addends * factor".
c10d::ReduceOp
sum_of(double factor)
{
    c10d::ReduceOp sum = c10d::ReduceOp::SUM;
    if (factor != 1.0) {
        sum.op_ = c10d::ReduceOp::PREMUL_SUM;
        sum.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
    }
    return sum;
}

// *out = object.name(), an int. -1 with an exception.
int
int_from(PyObject *object, const char *name, int *out)
{
    PyObject *result = PyObject_CallMethod(object, name, nullptr);
    *out = result == nullptr ? -1 : static_cast<int>(PyLong_AsLong(result));
    Py_XDECREF(result);
    return *out == -1 && PyErr_Occurred() != nullptr ? -1 : 0;
}

// Whether FLATPARAM_REGISTERED=1 was set at the first call.
bool
wants_registered()
{
    static const bool wanted = [] {
        const char *value = std::getenv("FLATPARAM_REGISTERED");
        return value != nullptr && std::string_view(value) == "1";
    }();
    return wanted;
}

} // namespace

bool
premultiplies(const fp_group &group, const at::Tensor &tensor)
{
    return group.native && (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble) &&
           group.native->getBackend(tensor.device().type())->getBackendName() == "nccl";
}

bool
registers(const fp_group &group, const c10::Device &device)
{
    return group.native && group.registers && group.device && !device.is_cpu() && wants_registered() &&
           !is_captured(device);
}

at::Tensor
registered(fp_group *group, int64_t numel, const at::TensorOptions &options)
{
    const c10::Device device = options.device();
    if (group == nullptr || !registers(*group, device)) {
        return at::Tensor();
    }
    std::string why_not;
    try {
        const auto backend = group->native->getBackend(device.type());
        group->registers = backend->supportsTensorAlloc(device.index());
        if (group->registers) {
            return backend->allocateTensor(numel, options);
        }
        why_not = backend->getBackendName() + " does not on " + device.str();
    }
    catch (const c10::OutOfMemoryError &) {
        throw;
    }
    catch (const std::exception &error) {
        group->registers = false;
        why_not = error.what();
    }
    TORCH_WARN_ONCE("flatparam: FLATPARAM_REGISTERED=1: rank ", group->native->getRank(),
                    " registers no memory, its collectives take copies: ", why_not.substr(0, why_not.find('\n')));
    return at::Tensor();
}

at::Tensor
empty_for(fp_group *group, int64_t numel, const at::TensorOptions &options)
{
    const at::Tensor made = registered(group, numel, options);
    return made.defined() ? made : at::empty({numel}, options);
}

void
announce(fp_group &group, unsigned kind, uint32_t trained)
{
    group.given_up = false;
    for (size_t i = group.watchers.size(); i-- > 0;) {
        PyObject *watcher = group.watchers[i];
        if (watcher != nullptr && group.calls->before(watcher, fp_event(group.numbers[i], kind, trained)) < 0) {
            throw python_error();
        }
    }
}

c10::intrusive_ptr<c10d::Work>
all_gather(const fp_group &group, const at::Tensor &gathered, const at::Tensor &own)
{
    at::Tensor output = as_sent(gathered), input = as_sent(own);
    return started(group, input, [&](auto &native) {
        if constexpr (requires { native.all_gather_single(output, input); }) {
            return native.all_gather_single(output, input);
        }
        else {
            return native._allgather_base(output, input);
        }
    });
}

c10::intrusive_ptr<c10d::Work>
reduce_scatter(const fp_group &group, const at::Tensor &reduced, const at::Tensor &whole, double factor)
{
    at::Tensor output = as_sent(reduced), input = as_sent(whole);
    c10d::ReduceScatterOptions options;
    options.reduceOp = sum_of(factor);
    return started(group, input, [&](auto &native) {
        if constexpr (requires { native.reduce_scatter_single(output, input); }) {
            return native.reduce_scatter_single(output, input, options);
        }
        else {
            return native._reduce_scatter_base(output, input, options);
        }
    });
}

c10::intrusive_ptr<c10d::Work>
all_reduce(const fp_group &group, const at::Tensor &tensor, double factor)
{
    std::vector<at::Tensor> tensors = {as_sent(tensor)};
    c10d::AllreduceOptions options;
    options.reduceOp = sum_of(factor);
    return started(group, tensor, [&](auto &native) { return native.allreduce(tensors, options); });
}

c10::intrusive_ptr<c10d::Work>
exchange(const fp_group &group, const at::Tensor &received, const at::Tensor &sent, bool only_other)
{
    at::Tensor output = as_sent(received), input = as_sent(sent);
    std::vector<int64_t> sizes; /* by rank; none: equal ones */
    if (only_other) {
        sizes.resize(2, input.numel());
        sizes[static_cast<size_t>(group.native->getRank())] = 0;
    }
    return started(group, input, [&](auto &native) {
        if constexpr (requires { native.all_to_all_single(output, input, sizes, sizes); }) {
            return native.all_to_all_single(output, input, sizes, sizes);
        }
        else {
            return native.alltoall_base(output, input, sizes, sizes);
        }
    });
}

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
        if (PyErr_ExceptionMatches(PyExc_Exception) == 0) { /* Ctrl-C: ranks are interrupted at different places */
            tell(group, &fp_group_calls::launched);
        }
        throw python_error();
    }
    Py_DECREF(result);
    tell(group, &fp_group_calls::begun);
}

// Wait one slice. Returns whether the work has ended. Throws the exception of the work.
static bool
wait_a_while(c10d::Work &work)
{
    const WithoutGil released;
    try {
        work.wait(patience);
        return true;
    }
    catch (...) {
        if (!work.isCompleted()) { /* the slice is over */
            return false;
        }
        work.wait();
        return true;
    }
}

// Wait for waited: one slice if sliced, else to the end; whether it has ended. If it has ended or failed, reset work,
// unless another thread has put other work there meanwhile.
static bool
wait_once(c10::intrusive_ptr<c10d::Work> &work, const c10::intrusive_ptr<c10d::Work> &waited, const fp_group *group,
          bool sliced)
{
    const auto forget = [&] {
        if (work == waited) {
            work.reset();
        }
    };
    try {
        const bool ended = explained(group, [&] {
            if (sliced) {
                return wait_a_while(*waited);
            }
            const WithoutGil released;
            std::optional<WaitScope> waiting;
            if (group != nullptr && group->native && group->device) {
                waiting.emplace(*group->native, waited.get(), *group->device);
            }
            waited->wait();
            if (waiting) {
                waiting->end();
            }
            return true;
        });
        if (ended) {
            forget();
        }
        return ended;
    }
    catch (...) {
        forget();
        throw;
    }
}

void
wait_for(c10::intrusive_ptr<c10d::Work> &work, const fp_group *group)
{
    wait_for(work, group, group != nullptr && group->sliced);
}

void
wait_for(Pending &pending)
{
    wait_for(pending.work, pending.group);
}

void
wait_for(c10::intrusive_ptr<c10d::Work> &work, const fp_group *group, bool sliced)
{
    if (!work) {
        return;
    }
    const c10::intrusive_ptr<c10d::Work> waited = work;
    while (!wait_once(work, waited, group, sliced)) {
        for (size_t i = 0; i < group->watchers.size(); i++) {
            if (group->watchers[i] != nullptr && group->calls->waiting(group->watchers[i]) < 0) {
                throw python_error();
            }
        }
    }
}

bool
give_up(const Pending &pending)
{
    fp_group &group = *pending.group;
    if (!group.sliced || pending.work->isCompleted()) {
        return true;
    }
    try {
        group.given_up = group.given_up || !wait_a_while(*pending.work);
    }
    catch (...) { // it has failed: the next wait raises that
    }
    return pending.work->isCompleted();
}

bool
is_broken(const fp_group &group)
{
    return std::any_of(group.watchers.begin(), group.watchers.end(),
                       [&](PyObject *watcher) { return watcher != nullptr && group.calls->is_broken(watcher); });
}

} // namespace fp

extern "C" {

fp_group *
fp_group_new(PyObject *object, const char *name, const char *host_name)
{
    return fp::guarded<fp_group *>(nullptr, [&] {
        auto group = std::make_unique<fp_group>();
        if (name != nullptr) {
            group->native = c10d::resolve_process_group(name);
        }
        if (host_name != nullptr) {
            group->host = c10d::resolve_process_group(host_name);
        }
        group->object = Py_NewRef(object);
        return group.release();
    });
}

void
fp_group_free(fp_group *group)
{
    if (group != nullptr) {
        Py_XDECREF(group->object); /* torch releases the GIL for the last reference */
        for (PyObject *watcher : group->watchers) {
            Py_XDECREF(watcher);
        }
        const fp::WithoutGil
            released; /* the last reference to a group waits for its collectives, whose threads take the GIL */
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

int
fp_group_is_same(const fp_group *a, const fp_group *b) noexcept
{
    return a->object == b->object;
}

int
fp_group_place(const fp_group *group, int *rank, int *size)
{
    if (fp::int_from(group->object, "rank", rank) < 0) {
        return -1;
    }
    return fp::int_from(group->object, "size", size);
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

fp_gather *
fp_gather_new(PyObject *object, const char *name, int sliced)
{
    return fp::guarded<fp_gather *>(nullptr, [&]() -> fp_gather * {
        std::unique_ptr<fp_group, void (*)(fp_group *)> group(fp_group_new(object, name, nullptr), fp_group_free);
        if (!group) {
            return nullptr;
        }
        group->sliced = sliced != 0;
        return new fp_gather{std::move(group), {}};
    });
}

void
fp_gather_free(fp_gather *gather)
{
    delete gather;
}

int
fp_gather_begin(fp_gather *gather, PyObject *output, PyObject *shard)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        TORCH_CHECK(!gather->work, "an all-gather is under way");
        /* New tensors over the same memory, which the caller's `.data = ` does not replace. They have no Python object: a
         * thread of the backend frees them, and a thread that takes the GIL while the interpreter ends aborts the process. */
        const at::Tensor own = fp::unpack(shard).detach(), &given = fp::unpack(output);
        at::Tensor whole = fp::alias(given, given.sizes(), given.strides(), given.storage_offset());
        gather->work = fp::all_gather(*gather->group, whole, own);
    });
}

int
fp_gather_wait(fp_gather *gather)
{
    return fp::guarded(-1, [&] {
        const c10::intrusive_ptr<c10d::Work> waited = gather->work;
        return !waited || fp::wait_once(gather->work, waited, gather->group.get(), gather->group->sliced) ? 1 : 0;
    });
}

int
fp_gather_is_under_way(const fp_gather *gather) noexcept
{
    return gather->work && !gather->work->isCompleted();
}

// On the host if there is a group for it: then no wait for a device is needed. Else on the stream for copies: the host then
// waits for the other ranks, and not for the computation of this device.
fp_sum *
fp_sum_start(fp_group *group, PyObject *like, const int32_t *flags, Py_ssize_t n, PyObject *collectives, unsigned kind,
             uint32_t units)
{
    return fp::guarded<fp_sum *>(nullptr, [&] {
        const fp::Plainly plainly;
        auto sum = std::make_unique<fp_sum>();
        c10::Device device = fp::unpack(like).device();
        TORCH_CHECK(
            !fp::is_captured(device),
            "flatparam: ZERO_1 and LAYER_ZERO cannot be captured into a CUDA graph: in each step ranks tell each "
            "other which secondary shards are stale and which gradients there are, and a graph that is replayed asks "
            "nobody");
        sum->group = group;
        const bool on_host = group->host != nullptr;
        sum->sliced = on_host || group->sliced;
        device = on_host ? c10::Device(c10::kCPU) : device;
        sum->here = fp::empty_beside(device, {static_cast<int64_t>(n)}, at::kInt);
        std::copy(flags, flags + n, sum->here.mutable_data_ptr<int32_t>());
        const fp::OnOwnStream apart(device, fp::Purpose::copy, fp::After::nothing);
        sum->there = sum->here.to(device, at::kInt, /*non_blocking=*/true);
        fp::announce(*group, kind, units);
        if (!on_host && (collectives != nullptr || !group->native)) {
            fp::call_python(collectives, "agree", sum->there, sum->there, *group);
        }
        else {
            sum->work = fp::all_reduce(*group, sum->there);
        }
        if (!device.is_cpu()) {
            fp::wait_for(sum->work, group); /* its stream waits, not the host */
            sum->here.copy_(sum->there, /*non_blocking=*/true);
            sum->is_here.emplace(fp::recorded_now(device));
        }
        return sum.release();
    });
}

int
fp_sum_read(fp_sum *sum, int32_t *flags)
{
    return fp::guarded(-1, [&] {
        fp::wait_for(sum->work, sum->group, sum->sliced);
        fp::wait_until(sum->is_here);
        const int32_t *read = sum->here.const_data_ptr<int32_t>();
        std::copy(read, read + sum->here.numel(), flags);
    });
}

void
fp_sum_free(fp_sum *sum)
{
    delete sum;
}

} // extern "C"
