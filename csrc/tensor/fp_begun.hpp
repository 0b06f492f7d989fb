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
class FirstCollective {
  public:
    FirstCollective(const c10d::ProcessGroup &group, bool is_first);
    FirstCollective(const FirstCollective &) = delete;
    FirstCollective &operator=(const FirstCollective &) = delete;
    ~FirstCollective();

  private:
    const c10d::ProcessGroup *group_; // null: it is not the first
};

// A collective over group was begun. No stream waits for it yet.
void note_begun(const c10d::ProcessGroup &group, const c10::intrusive_ptr<c10d::Work> &work);

struct Wait;

// From its making to end() the current stream of device is made to wait for a collective over group, or the host waits for it.
// work: null if Python has begun it. The device is asked for nothing, but for whether the oldest wait has ended.
class WaitScope {
  public:
    WaitScope(const c10d::ProcessGroup &group, const c10d::Work *work, const c10::Device &device);
    WaitScope(const WaitScope &) = delete;
    WaitScope &operator=(const WaitScope &) = delete;
    ~WaitScope();

    void end();

  private:
    std::shared_ptr<Wait> wait_; // null: nobody watches, or it goes into a CUDA graph
};

struct Begun;

// From its making to its end, what group begins is kept in mind.
class PendingCollectives {
  public:
    explicit PendingCollectives(const c10d::ProcessGroup *group);
    PendingCollectives(const PendingCollectives &) = delete;
    PendingCollectives &operator=(const PendingCollectives &) = delete;
    ~PendingCollectives();

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
