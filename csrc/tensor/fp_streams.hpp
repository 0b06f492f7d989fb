// tensor/fp_streams.hpp -- the streams of a device for gathers and copies, the order between them and the current stream, and
// copies to and from the host. The host waits in wait_until() alone; everywhere else a stream waits. On a device without
// streams all of it happens at once. The GIL may be held or not.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <optional>

#include "tensor/fp_bridge.hpp"

namespace fp {

// Whether work of the device is queued on streams: true for an accelerator, false for a CPU.
bool has_streams(const c10::Device &device);

// An empty tensor on the device of options, to be copied to and from device other. On the host it is pinned if other has
// streams.
at::Tensor empty_beside(const c10::Device &other, at::IntArrayRef sizes, const at::TensorOptions &options);

// A device has one stream for each purpose, which all models share. So gathers and copies do not wait for each other.
enum class Purpose { gather, copy };

// When work on such a stream starts: after all work that the current stream has now, or at once.
enum class After { current, nothing };

// While one lives, the stream for purpose is device's current one in this thread. Memory that is allocated meanwhile belongs to
// that stream. It has no effect on a device with one stream or none.
class OnOwnStream {
  public:
    OnOwnStream(const c10::Device &device, Purpose purpose, After after = After::current);

    explicit operator bool() const
    {
        return guard_.has_value();
    }

    // Let the stream that was current before wait for all work of this one. If the device has failed, nothing happens.
    void join() const noexcept;

  private:
    std::optional<c10::StreamGuard> guard_;
};

// The number of the CUDA graph that the current stream is captured into; 0: none. Without our kernels torch before 2.13 always
// says 0, and later versions say 1 for every capture.
uint64_t capture_of(const c10::Device &device) noexcept;

// Whether work on the current stream is captured into a graph, to be replayed later, instead of being run.
inline bool
is_captured(const c10::Device &device) noexcept
{
    return capture_of(device) != 0;
}

// A point in the work of a stream. It is void outside of the capture in which it was made, or inside of one if it was made
// outside: CUDA refuses to wait for it. No wait is lost: captured work has not run, and torch waits for the device before a
// capture.
struct Mark {
    c10::Event event;
    uint64_t capture; // capture_of() when the mark was made

    bool is_void() const noexcept
    {
        return capture != capture_of(event.device());
    }
};

// target = source on the stream for copies, after the work of the current stream. Returns the mark after the copy.
Mark copy_over(const at::Tensor &target, const at::Tensor &source, const c10::Device &device);

// Copy source to target, in host memory, on the stream for copies, after the work of the current stream. Returns the mark after
// the copy. The memory of source is kept until the next copy_out() or wait_copies() on its device.
Mark copy_out(const at::Tensor &target, at::Tensor &&source);

// Free the source of the last copy_out(). The current stream, which may use its memory next, waits for the copy.
void wait_copies(const c10::Device &device);

// Let the current stream of device wait for mark, unless there is none or it is void, and reset mark.
void block_on(std::optional<Mark> &mark, const c10::Device &device);

// A mark after all work that the current stream has now.
Mark recorded_now(const c10::Device &device);

// Whether the device has reached event. It does not spoil the capture of another thread.
bool has_come(const c10::Event &event);

// Let the host wait for mark, without the GIL, and reset mark. RuntimeError for a mark of the present capture: it has not run.
void wait_until(std::optional<Mark> &mark);

// The stream to which memory belongs, and the capture in which it was filled. When memory is freed, torch's allocator gives it
// back to the stream that was current when it was allocated, and does not wait for other streams that still use it.
class Home {
  public:
    // Call it when memory was allocated (is_new), or is filled again: note the current stream, and the capture.
    void move_in(const c10::Device &device, bool is_new = true);

    // Call it before the memory is freed: its stream waits for the work of the current stream.
    void move_out();

    // Call it when the current stream uses the memory of tensor, which may be freed without move_out(): tells torch's allocator
    // if the memory belongs to another stream.
    void share(const at::Tensor &tensor) const;

    // Whether the memory was filled in another capture than the present one, so that it has no values. See Mark.
    bool is_void() const noexcept;

  private:
    std::optional<c10::Stream> stream_; // none: there is no memory, or the device has no streams
    uint64_t capture_ = 0;              // capture_of() when it was filled
};

} // namespace fp
