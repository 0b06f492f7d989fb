// simulated_device.cpp -- an accelerator that is not there: torch's PrivateUse1 device "sim" in host memory.
//
// Each stream is a queue of kernels, copies and waits for events, and each group has a stream for its collectives. Which
// streams are late is chosen: what is put to a late one happens only when an event behind it, or the host, asks for it; what
// is put to another one at once. So of two streams with no event between them the one that is late is as late as a device
// may be, and the other as early: a wait that is missing shows in the values. "others": all are late but the one that
// computes; "computing": that one is, and no other. A copy to pinned memory reaches the host when that waits for it, however
// early its stream is. Freed memory is overwritten in the order of the stream that it was allocated on, and used again first.
#include "boxed.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;

thread_local bool keeps_gil = false;

// Call without the GIL, if this thread has it: gloo's threads take it to drop what they were given.
template <class Call>
void
without_gil(const Call &call)
{
    if (!keeps_gil && Py_IsInitialized() && PyGILState_Check()) {
        const pybind11::gil_scoped_release released;
        call();
    }
    else {
        call();
    }
}

// What lives as long as the process: threads and static variables of others may come here when ours would be gone.
template <class Value>
Value &
for_good()
{
    return *new Value;
}

// As a driver does: it may be gone before static variables are.
bool ended = false;

void
check_not_ended()
{
    if (ended) {
        std::fputs("the device is used after its end\n", stderr);
        std::_Exit(3);
    }
}

std::recursive_mutex &mutex = for_good<std::recursive_mutex>(); // of all that follows

// Whoever has it may wait for gloo, so nobody waits for it with the GIL.
struct Locked {
    explicit Locked(std::recursive_mutex &)
    {
        if (!mutex.try_lock()) {
            without_gil([] { mutex.lock(); });
        }
    }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;
    ~Locked()
    {
        mutex.unlock();
    }
};

// For those who only ask: if it is not there, another thread waits for the device.
using Tried = std::unique_lock<std::recursive_mutex>;

// ---- streams: what is put off, in order ----

struct Queue {
    std::deque<std::function<void()>> waiting;
    std::deque<std::pair<int64_t, std::function<void()>>> landing; // on the host: what was put as the so-many-th
    int64_t put = 0, done = 0;      // what is being done included
    std::atomic<int64_t> ended = 0; // without it: for threads that only ask, while another one waits for the device
};
auto &queues = for_good<std::map<int64_t, Queue>>(); // by the stream's id; 0 is the default stream
int64_t last_stream = 0, put_off = 0, waits = 0;
int64_t computing = 0; // the stream that computes
bool computes_late = false;
int (*is_relaxed)() = nullptr; // while another thread captures a graph: whether CUDA allows this one to ask the device
thread_local int64_t current = 0;

bool
is_late(int64_t stream)
{
    return (stream == computing) == computes_late;
}

void
check_relaxed()
{
    TORCH_CHECK(is_relaxed == nullptr || is_relaxed() != 0, "operation not permitted when stream is capturing");
}

void finish_collectives();

struct NotYet {}; // a collective that other ranks have not come to, where nobody waits for it
thread_local bool polled = false;
struct Polling {
    Polling()
    {
        polled = true;
    }
    Polling(const Polling &) = delete;
    Polling &operator=(const Polling &) = delete;
    ~Polling()
    {
        polled = false;
    }
};

void
run(int64_t stream, int64_t until)
{
    Queue &queue = queues[stream];
    if (queue.done < until && !queue.waiting.empty() && is_late(stream)) {
        finish_collectives();
    }
    while (queue.done < until && !queue.waiting.empty()) {
        auto work = std::move(queue.waiting.front());
        queue.waiting.pop_front();
        queue.done++;
        try {
            as_a_kernel(work);
        }
        catch (const NotYet &) {
            queue.done--;
            queue.waiting.push_front(work);
            throw;
        }
        queue.ended = queue.done;
    }
}

constexpr int SELDOM = 2; // asking that often makes nothing earlier

// Time passes for a stream, while somebody asks again and again.
void
proceed(int64_t stream, int64_t until)
{
    const Polling polling;
    try {
        run(stream, until);
    }
    catch (const NotYet &) {
    }
}

// Copies to the host have reached it.
void
land(int64_t stream, int64_t until)
{
    Queue &queue = queues[stream];
    while (!queue.landing.empty() && queue.landing.front().first <= until) {
        const auto work = std::move(queue.landing.front().second);
        queue.landing.pop_front();
        as_a_kernel(work);
    }
}

// Whoever waits for a stream sees all that it has done.
void
force(int64_t stream, int64_t until)
{
    run(stream, until);
    land(stream, until);
}

void
force_all()
{
    for (auto &[stream, queue] : queues) {
        force(stream, queue.put);
    }
}

void
put(int64_t stream, std::function<void()> work)
{
    Queue &queue = queues[stream];
    queue.waiting.push_back(std::move(work));
    queue.put++;
    if (is_late(stream)) {
        put_off++;
    }
    else {
        run(stream, queue.put);
    }
}

// The host waits for a stream.
void
wait_for_stream(int64_t stream)
{
    waits++;
    force(stream, queues[stream].put);
}

void keep_for_stream(const c10::DataPtr &data, const c10::Stream &stream);

bool capturing = false; // as if, into a graph

struct Recorded {
    int64_t stream, until;
    int asked = 0;
    bool captured = capturing;
    const std::atomic<int64_t> *ended = &queues[stream].ended;
};

// CUDA refuses to wait for what was recorded in another capture, or in none. Before 2.13 torch does not tell of captures here.
void
check_captured(bool recorded)
{
    const bool told = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13;
    TORCH_CHECK(!told || recorded == capturing, "a wait for what was recorded in another capture");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static c10::Stream stream_of(int64_t id)
    {
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(SIM, 0), id);
    }
    c10::DeviceType type() const override
    {
        return SIM;
    }
    c10::Device exchangeDevice(c10::Device) const override
    {
        return c10::Device(SIM, 0);
    }
    c10::Device getDevice() const override
    {
        return c10::Device(SIM, 0);
    }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return 1;
    }
    c10::Stream getStream(c10::Device) const override
    {
        return stream_of(current);
    }
    c10::Stream getDefaultStream(c10::Device) const override
    {
        return stream_of(0);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override
    {
        return getNewStream(device, 0);
    }
    c10::Stream getNewStream(c10::Device, int) const override
    {
        const Locked locked(mutex);
        return stream_of(++last_stream);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        return stream_of(std::exchange(current, stream.id()));
    }
    void record(void **event, const c10::Stream &stream, c10::DeviceIndex, c10::EventFlag) const override
    {
        const Locked locked(mutex);
        delete static_cast<Recorded *>(*event);
        *event = new Recorded{stream.id(), queues[stream.id()].put};
    }
    void block(void *event, const c10::Stream &stream) const override
    {
        const Locked locked(mutex);
        if (event == nullptr) {
            return;
        }
        const Recorded of = *static_cast<Recorded *>(event);
        check_captured(of.captured);
        if (of.stream != stream.id()) {
            put(stream.id(), [of] { force(of.stream, of.until); });
        }
    }
    bool queryEvent(void *event) const override
    {
        auto *of = static_cast<Recorded *>(event);
        check_relaxed();
        const Tried locked(mutex, std::try_to_lock);
        if (!locked) {
            return of == nullptr || *of->ended >= of->until;
        }
        if (of != nullptr && ++of->asked > SELDOM) {
            proceed(of->stream, of->until);
        }
        const bool is_done = of == nullptr || queues[of->stream].done >= of->until;
        if (of != nullptr && is_done) { // the host knows, as if it had waited
            land(of->stream, of->until);
        }
        return is_done;
    }
    void synchronizeEvent(void *event) const override
    {
        check_relaxed();
        const Locked locked(mutex);
        waits++;
        if (const auto *of = static_cast<Recorded *>(event)) {
            check_captured(of->captured);
            force(of->stream, of->until);
        }
    }
    void destroyEvent(void *event, c10::DeviceIndex) const noexcept override
    {
        check_not_ended();
        delete static_cast<Recorded *>(event);
    }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13 // before that torch does not ask
    bool isStreamCapturing(const c10::Stream &) const override
    {
        return capturing;
    }
#endif
    bool queryStream(const c10::Stream &stream) const override
    {
        const Tried locked(mutex, std::try_to_lock);
        return locked && queues[stream.id()].waiting.empty();
    }
    void synchronizeStream(const c10::Stream &stream) const override
    {
        const Locked locked(mutex);
        wait_for_stream(stream.id());
    }
    void synchronizeDevice(c10::DeviceIndex) const override
    {
        const Locked locked(mutex);
        waits++;
        force_all();
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override
    {
        keep_for_stream(data, stream);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory ----

int64_t room = -1;                                      // bytes at most; negative: no end
int64_t bytes_now = 0, bytes_peak = 0, allocations = 0; // of blocks that there were none to use again for
struct Block {
    size_t bytes;
    int64_t stream; // that it was allocated on, and goes back to
};
auto &blocks = for_good<std::unordered_map<void *, Block>>(); // in use
auto &unused =
    for_good<std::multimap<std::pair<int64_t, size_t>, void *>>(); // by stream and size: blocks are never given back
auto &streamed = for_good<std::unordered_set<void *>>(); // by record_stream: not used again, whatever becomes of it

using Free = void (*)(void *);
std::mutex &aside_mutex = for_good<std::mutex>();
auto &aside = for_good<std::vector<std::pair<Free, void *>>>(); // what is to be freed

// Nobody who frees memory waits for the mutex: the last reference may go in a thread of gloo's, for which its holder waits.
template <Free now>
void
free_now_or_later(void *memory)
{
    check_not_ended();
    const Tried locked(mutex, std::try_to_lock);
    if (locked) {
        now(memory);
        return;
    }
    const std::lock_guard adding(aside_mutex);
    aside.emplace_back(now, memory);
}

// The mutex is held.
void
free_what_is_aside()
{
    std::vector<std::pair<Free, void *>> taken;
    {
        const std::lock_guard taking(aside_mutex);
        taken.swap(aside);
    }
    for (const auto &[now, memory] : taken) {
        now(memory);
    }
}

void
free_block(void *memory)
{
    const auto found = blocks.find(memory);
    const Block block = found->second;
    blocks.erase(found);
    bytes_now -= static_cast<int64_t>(block.bytes);
    if (streamed.erase(memory) == 0) {
        put(block.stream, [memory, block] { std::memset(memory, 0x7f, block.bytes); });
        unused.emplace(std::make_pair(block.stream, block.bytes), memory);
    }
}

// All that was to be done has been done, each stream in its order: no block was written to since it was freed.
void
check_unused()
{
    for (const auto &[of, memory] : unused) {
        const auto *bytes = static_cast<const unsigned char *>(memory), *end = bytes + of.second;
        const auto *other = std::find_if(bytes, end, [](unsigned char byte) { return byte != 0x7f; });
        TORCH_CHECK(other == end, "memory was written to after it was freed: ", of.second, " bytes of stream ", of.first,
                    ", at byte ", other - bytes);
    }
}

void
keep_for_stream(const c10::DataPtr &data, const c10::Stream &stream)
{
    const Locked locked(mutex);
    const auto block = blocks.find(data.get_context());
    if (block != blocks.end() && block->second.stream != stream.id()) {
        streamed.insert(data.get_context());
    }
}

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const Locked locked(mutex);
        free_what_is_aside();
        if (bytes == 0) {
            return {nullptr, c10::Device(SIM, 0)};
        }
        TORCH_CHECK_WITH(OutOfMemoryError, room < 0 || bytes_now + static_cast<int64_t>(bytes) <= room, "no room for ",
                         bytes, " bytes");
        const auto found = unused.find(std::make_pair(current, bytes));
        void *memory = found == unused.end() ? std::malloc(bytes) : found->second;
        if (found != unused.end()) {
            unused.erase(found);
        }
        else {
            std::memset(memory, 0x7f, bytes); // new memory is not empty either
            allocations++;
        }
        blocks[memory] = {bytes, current};
        bytes_now += static_cast<int64_t>(bytes);
        bytes_peak = std::max(bytes_peak, bytes_now);
        return {memory, memory, free_now_or_later<free_block>, c10::Device(SIM, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return free_now_or_later<free_block>;
    }
    void copy_data(void *target, const void *source, size_t bytes) const override
    {
        default_copy_data(target, source, bytes);
    }
} device_memory;
REGISTER_ALLOCATOR(SIM, &device_memory)

int64_t pinned_now = 0;
auto &pinned = for_good<std::map<char *, size_t>>(); // ranges

void
free_pinned(void *memory)
{
    pinned_now -= static_cast<int64_t>(pinned[static_cast<char *>(memory)]);
    pinned.erase(static_cast<char *>(memory));
    std::free(memory);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const Locked locked(mutex);
        void *memory = std::malloc(std::max<size_t>(bytes, 1));
        pinned[static_cast<char *>(memory)] = bytes;
        pinned_now += static_cast<int64_t>(bytes);
        return {memory, memory, free_now_or_later<free_pinned>, c10::Device(c10::kCPU)};
    }
    void copy_data(void *target, const void *source, size_t bytes) const override
    {
        default_copy_data(target, source, bytes);
    }
} pinned_memory;

bool
is_pinned(const void *data)
{
    const Locked locked(mutex);
    auto after = pinned.upper_bound(static_cast<char *>(const_cast<void *>(data)));
    if (after == pinned.begin()) {
        return false;
    }
    --after;
    return data < after->first + std::max<size_t>(after->second, 1);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return true;
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override
    {
        return true;
    }
    c10::DeviceIndex deviceCount() const override
    {
        return 1;
    }
    c10::DeviceIndex getCurrentDevice() const override
    {
        return 0;
    }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override
    {
        return 0;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override
    {
        return 0;
    }
    bool isPinnedPtr(const void *data) const override
    {
        return is_pinned(data);
    }
    c10::Allocator *getPinnedMemoryAllocator() const override
    {
        return &pinned_memory;
    }
    at::Device getDeviceFromPtr(void *) const override
    {
        return at::Device(SIM, 0);
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override
    {
        return at::detail::getDefaultCPUGenerator();
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        c10::DataPtr grown = device_memory.allocate(bytes);
        if (bytes != 0 && storage.nbytes() != 0) {
            const Locked locked(mutex);
            put(current, [to = grown.get(), from = storage.data(), n = std::min(bytes, storage.nbytes())] {
                std::memcpy(to, from, n);
            });
        }
        storage.set_data_ptr_noswap(std::move(grown));
        storage.set_nbytes(bytes);
    }
};

// ---- operators ----

auto &operations = for_good<std::map<std::string, int64_t>>(); // how often each that computes or copies was called

at::Tensor
copy_from(const at::Tensor &source, const at::Tensor &target, bool non_blocking)
{
    const Locked locked(mutex);
    operations["aten::copy_"]++;
    at::Tensor from = on_cpu(source);
    const at::Tensor to = on_cpu(target);
    const int64_t stream = current;
    if (target.is_cpu()) {
        const bool later = non_blocking && is_pinned(to.const_data_ptr());
        put_off += later && !is_late(stream);
        put(stream, [from, to, stream] {
            const at::Tensor now = from.clone(); // what the device reads; the host gets it later
            queues[stream].landing.emplace_back(queues[stream].done, [now, to] { at::Tensor(to).copy_(now); });
        });
        if (!later) {
            wait_for_stream(stream);
        }
    }
    else if (source.is_cpu()) {
        const bool later = non_blocking && is_pinned(from.const_data_ptr());
        from = later ? from : from.clone(); // what is not pinned is read at once
        put(stream, [from, to, stream] {
            land(stream, queues[stream].done);
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
    const Locked locked(mutex);
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
    return at::empty_strided(model.sizes(), model.strides(), model.options().device(c10::Device(SIM, 0)));
}

// Run op on the memory of the arguments, in the order of the current stream, and return what it does.
void
fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const Locked locked(mutex);
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
        run(current, queues[current].put); // which is not the program's doing
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
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("record_stream", record_stream);
    m.impl("_foreach_zero_", torch::CppFunction::makeFromBoxedFunction<&fallback>()); // one kernel for all
}

// ---- collectives: gloo's, on the device's memory, on a stream of the group ----

auto &under_way =
    for_good<std::vector<c10::intrusive_ptr<c10d::Work>>>(); // that write to the device's memory as early as they can

// A late stream is so late that what may have come before it has, unless that waits for other ranks for too long.
void
finish_collectives()
{
    for (const auto &work : std::exchange(under_way, {})) {
        try {
            without_gil([&] { work->wait(std::chrono::milliseconds(20)); });
        }
        catch (...) { // whoever waits for it is told
        }
    }
}

// The current stream waits for it, and the host does not, as NCCL's.
struct Late final : c10d::Work {
    int64_t stream, until;
    int asked = 0;
    bool captured = capturing;
    std::shared_ptr<std::vector<at::Tensor>> kept; // until somebody waits: their memory is used

    Late(int64_t on, int64_t place, std::shared_ptr<std::vector<at::Tensor>> tensors)
        : stream(on), until(place), kept(std::move(tensors))
    {
    }

    bool isCompleted() override
    {
        const Tried locked(mutex, std::try_to_lock);
        if (!locked) {
            return false;
        }
        if (++asked > SELDOM) {
            proceed(stream, until);
        }
        return queues[stream].done >= until;
    }
    bool isSuccess() const override
    {
        return true;
    }
    bool wait(std::chrono::milliseconds) override
    {
        synchronize();
        return true;
    }
    void synchronize() override
    {
        std::vector<at::Tensor> freed;
        const Locked locked(mutex);
        check_captured(captured);
        put(current, [on = stream, place = until] { force(on, place); });
        freed.swap(*kept);
    }
};

int registers = 0;       // memory with a group: 0: says that it cannot; 1: fails; 2: does
int64_t fail_after = -1; // so many collectives; negative: never

struct Collectives final : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> host;
    int64_t stream; // of its own
    bool coalescing = false;
    c10::intrusive_ptr<c10d::Work> last;
    using Aborted = std::shared_ptr<std::atomic<bool>>;
    Aborted aborted = std::make_shared<std::atomic<bool>>(false);

    explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
        : Backend(gloo->getRank(), gloo->getSize()), host(std::move(gloo))
    {
        const Locked locked(mutex);
        stream = ++last_stream;
    }

    const std::string getBackendName() const override
    {
        return "nccl"; // whose ways it has
    }
    c10::intrusive_ptr<Options> getBackendOptions() override
    {
        return host->getBackendOptions();
    }
    void setTimeout(std::chrono::milliseconds timeout) override
    {
        host->setTimeout(timeout);
    }
    bool supportsTensorAlloc(c10::DeviceIndex) override
    {
        return registers > 0;
    }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override
    {
        const Locked locked(mutex);
        TORCH_CHECK(registers > 1, "memory that could not be registered\nand more");
        operations["simulated::registered"]++;
        return at::empty({size}, options);
    }
    bool supportsCoalescing() const override
    {
        return true;
    }
    void startCoalescing() override
    {
        const Locked locked(mutex);
        TORCH_CHECK(!coalescing, "a call for several collectives was not ended");
        coalescing = true;
        operations["simulated::collectives"]++;
    }
    c10::intrusive_ptr<c10d::Work> endCoalescing() override
    {
        coalescing = false;
        return std::move(last); // its stream does all of them in order
    }

    // As NCCL's: what waits for collectives on the device goes on, with whatever is there, and no other one begins. Till then it
    // waits, also for a rank that has ended: a kernel is not told.
    void abort() override
    {
        *aborted = true;
    }
    static void wait_for(c10d::Work &work, const Aborted &aborted)
    {
        without_gil([&] {
            for (bool ended = false; !ended && !*aborted;) {
                try {
                    work.wait(std::chrono::milliseconds(20));
                    ended = true;
                }
                catch (...) {
                    ended =
                        work.isCompleted() && work.exception() == nullptr; // perhaps only now, after the time was up
                    if (polled && !ended && !*aborted) {
                        throw NotYet{};
                    }
                    std::this_thread::sleep_for(std::chrono::milliseconds(ended ? 0 : 1));
                }
            }
        });
    }

    // The work of one collective. Within a call for several nobody may wait for it, but for that call's, as with NCCL.
    c10::intrusive_ptr<c10d::Work> work_of(const std::shared_ptr<std::vector<at::Tensor>> &kept)
    {
        last = c10::make_intrusive<Late>(stream, queues[stream].put, kept);
        if (coalescing) {
            return c10::make_intrusive<Late>(stream, 0, kept);
        }
        return last;
    }

    // What the current stream has to do comes before. gloo begins at once, for which ranks come to it in whichever order. A
    // late stream has it work on copies: what it gives is written when the stream comes to it, and if what was read is not there
    // any more it is NaN, of which who drops it sees nothing.
    template <class Start>
    c10::intrusive_ptr<c10d::Work> started(const std::vector<at::Tensor> &tensors, const std::vector<at::Tensor> &read,
                                           const std::vector<at::Tensor> &written, const Start &start)
    {
        const Locked locked(mutex);
        TORCH_CHECK(!*aborted, "the communicator was aborted");
        TORCH_CHECK(fail_after < 0 || fail_after-- > 0, "a collective that was to fail");
        operations["simulated::collectives"] += !coalescing;
        run(current, queues[current].put);
        auto kept = std::make_shared<std::vector<at::Tensor>>(tensors);
        std::vector<at::Tensor> from, to;
        std::transform(read.begin(), read.end(), std::back_inserter(from), on_cpu);
        std::transform(written.begin(), written.end(), std::back_inserter(to), on_cpu);
        if (!is_late(stream)) {
            c10::intrusive_ptr<c10d::Work> work;
            without_gil([&] { work = start(from, to); });
            under_way.push_back(work);
            Queue &queue = queues[stream];
            queue.waiting.push_back([work, kept, ended = aborted] {
                wait_for(*work, ended);
                std::erase(under_way, work); // gloo writes what it gives whenever somebody waits for it
            });
            queue.put++;
            return work_of(kept);
        }
        std::vector<at::Tensor> read_now, write_now;
        for (const at::Tensor &tensor : from) {
            read_now.push_back(tensor.clone());
        }
        for (size_t i = 0; i < to.size(); i++) { // in place: the same copy
            const auto same = std::find_if(from.begin(), from.end(), [&](const at::Tensor &other) {
                return other.const_data_ptr() == to[i].const_data_ptr() && other.numel() == to[i].numel();
            });
            write_now.push_back(same == from.end() ? to[i].clone()
                                                   : read_now[static_cast<size_t>(same - from.begin())]);
        }
        std::vector<at::Tensor> as_read;
        for (const at::Tensor &tensor : read_now) {
            as_read.push_back(tensor.clone());
        }
        c10::intrusive_ptr<c10d::Work> work;
        without_gil([&] { work = start(read_now, write_now); });
        put(stream, [work, from, to, as_read, write_now, read_now, kept, ended = aborted] {
            wait_for(*work, ended);
            if (*ended) {
                return;
            }
            bool as_it_was = true;
            for (size_t i = 0; i < from.size(); i++) {
                as_it_was = as_it_was &&
                            std::memcmp(from[i].const_data_ptr(), as_read[i].const_data_ptr(), from[i].nbytes()) == 0;
            }
            for (size_t i = 0; i < to.size(); i++) {
                at::Tensor(to[i]).copy_(write_now[i]);
                if (!as_it_was) {
                    std::memset(to[i].mutable_data_ptr(), 0xff, to[i].nbytes());
                }
            }
        });
        return work_of(kept);
    }

    // What NCCL adds up in place of the tensor, and gloo then has to. It takes the factor in the tensor's dtype, which torch
    // 2.13 does not give it for bf16.
    static at::Tensor multiplied(const at::Tensor &tensor, c10d::ReduceOp &op)
    {
        if (op != c10d::ReduceOp::PREMUL_SUM) {
            return tensor;
        }
        TORCH_CHECK(tensor.scalar_type() != at::kBFloat16, "a factor in bf16");
        const double factor = static_cast<c10d::NCCLPreMulSumSupplement *>(op.supplement_.get())->double_factor;
        op = c10d::ReduceOp::SUM;
        operations["simulated::multiplied"]++;
        return tensor.mul(factor);
    }

    c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &tensors,
                                             const c10d::BroadcastOptions &options) override
    {
        return started(tensors, tensors, tensors, [&](auto &, auto &to) { return host->broadcast(to, options); });
    }
    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor> &tensors,
                                             const c10d::AllreduceOptions &options) override
    {
        return started(tensors, tensors, tensors, [&](auto &, auto &to) {
            c10d::AllreduceOptions of_host = options;
            to[0].copy_(multiplied(to[0], of_host.reduceOp));
            return host->allreduce(to, of_host);
        });
    }
    c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>> &outputs,
                                             std::vector<at::Tensor> &inputs,
                                             const c10d::AllgatherOptions &options) override
    {
        TORCH_CHECK(outputs.size() == 1);
        std::vector<at::Tensor> all = outputs[0];
        all.insert(all.end(), inputs.begin(), inputs.end());
        return started(all, inputs, outputs[0], [&](auto &from, auto &to) {
            std::vector<std::vector<at::Tensor>> lists = {to};
            return host->allgather(lists, from, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &options) override
    {
        return started({output, input}, {input}, {output},
                       [&](auto &from, auto &to) { return host->_allgather_base(to[0], from[0], options); });
    }
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        return started({output, input}, {input}, {output}, [&](auto &from, auto &to) {
            c10d::ReduceScatterOptions of_host = options;
            from[0] = multiplied(from[0], of_host.reduceOp);
            return host->_reduce_scatter_base(to[0], from[0], of_host);
        });
    }
    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions &options) override
    {
        return host->barrier(options);
    }
};

} // namespace

PYBIND11_MODULE(simulated_device, m)
{
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> host) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Collectives>(std::move(host));
    });
    m.def("set_time_out", [](const c10::intrusive_ptr<c10d::Backend> &backend, double seconds) {
        backend->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds)));
    });
    m.def("memory", [] {
        const Locked locked(mutex);
        free_what_is_aside();
        return std::make_tuple(bytes_now, bytes_peak, pinned_now);
    });
    m.def("allocations", [] {
        const Locked locked(mutex);
        return allocations;
    });
    m.def("reset_peak", [] {
        const Locked locked(mutex);
        free_what_is_aside();
        bytes_peak = bytes_now;
    });
    const auto sets = [&m](const char *name, auto *variable) {
        m.def(name, [variable](std::remove_pointer_t<decltype(variable)> value) {
            const Locked locked(mutex);
            *variable = value;
        });
    };
    sets("fail_after", &fail_after);
    sets("capturing", &capturing);
    sets("room", &room);
    sets("registers", &registers);
    m.def("put_off", [] {
        const Locked locked(mutex);
        return put_off;
    });
    m.def("end_first", [] { std::atexit([] { ended = true; }); });
    m.def("compute_for", [](double seconds) { // the current stream
        const Locked locked(mutex);
        put(current, [seconds, end = std::optional<std::chrono::steady_clock::time_point>()]() mutable {
            const auto now = std::chrono::steady_clock::now();
            end = end.value_or(now + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                         std::chrono::duration<double>(seconds)));
            if (polled && now < *end) {
                throw NotYet{};
            }
            std::this_thread::sleep_until(*end);
        });
    });
    m.def("behind", [] {
        const Locked locked(mutex);
        return queues[computing].waiting.size();
    });
    m.def("operations", [] {
        const Locked locked(mutex);
        return std::exchange(operations, {}); // since the last call
    });
    m.def("waits", [] {
        const Locked locked(mutex);
        return waits;
    });
    m.def(
        "synchronize",
        [](bool with_gil) {
            const Locked locked(mutex);
            free_what_is_aside();
            waits++;
            keeps_gil = with_gil;
            const std::unique_ptr<bool, void (*)(bool *)> till_the_end(&keeps_gil, [](bool *keeps) { *keeps = false; });
            force_all();
            check_unused();
        },
        pybind11::arg("with_gil") = false);
    m.def("captured_beside", [](uintptr_t asked) { is_relaxed = reinterpret_cast<int (*)()>(asked); });
    m.def(
        "late",
        [](const std::string &which, int64_t stream) {
            const Locked locked(mutex);
            force_all();
            TORCH_CHECK_VALUE(which == "others" || which == "computing", "expected others or computing, got ", which);
            computes_late = which == "computing";
            computing = stream;
        },
        pybind11::arg("which"), pybind11::arg("computing") = 0);
}
