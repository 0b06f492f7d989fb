// tensor/fp_streams.cpp -- see fp_streams.hpp.
#include "tensor/fp_streams.hpp"

#include "tensor/fp_launch.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace fp {
namespace {

// The streams of a device beside the current one, and the source of the last copy_out(). That is freed by the next one, or
// at the end of the backward: besides the gradient in use, at most one gradient comes from the host and one goes there.
struct OfDevice {
    std::recursive_mutex mutex;                       // models of several threads share a device
    std::array<std::optional<c10::Stream>, 2> others; // by purpose; none: the device has one stream alone
    at::Tensor leaving;
    std::optional<Mark> has_left;
};

std::optional<c10::Stream>
further_stream(const c10::Device &device)
{
    try {
        return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
    }
    catch (const c10::Error &) { // a device with one queue
        return std::nullopt;
    }
}

// The entry of device, made at first use. Never destroyed: the driver ends before static variables do.
OfDevice &
of_device(const c10::Device &device)
{
    struct Table {
        std::mutex mutex;
        std::unordered_map<c10::Device, std::unique_ptr<OfDevice>> devices;
    };
    static auto *const table = new Table;
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Device exact = device.has_index() ? device : guard.getDevice();
    const std::lock_guard<std::mutex> lock(table->mutex);
    std::unique_ptr<OfDevice> &found = table->devices[exact];
    if (!found) {
        found = std::make_unique<OfDevice>();
        for (auto &stream : found->others) {
            stream = further_stream(exact);
        }
    }
    return *found;
}

std::optional<c10::Stream>
stream_for(const c10::Device &device, Purpose purpose)
{
    return device.is_cpu() || device.is_meta() ? std::nullopt : of_device(device).others[static_cast<size_t>(purpose)];
}

// Let the later work of `after` wait for the present work of `before`.
void
put_after(const c10::Stream &after, const c10::Stream &before)
{
    c10::Event event(before.device_type());
    event.record(before);
    event.block(after);
}

// The source of the last copy_out(), to be freed by the caller. The current stream waits for the copy. The mutex is held.
at::Tensor
take_leaving(OfDevice &of, const c10::Device &device)
{
    block_on(of.has_left, device);
    return std::exchange(of.leaving, at::Tensor());
}

} // namespace

bool
has_streams(const c10::Device &device)
{
    return !device.is_cpu() && !device.is_meta();
}

at::Tensor
empty_beside(const c10::Device &other, at::IntArrayRef sizes, const at::TensorOptions &options)
{
    const SparedCaptures spared(other); // torch queries the events of freed pinned memory
    return at::empty(sizes, options.pinned_memory(options.device().is_cpu() && has_streams(other)));
}

OnOwnStream::OnOwnStream(const c10::Device &device, Purpose purpose, After after)
{
    if (const std::optional<c10::Stream> own = stream_for(device, purpose)) {
        if (after == After::current) {
            put_after(*own, c10::impl::VirtualGuardImpl(device.type()).getStream(device));
        }
        guard_.emplace(*own);
    }
}

void
OnOwnStream::join() const noexcept
{
    if (guard_) {
        try {
            put_after(guard_->original_stream(), guard_->current_stream());
        }
        catch (...) { // the device has failed: its next user raises that
        }
    }
}

Mark
copy_over(const at::Tensor &target, const at::Tensor &source, const c10::Device &device)
{
    const OnOwnStream copying(device, Purpose::copy);
    target.copy_(source, /*non_blocking=*/true);
    return recorded_now(device);
}

Mark
copy_out(const at::Tensor &target, at::Tensor &&source)
{
    const c10::Device device = source.device();
    OfDevice &of = of_device(device);
    at::Tensor left; // goes after the lock, as freeing a tensor may take the GIL
    const std::lock_guard<std::recursive_mutex> lock(of.mutex);
    left = take_leaving(of, device);
    const OnOwnStream copying(device, Purpose::copy);
    target.copy_(source, /*non_blocking=*/true);
    of.has_left.emplace(recorded_now(device));
    of.leaving = std::move(source);
    return recorded_now(device);
}

void
wait_copies(const c10::Device &device)
{
    OfDevice &of = of_device(device);
    at::Tensor left;
    const std::lock_guard<std::recursive_mutex> lock(of.mutex);
    left = take_leaving(of, device);
}

void
block_on(std::optional<Mark> &mark, const c10::Device &device)
{
    if (mark && !mark->is_void()) {
        mark->event.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
    mark.reset();
}

// A template, so that a member which this torch lacks is not looked up.
template <class Guard>
static uint64_t
capture_by(const Guard &guard, const c10::Stream &stream)
{
    if (const std::optional<uint64_t> capture = capture_on(stream)) {
        return *capture;
    }
    if constexpr (requires { guard.isStreamCapturing(stream); }) {
        return guard.isStreamCapturing(stream) ? 1 : 0;
    }
    else {
        return 0;
    }
}

uint64_t
capture_of(const c10::Device &device) noexcept
{
    if (device.is_cpu() || device.is_meta()) {
        return 0;
    }
    try {
        const c10::impl::VirtualGuardImpl guard(device.type());
        return capture_by(guard, guard.getStream(device));
    }
    catch (...) { // the device has failed: its next user raises that
        return 0;
    }
}

Mark
recorded_now(const c10::Device &device)
{
    c10::Event event(device.type());
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return {std::move(event), capture_of(device)};
}

bool
has_come(const c10::Event &event)
{
    const SparedCaptures spared(event.device());
    return event.query();
}

void
wait_until(std::optional<Mark> &mark)
{
    if (mark && !mark->is_void()) {
        TORCH_CHECK(mark->capture == 0, "flatparam: copies to the host cannot be captured into a CUDA graph, as the "
                                        "host waits for the device: leave out CPUOffload and offload_grads");
        const WithoutGil released;
        const SparedCaptures spared(mark->event.device());
        if (!mark->event.query()) {
            mark->event.synchronize();
        }
    }
    mark.reset();
}

void
Home::move_in(const c10::Device &device, bool is_new)
{
    if (!device.is_cpu() && !device.is_meta()) {
        if (is_new || !stream_) {
            stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
        }
        capture_ = capture_of(device);
    }
}

void
Home::move_out()
{
    if (stream_) {
        const c10::Stream current = c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
        if (current != *stream_ && !is_void()) {
            put_after(*stream_, current);
        }
        stream_.reset();
    }
}

void
Home::share(const at::Tensor &tensor) const
{
    if (stream_) {
        const c10::Stream current = c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
        if (current != *stream_) {
            at::Tensor(tensor).record_stream(current);
        }
    }
}

bool
Home::is_void() const noexcept
{
    return stream_ && capture_of(stream_->device()) != capture_;
}

} // namespace fp
