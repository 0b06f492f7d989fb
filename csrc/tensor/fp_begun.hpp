// tensor/fp_begun.hpp -- the pending collectives of a group, and the collective for which a device, or the host, waits now.
// fp_channel.cpp notes them; the watch over a device (desync/fp_watch.cpp) reads them. Only collectives of groups that have a
// PendingCollectives are noted; for other groups a call reads one counter.
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

// While one lives with is_first, the first collective over group is being issued: the backend makes the communicator, which
// blocks the host until all ranks have come. Without is_first it does nothing.
class FirstCollective {
  public:
    FirstCollective(const c10d::ProcessGroup &group, bool is_first);
    FirstCollective(const FirstCollective &) = delete;
    FirstCollective &operator=(const FirstCollective &) = delete;
    ~FirstCollective();

  private:
    const c10d::ProcessGroup *group_; // null: it is not the first collective
};

// Note a collective over group that has begun. No stream waits for it yet. Only a weak reference to work is kept.
void note_begun(const c10d::ProcessGroup &group, const c10::intrusive_ptr<c10d::Work> &work);

struct Wait;

// A wait for a collective over group, from its construction to end(): the current stream of device is made to wait, or the
// host waits. It records an event on the stream before and one after; between them the stream only waits. work: of the
// collective; null if Python has issued it. If it is destroyed without end(), the wait has failed.
class WaitScope {
  public:
    WaitScope(const c10d::ProcessGroup &group, const c10d::Work *work, const c10::Device &device);
    WaitScope(const WaitScope &) = delete;
    WaitScope &operator=(const WaitScope &) = delete;
    ~WaitScope();

    void end();

  private:
    std::shared_ptr<Wait> wait_; // null: the group is not noted, the device is a CPU, or a CUDA graph captures the wait
};

struct Begun;

// While one lives, the collectives over group are noted. world: stands for the world of the group, of which a process has
// several if its ranks are threads. Only the addresses of the two are kept, to compare them.
class PendingCollectives {
  public:
    PendingCollectives(const c10d::ProcessGroup *group, const void *world);
    PendingCollectives(const PendingCollectives &) = delete;
    PendingCollectives &operator=(const PendingCollectives &) = delete;
    ~PendingCollectives();

    // Whether a collective has begun and not ended. false if the device has failed: then no rank can help.
    bool has_work();

    // Whether a stream, or the host, has waited for a collective for at least `patience` seconds and waits still, or makes the
    // communicator for so long.
    bool has_waited(double patience);

    // Whether has_work() is true of any noted group of this one's world.
    bool world_has_work();

    // The device whose streams wait; none: no stream has waited yet.
    std::optional<c10::Device> device();

  private:
    const std::shared_ptr<Begun> begun_;
};

} // namespace fp
