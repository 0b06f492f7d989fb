// streams.hpp -- streams and events: what is put off, in order.
#pragma once

#include "../boxed.hpp"
#include "lock.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>

namespace {

struct Queue {
    std::deque<std::function<void()>> waiting;
    std::deque<std::pair<int64_t, std::function<void()>>> landing; // on the host: what was put as the so-many-th
    int64_t put = 0, done = 0;                                     // what is being done included
    std::atomic<int64_t> ended = 0; // without it: for threads that only ask, while another one waits for the device
};
auto &queues = for_good<OfRank<std::map<int64_t, Queue>>>(); // by the stream's id; 0 is the default stream
int64_t last_stream = 0, put_off = 0, waits = 0;
int64_t computing = 0; // the stream that computes
bool computes_late = false;
int (*is_relaxed)() = nullptr; // while another thread captures a graph: whether CUDA allows this one to ask the device
thread_local int64_t current = 0;

bool
is_late(int64_t stream)
{
    return (stream == computing) == computes_late;
}

void
check_relaxed()
{
    TORCH_CHECK(is_relaxed == nullptr || is_relaxed() != 0, "operation not permitted when stream is capturing");
}

void finish_collectives();

struct NotYet {}; // a collective that other ranks have not come to, where nobody waits for it
thread_local bool polled = false;
struct Polling {
    Polling()
    {
        polled = true;
    }
    Polling(const Polling &) = delete;
    Polling &operator=(const Polling &) = delete;
    ~Polling()
    {
        polled = false;
    }
};

void
run(int64_t stream, int64_t until)
{
    Queue &queue = queues()[stream];
    if (queue.done < until && !queue.waiting.empty() && is_late(stream)) {
        finish_collectives();
    }
    while (queue.done < until && !queue.waiting.empty()) {
        auto work = std::move(queue.waiting.front());
        queue.waiting.pop_front();
        queue.done++;
        try {
            as_a_kernel(work);
        }
        catch (const NotYet &) {
            queue.done--;
            queue.waiting.push_front(work);
            throw;
        }
        queue.ended = queue.done;
    }
}

constexpr int SELDOM = 2; // asking that often makes nothing earlier

// Time passes for a stream, while somebody asks again and again.
void
proceed(int64_t stream, int64_t until)
{
    const Polling polling;
    try {
        run(stream, until);
    }
    catch (const NotYet &) {
    }
}

// Copies to the host have reached it.
void
land(int64_t stream, int64_t until)
{
    Queue &queue = queues()[stream];
    while (!queue.landing.empty() && queue.landing.front().first <= until) {
        const auto work = std::move(queue.landing.front().second);
        queue.landing.pop_front();
        as_a_kernel(work);
    }
}

// Whoever waits for a stream sees all that it has done.
void
force(int64_t stream, int64_t until)
{
    run(stream, until);
    land(stream, until);
}

void
force_all()
{
    for (auto &[stream, queue] : queues()) {
        force(stream, queue.put);
    }
}

void
put(int64_t stream, std::function<void()> work)
{
    Queue &queue = queues()[stream];
    queue.waiting.push_back(std::move(work));
    queue.put++;
    if (is_late(stream)) {
        put_off++;
    }
    else {
        run(stream, queue.put);
    }
}

// The host waits for a stream.
void
wait_for_stream(int64_t stream)
{
    waits++;
    force(stream, queues()[stream].put);
}

void keep_for_stream(const c10::DataPtr &data, const c10::Stream &stream);

bool capturing = false; // as if, into a graph

struct Recorded {
    int64_t stream, until;
    int asked = 0;
    bool captured = capturing;
    const std::atomic<int64_t> *ended = &queues()[stream].ended;
};

// CUDA refuses to wait for what was recorded in another capture, or in none. Before 2.13 torch does not tell of captures here.
void
check_captured(bool recorded)
{
    const bool told = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13;
    TORCH_CHECK(!told || recorded == capturing, "a wait for what was recorded in another capture");
}

bool has_failed = false; // no stream can wait for an event any more

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static c10::Stream stream_of(int64_t id)
    {
        return c10::Stream(c10::Stream::UNSAFE, device_here(), id);
    }
    c10::DeviceType type() const override
    {
        return SIM;
    }
    c10::Device exchangeDevice(c10::Device) const override
    {
        return device_here();
    }
    c10::Device getDevice() const override
    {
        return device_here();
    }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return static_cast<c10::DeviceIndex>(devices);
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
        const Locked locked(mutex());
        return stream_of(++last_stream);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        return stream_of(std::exchange(current, stream.id()));
    }
    void record(void **event, const c10::Stream &stream, c10::DeviceIndex, c10::EventFlag) const override
    {
        const Locked locked(mutex());
        delete static_cast<Recorded *>(*event);
        *event = new Recorded{stream.id(), queues()[stream.id()].put};
    }
    void block(void *event, const c10::Stream &stream) const override
    {
        const Locked locked(mutex());
        TORCH_CHECK(!has_failed, "the device has failed");
        if (event == nullptr) {
            return;
        }
        const Recorded of = *static_cast<Recorded *>(event);
        check_captured(of.captured);
        if (of.stream != stream.id()) {
            put(stream.id(), [of] { force(of.stream, of.until); });
        }
    }
    bool queryEvent(void *event) const override
    {
        auto *of = static_cast<Recorded *>(event);
        check_relaxed();
        const Tried locked(mutex(), std::try_to_lock);
        if (!locked) {
            return of == nullptr || *of->ended >= of->until;
        }
        if (of != nullptr && ++of->asked > SELDOM) {
            proceed(of->stream, of->until);
        }
        const bool is_done = of == nullptr || queues()[of->stream].done >= of->until;
        if (of != nullptr && is_done) { // the host knows, as if it had waited
            land(of->stream, of->until);
        }
        return is_done;
    }
    void synchronizeEvent(void *event) const override
    {
        check_relaxed();
        const Locked locked(mutex());
        waits++;
        if (const auto *of = static_cast<Recorded *>(event)) {
            check_captured(of->captured);
            force(of->stream, of->until);
        }
    }
    void destroyEvent(void *event, c10::DeviceIndex) const noexcept override
    {
        check_not_ended();
        delete static_cast<Recorded *>(event);
    }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13 // before that torch does not ask
    bool isStreamCapturing(const c10::Stream &) const override
    {
        return capturing;
    }
#endif
    bool queryStream(const c10::Stream &stream) const override
    {
        const Tried locked(mutex(), std::try_to_lock);
        return locked && queues()[stream.id()].waiting.empty();
    }
    void synchronizeStream(const c10::Stream &stream) const override
    {
        const Locked locked(mutex());
        wait_for_stream(stream.id());
    }
    void synchronizeDevice(c10::DeviceIndex) const override
    {
        const Locked locked(mutex());
        waits++;
        force_all();
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override
    {
        keep_for_stream(data, stream);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace
