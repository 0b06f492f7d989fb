// tensor/fp_streams.hpp -- the streams of a device beside the current one, what waits for what on them, and copies to and
// from the host. The host waits in wait_until() alone.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <optional>

#include "tensor/fp_bridge.hpp"

namespace fp {

// Whether what a device does is put to streams.
bool has_streams(const c10::Device &device);

// A tensor on the device of options, which is copied to and from other: pinned, if it lies on the host for other's streams.
at::Tensor empty_beside(const c10::Device &other, at::IntArrayRef sizes, const at::TensorOptions &options);

// Streams that all models have in common. One for each purpose, so that gathers and copies do not wait for each other.
enum class Purpose { gather, copy };

// What begins after all that the current stream has been given, or at once.
enum class After { current, nothing };

// From its making to its end, what is put to the current stream of device goes to the one for purpose. Tensors that are made
// meanwhile belong to that stream. On a device that has no other streams, or none at all, nothing changes.
class OnOwnStream {
  public:
    OnOwnStream(const c10::Device &device, Purpose purpose, After after = After::current);

    explicit operator bool() const
    {
        return guard_.has_value();
    }

    // The stream that was current before waits for all that was put to this one.
    void join() const noexcept;

  private:
    std::optional<c10::StreamGuard> guard_;
};

// Which capture of a CUDA graph the current stream takes part in, as a number; 0: none. Without kernels torch before 2.13
// knows of none, and later ones give all the same number.
uint64_t capture_of(const c10::Device &device) noexcept;

// Whether what is put to the current stream goes into a graph, to be replayed later.
inline bool
is_captured(const c10::Device &device) noexcept
{
    return capture_of(device) != 0;
}

// How far a stream had come. In another capture than the one it was made in, or outside of that, it is void: CUDA refuses to
// wait for it, and there is nothing to wait for. What was captured has not run, and torch waits for the device before a capture.
struct Mark {
    c10::Event event;
    uint64_t capture; // in which it was made

    bool is_void() const noexcept
    {
        return capture != capture_of(event.device());
    }
};

// target = source on the stream for copies, in the order of the current one. The mark is made after it.
Mark copy_over(const at::Tensor &target, const at::Tensor &source, const c10::Device &device);

// The same to host memory; source's memory is kept until the next one comes or the backward ends, see wait_copies().
Mark copy_out(const at::Tensor &target, at::Tensor &&source);

// What was copied out may be freed: the current stream, on which its memory will be used next, waits for the copy.
void wait_copies(const c10::Device &device);

// The current stream of device waits for mark, if there is one, and forgets it.
void block_on(std::optional<Mark> &mark, const c10::Device &device);

Mark recorded_now(const c10::Device &device);

// Whether a device has come to event. No capture of another thread is spoiled.
bool has_come(const c10::Event &event);

// The host waits for mark, if there is one, and forgets it.
void wait_until(std::optional<Mark> &mark);

// Which stream memory belongs to: the one that was current when it was allocated, to which it goes back when it is freed; and
// the capture then, whose graph it belongs to.
class Home {
  public:
    // Memory was allocated now, or, if it is not new, is filled again.
    void move_in(const c10::Device &device, bool is_new = true);

    // The memory is about to be freed: its stream uses it again, after what the current one has done with it.
    void move_out();

    // The current stream uses the memory of tensor from here on, and it may be freed without move_out(): if it belongs to another stream,
    // torch's allocator is told.
    void share(const at::Tensor &tensor) const;

    // Whether there is memory, and what was put to it is void: see Mark.
    bool is_void() const noexcept;

  private:
    std::optional<c10::Stream> stream_;
    uint64_t capture_ = 0;
};

} // namespace fp
