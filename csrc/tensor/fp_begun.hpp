// tensor/fp_begun.hpp -- the collectives that a group has begun, and for which of them a device, or the host, waits. It is
// noted for groups with a PendingCollectives alone, those of fp_watch.h; for others these calls cost one look at a counter.
//
// Any thread may call these, without the GIL. They take one lock, and call no device under it: a device that is stuck may not
// return.
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

// While one lives, a collective over group makes its communicator, if is_first: that blocks the host until all ranks have come.
class FirstCollective {
  public:
    FirstCollective(const c10d::ProcessGroup &group, bool is_first);
    FirstCollective(const FirstCollective &) = delete;
    FirstCollective &operator=(const FirstCollective &) = delete;
    ~FirstCollective();

  private:
    const c10d::ProcessGroup *group_; // null: it is not the first collective
};

// Note a collective over group that was begun. No stream waits for it yet. work is referred to weakly.
void note_begun(const c10d::ProcessGroup &group, const c10::intrusive_ptr<c10d::Work> &work);

struct Wait;

// From its construction to end() the current stream of device is made to wait for a collective over group, or the host
// waits. It records an event before and after, between which the stream does nothing but wait. work: null if Python has
// begun it. Destroyed without end(), the wait has failed.
class WaitScope {
  public:
    WaitScope(const c10d::ProcessGroup &group, const c10d::Work *work, const c10::Device &device);
    WaitScope(const WaitScope &) = delete;
    WaitScope &operator=(const WaitScope &) = delete;
    ~WaitScope();

    void end();

  private:
    std::shared_ptr<Wait> wait_; // null: the group is not watched, or the wait is captured into a CUDA graph
};

struct Begun;

// While one lives, the collectives that group begins are noted. group is not kept, only its address.
class PendingCollectives {
  public:
    explicit PendingCollectives(const c10d::ProcessGroup *group);
    PendingCollectives(const PendingCollectives &) = delete;
    PendingCollectives &operator=(const PendingCollectives &) = delete;
    ~PendingCollectives();

    // Whether a collective has begun and not ended, so that other ranks may be needed. false if the device has failed.
    bool has_work();

    // Whether a stream, or the host, waits now for a collective that began at least `patience` seconds ago, or has made a
    // communicator for so long.
    bool has_waited(double patience);

    // has_work() of any group in this process.
    static bool any_has_work();

    // The device of the streams that wait; null: none has waited yet.
    std::optional<c10::Device> device();

  private:
    const std::shared_ptr<Begun> begun_;
};

} // namespace fp
