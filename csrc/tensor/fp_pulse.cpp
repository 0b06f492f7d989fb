// tensor/fp_pulse.cpp -- see fp_pulse.h.
#include "tensor/fp_pulse.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tensor/fp_bridge.hpp"

namespace fp {

// Shared with the thread, which may outlive the one that began it.
struct Beating {
    std::mutex lock;
    std::condition_variable changed;
    bool stopped = false, ended = false;

    bool wait(std::chrono::duration<double> seconds)
    {
        std::unique_lock held(lock);
        return changed.wait_for(held, seconds, [this] { return stopped; });
    }
};

namespace {

constexpr std::chrono::seconds store_patience{10};
constexpr std::chrono::milliseconds end_patience{500};

// As long as torch has this group under this name; that raises if it has none.
void
beat(Beating &beating, const std::string &name, const c10d::ProcessGroup *group, c10d::Store &store,
     const std::string &answer, double interval)
{
    const std::string call = "call";
    std::vector<uint8_t> answered;
    while (!beating.wait(std::chrono::duration<double>(interval)) && c10d::resolve_process_group(name).get() == group) {
        if (store.check({call})) {
            std::vector<uint8_t> called = store.get(call);
            if (called != answered) {
                store.set(answer, called);
                answered = std::move(called);
            }
        }
    }
}

} // namespace
} // namespace fp

struct fp_pulse {
    std::shared_ptr<fp::Beating> beating = std::make_shared<fp::Beating>();
    pid_t process = getpid(); /* a forked one has no such thread */
};

extern "C" {

fp_pulse *
fp_pulse_start(const char *group, const char *prefix, const char *answer, double interval)
{
    return fp::guarded<fp_pulse *>(nullptr, [&] {
        const fp::WithoutGil released; /* a store may need its server's thread */
        const c10::intrusive_ptr<c10d::ProcessGroup> found = c10d::resolve_process_group(group);
        const auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, found->getStore()->clone());
        store->setTimeout(fp::store_patience);
        auto pulse = std::make_unique<fp_pulse>();
        std::thread([beating = pulse->beating, name = std::string(group), raw = found.get(), store,
                     key = std::string(answer), interval] {
            try {
                fp::beat(*beating, name, raw, *store, key, interval);
            }
            catch (...) { /* the group or its store is gone: those who wait see that themselves */
            }
            const std::lock_guard held(beating->lock);
            beating->ended = true;
            beating->changed.notify_all();
        }).detach();
        return pulse.release();
    });
}

// The thread is waited for, but not where a store does not answer it.
void
fp_pulse_stop(fp_pulse *pulse)
{
    if (pulse->process == getpid()) {
        const fp::WithoutGil released;
        fp::Beating &beating = *pulse->beating;
        std::unique_lock held(beating.lock);
        beating.stopped = true;
        beating.changed.notify_all();
        beating.changed.wait_for(held, fp::end_patience, [&] { return beating.ended; });
    }
    delete pulse;
}

} // extern "C"
