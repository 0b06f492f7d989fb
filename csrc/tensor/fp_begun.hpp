// tensor/fp_begun.hpp -- which collectives a group has begun, and which of them a device, or the host, waits for: kept in mind
// of groups that are watched (fp_watch.h). Any thread may call these.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fp {

using Clock = std::chrono::steady_clock;

inline double
seconds(Clock::duration duration)
{
    return std::chrono::duration<double>(duration).count();
}

// From its making to its end, a collective over group makes its communicator, if is_first.
class Connecting {
  public:
    Connecting(const c10d::ProcessGroup &group, bool is_first);
    Connecting(const Connecting &) = delete;
    Connecting &operator=(const Connecting &) = delete;
    ~Connecting();

  private:
    const c10d::ProcessGroup *group_; // null: it is not the first
};

// A collective over group was begun. No stream waits for it yet.
void note_begun(const c10d::ProcessGroup &group, const c10::intrusive_ptr<c10d::Work> &work);

struct Wait;

// From its making to end() the current stream of device is made to wait for a collective over group, or the host waits for it.
// work: null if Python has begun it. The device is asked for nothing, but for whether the oldest wait has ended.
class Waiting {
  public:
    Waiting(const c10d::ProcessGroup &group, const c10d::Work *work, const c10::Device &device);
    Waiting(const Waiting &) = delete;
    Waiting &operator=(const Waiting &) = delete;
    ~Waiting();

    void end();

  private:
    std::shared_ptr<Wait> wait_; // null: nobody watches, or it goes into a CUDA graph
};

struct Begun;

// From its making to its end, what group begins is kept in mind.
class Kept {
  public:
    explicit Kept(const c10d::ProcessGroup *group);
    Kept(const Kept &) = delete;
    Kept &operator=(const Kept &) = delete;
    ~Kept();

    // Whether not all that was begun is done: other ranks may be needed for it.
    bool has_work();

    // Whether a stream, or the host, waits now for one that was begun so many seconds ago, or as long for its communicator.
    bool has_waited(double patience);

    // Whether any group that is kept in mind in this process has work.
    static bool any_has_work();

    // Where streams wait; null: none has waited yet.
    std::optional<c10::Device> device();

  private:
    const std::shared_ptr<Begun> begun_;
};

} // namespace fp
