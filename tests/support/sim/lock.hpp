// lock.hpp -- the lock of all that the device has, and the GIL.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

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

// The rank of this thread, where ranks are threads of one process (tests/simulation); null: the process is a rank.
int (*rank_of_thread)() = nullptr;

int devices = 1; // one for each rank of this process

// The device of this thread's rank.
c10::Device
device_here()
{
    const int rank = rank_of_thread == nullptr ? 0 : rank_of_thread();
    return c10::Device(SIM, static_cast<c10::DeviceIndex>(rank < 0 ? 0 : rank));
}

// A value of this thread's rank, which has a device for itself. Only threads of simulated ranks add values, one at a time.
template <class Value> class OfRank {
  public:
    OfRank()
    {
        (void)values_[0];
    }
    Value &operator()()
    {
        return values_[rank_of_thread == nullptr ? 0 : rank_of_thread()];
    }

  private:
    std::map<int, Value> values_;
};

auto &mutex = for_good<OfRank<std::recursive_mutex>>(); // of all that follows

// Whoever has it may wait for gloo, so nobody waits for it with the GIL.
struct Locked {
    explicit Locked(std::recursive_mutex &)
    {
        if (!mutex().try_lock()) {
            without_gil([] { mutex().lock(); });
        }
    }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;
    ~Locked()
    {
        mutex().unlock();
    }
};

// For those who only ask: if it is not there, another thread waits for the device.
using Tried = std::unique_lock<std::recursive_mutex>;

} // namespace
