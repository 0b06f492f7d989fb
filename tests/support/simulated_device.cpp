// simulated_device.cpp -- an accelerator that is not there: torch's PrivateUse1 device "sim" in host memory.
//
// Kernels run on the CPU, at once and in the order of the program, as on the default stream. What a program may wrongly
// take for done is put off as long as a device may: a copy that does not block, on another stream, happens when an event
// behind it is waited for; one to pinned memory reaches it then too. Freed memory is overwritten, and used again first.
// So a wait that is missing shows in the values.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;

std::recursive_mutex mutex; // of all that follows
using Locked = std::lock_guard<std::recursive_mutex>;

// ---- streams: what is put off, in order ----

struct Queue {
    std::deque<std::function<void()>> waiting;
    int64_t put = 0, done = 0;
};
std::map<int64_t, Queue> queues; // by the stream's id; 0 is the default stream
int64_t last_stream = 0, put_off = 0, waits = 0;
thread_local int64_t current = 0;

void
run(int64_t stream, int64_t until)
{
    Queue &queue = queues[stream];
    while (queue.done < until && !queue.waiting.empty()) {
        const auto work = std::move(queue.waiting.front());
        queue.waiting.pop_front();
        queue.done++;
        work();
    }
}

void
run_all()
{
    for (auto &[stream, queue] : queues) {
        run(stream, queue.put);
    }
}

void
put(int64_t stream, std::function<void()> work)
{
    Queue &queue = queues[stream];
    queue.waiting.push_back(std::move(work));
    queue.put++;
    put_off++;
}

struct Recorded {
    int64_t stream, until;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = SIM;

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
        if (stream.id() == 0) {
            run(of.stream, of.until);
        }
        else if (of.stream != stream.id()) {
            put(stream.id(), [of] { run(of.stream, of.until); });
        }
    }
    bool queryEvent(void *event) const override
    {
        const Locked locked(mutex);
        const auto *of = static_cast<Recorded *>(event);
        return of == nullptr || queues[of->stream].done >= of->until;
    }
    void synchronizeEvent(void *event) const override
    {
        const Locked locked(mutex);
        waits++;
        if (const auto *of = static_cast<Recorded *>(event)) {
            run(of->stream, of->until);
        }
    }
    void destroyEvent(void *event, c10::DeviceIndex) const noexcept override
    {
        delete static_cast<Recorded *>(event);
    }
    bool queryStream(const c10::Stream &stream) const override
    {
        const Locked locked(mutex);
        return queues[stream.id()].waiting.empty();
    }
    void synchronizeStream(const c10::Stream &stream) const override
    {
        const Locked locked(mutex);
        run(stream.id(), queues[stream.id()].put);
    }
    void synchronizeDevice(c10::DeviceIndex) const override
    {
        const Locked locked(mutex);
        run_all();
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory ----

int64_t bytes_now = 0, bytes_peak = 0;
std::unordered_map<void *, size_t> sizes;                 // of what is in use
std::multimap<std::pair<int64_t, size_t>, void *> unused; // by stream and size: blocks are never given back
std::unordered_set<void *> streamed;                      // by record_stream: not used again, whatever becomes of it

void
free_block(void *memory)
{
    const Locked locked(mutex);
    const auto found = sizes.find(memory);
    bytes_now -= static_cast<int64_t>(found->second);
    if (streamed.erase(memory) == 0) {
        std::memset(memory, 0x7f, found->second);
        unused.emplace(std::make_pair(current, found->second), memory);
    }
    sizes.erase(found);
}

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const Locked locked(mutex);
        if (bytes == 0) {
            return {nullptr, c10::Device(SIM, 0)};
        }
        const auto found = unused.find(std::make_pair(current, bytes));
        void *memory = found == unused.end() ? std::malloc(bytes) : found->second;
        if (found != unused.end()) {
            unused.erase(found);
        }
        sizes[memory] = bytes;
        bytes_now += static_cast<int64_t>(bytes);
        bytes_peak = std::max(bytes_peak, bytes_now);
        return {memory, memory, free_block, c10::Device(SIM, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return free_block;
    }
    void copy_data(void *target, const void *source, size_t bytes) const override
    {
        default_copy_data(target, source, bytes);
    }
} device_memory;
REGISTER_ALLOCATOR(SIM, &device_memory)

int64_t pinned_now = 0;
std::map<char *, size_t> pinned; // ranges

void
free_pinned(void *memory)
{
    const Locked locked(mutex);
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
        return {memory, memory, free_pinned, c10::Device(c10::kCPU)};
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
            std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
        }
        storage.set_data_ptr_noswap(std::move(grown));
        storage.set_nbytes(bytes);
    }
};

// ---- operators ----

std::map<std::string, int64_t> operations; // how often each that computes or copies was called

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

at::Tensor
copy_from(const at::Tensor &source, const at::Tensor &target, bool non_blocking)
{
    const Locked locked(mutex);
    operations["aten::copy_"]++;
    const at::Tensor from = on_cpu(source), to = on_cpu(target);
    const bool to_host = target.is_cpu() && !source.is_cpu();
    if (current != 0) {
        const auto copy = [from, to] {
            const c10::InferenceMode no_versions(false);
            const at::NoGradGuard no_grad;
            at::Tensor(to).copy_(from);
        };
        put(current, copy);
        if (!non_blocking) {
            run(current, queues[current].put);
        }
    }
    else if (non_blocking && to_host && is_pinned(to.const_data_ptr())) {
        const at::Tensor now = from.clone(); // what the device reads; the host gets it later
        put(0, [now, to] { at::Tensor(to).copy_(now); });
    }
    else {
        if (to_host) {
            run(0, queues[0].put);
        }
        at::Tensor(to).copy_(from);
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
    run(0, queues[0].put);
    return on_cpu(self).item();
}

void
record_stream(at::Tensor &self, c10::Stream)
{
    const Locked locked(mutex);
    streamed.insert(self.storage().mutable_data_ptr().get_context());
}

void
fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    {
        const Locked locked(mutex);
        operations[op.schema().name()]++;
    }
    at::native::cpu_fallback(op, stack);
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
}

// ---- collectives: gloo's, on the device's memory, after what the current stream has to do ----

struct Collectives final : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> host;

    explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
        : Backend(gloo->getRank(), gloo->getSize()), host(std::move(gloo))
    {
    }

    const std::string getBackendName() const override
    {
        return "simulated";
    }

    static void arrive()
    {
        const Locked locked(mutex);
        run(current, queues[current].put);
    }
    static std::vector<at::Tensor> all_on_cpu(const std::vector<at::Tensor> &tensors)
    {
        arrive();
        std::vector<at::Tensor> result;
        for (const at::Tensor &tensor : tensors) {
            result.push_back(on_cpu(tensor));
        }
        return result;
    }
    c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &tensors,
                                             const c10d::BroadcastOptions &options) override
    {
        auto there = all_on_cpu(tensors);
        return host->broadcast(there, options);
    }
    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor> &tensors,
                                             const c10d::AllreduceOptions &options) override
    {
        auto there = all_on_cpu(tensors);
        return host->allreduce(there, options);
    }
    c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>> &outputs,
                                             std::vector<at::Tensor> &inputs,
                                             const c10d::AllgatherOptions &options) override
    {
        std::vector<std::vector<at::Tensor>> there;
        for (const auto &tensors : outputs) {
            there.push_back(all_on_cpu(tensors));
        }
        auto from = all_on_cpu(inputs);
        return host->allgather(there, from, options);
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &options) override
    {
        arrive();
        at::Tensor to = on_cpu(output), from = on_cpu(input);
        return host->_allgather_base(to, from, options);
    }
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        arrive();
        at::Tensor to = on_cpu(output), from = on_cpu(input);
        return host->_reduce_scatter_base(to, from, options);
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
    m.def("memory", [] {
        const Locked locked(mutex);
        return std::make_tuple(bytes_now, bytes_peak, pinned_now);
    });
    m.def("reset_peak", [] {
        const Locked locked(mutex);
        bytes_peak = bytes_now;
    });
    m.def("put_off", [] {
        const Locked locked(mutex);
        return put_off;
    });
    m.def("operations", [] {
        const Locked locked(mutex);
        return std::exchange(operations, {}); // since the last call
    });
    m.def("waits", [] {
        const Locked locked(mutex);
        return waits;
    });
    m.def("synchronize", [] {
        const Locked locked(mutex);
        run_all();
    });
}
