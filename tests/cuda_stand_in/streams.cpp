// streams.cpp -- streams and events: each stream has a thread that does what is put to it, in order.
//
// So the host runs ahead of it as of a GPU. STAND_IN_DELAY_US has the thread rest for up to so many microseconds before some of
// its work, which shows where a wait is missing. What CUDA forbids while a graph is captured is refused here, too.
#include "inside.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>

namespace stand_in {

std::mutex &mutex = for_good<std::mutex>();
std::condition_variable &changed = for_good<std::condition_variable>();
std::vector<Stream *> &streams = for_good<std::vector<Stream *>>();
std::set<Capture *> &captures = for_good<std::set<Capture *>>();
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

namespace {

std::atomic<int64_t> waits = 0; // of the host for a device
bool ended = false;
int busy = 0; // threads

void
serve(Stream *stream)
{
    static const int delay = setting("STAND_IN_DELAY_US", 0);
    std::minstd_rand random(std::random_device{}());
    for (;;) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !stream->waiting.empty() && !ended; });
        busy++;
        Work work = std::move(stream->waiting.front());
        stream->waiting.pop_front();
        lock.unlock();
        if (delay > 0 && random() % 4 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % unsigned(delay)));
        }
        try {
            work();
        }
        catch (const std::exception &error) {
            std::fprintf(stderr, "stand-in for CUDA: work of a stream has failed: %s\n", error.what());
            std::_Exit(70);
        }
        work = nullptr; /* frees what it keeps, for which torch may ask the device */
        lock.lock();
        busy--;
        stream->done++;
        changed.notify_all();
    }
}

Stream *
default_stream(int device)
{
    static auto &all = for_good<std::map<int, Stream *>>();
    Stream *&stream = all[device];
    if (stream == nullptr) {
        stream = new Stream{device, true};
        streams.push_back(stream);
    }
    return stream;
}

} // namespace

void
end_streams()
{
    std::unique_lock lock(mutex);
    ended = true;
    changed.wait_for(lock, std::chrono::seconds(1), [] { return busy == 0; }); // a collective may wait for ever
}

Stream *
stream_of(cudaStream_t handle)
{
    const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
    return is_default ? default_stream(current_device) : reinterpret_cast<Stream *>(handle);
}

void
put(Stream *stream, Work work)
{
    if (Capture *capture = stream->capture.get()) {
        capture->nodes.push_back(std::move(work));
        capture->reached[stream][stream] = ++capture->issued[stream];
        return;
    }
    if (!stream->started) {
        stream->started = true;
        std::thread(serve, stream).detach();
    }
    stream->waiting.push_back(std::move(work));
    stream->put++;
    changed.notify_all();
}

void
merge(Clock &into, const Clock &other)
{
    for (const auto &[stream, count] : other) {
        into[stream] = std::max(into[stream], count);
    }
}

cudaError_t
unsafe(const char *what)
{
    if (thread_mode == cudaStreamCaptureModeRelaxed) {
        return cudaSuccess;
    }
    for (Capture *capture : captures) {
        const bool mine = capture->thread == std::this_thread::get_id();
        const bool others_matter = thread_mode == cudaStreamCaptureModeGlobal;
        if (mine ? capture->mode != cudaStreamCaptureModeRelaxed
                 : others_matter && capture->mode == cudaStreamCaptureModeGlobal) {
            capture->invalid = true;
            std::fprintf(stderr, "stand-in for CUDA: %s while a graph is captured\n", what);
            return told(cudaErrorStreamCaptureUnsupported);
        }
    }
    return cudaSuccess;
}

void
has_waited(const char *what)
{
    waits++;
    if (std::getenv("STAND_IN_TRACE") != nullptr) {
        std::fprintf(stderr, "stand-in for CUDA: the host waits: %s\n", what);
    }
}

cudaError_t
wait_for(Stream *stream, const char *what)
{
    has_waited(what);
    std::unique_lock lock(mutex);
    if (stream->capture) {
        stream->capture->invalid = true;
        return told(cudaErrorStreamCaptureUnsupported);
    }
    if (const cudaError_t error = unsafe(what)) {
        return error;
    }
    const uint64_t until = stream->put;
    changed.wait(lock, [&] { return stream->done >= until; });
    return cudaSuccess;
}

void
wait_for_device()
{
    std::unique_lock lock(mutex);
    std::map<Stream *, uint64_t> until;
    for (Stream *stream : streams) {
        if (stream->device == current_device) {
            until[stream] = stream->put;
        }
    }
    changed.wait(lock, [&] {
        return std::all_of(until.begin(), until.end(), [](const auto &one) { return one.first->done >= one.second; });
    });
}

struct Event {
    Stream *stream = nullptr; // null: never recorded
    uint64_t until = 0;
    std::shared_ptr<Capture> capture; // recorded in it
    Clock reached;
    std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

} // namespace stand_in

using namespace stand_in;

void
stand_in_put(cudaStream_t stream, Work work)
{
    LOCKED;
    put(stream_of(stream), std::move(work));
}

bool
stand_in_is_capturing(cudaStream_t stream)
{
    LOCKED;
    return stream_of(stream)->capture != nullptr;
}

bool
stand_in_is_safe(const char *what)
{
    LOCKED;
    return unsafe(what) == cudaSuccess;
}

extern "C" {

int64_t
stand_in_waits()
{
    return waits;
}

cudaError_t
cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int)
{
    LOCKED;
    auto *made = new Stream{current_device, false};
    streams.push_back(made);
    *stream = reinterpret_cast<cudaStream_t>(made);
    return cudaSuccess;
}

cudaError_t
cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t
cudaStreamGetPriority(cudaStream_t, int *priority)
{
    *priority = 0;
    return cudaSuccess;
}

cudaError_t
cudaStreamQuery(cudaStream_t handle)
{
    LOCKED;
    Stream *stream = stream_of(handle);
    if (stream->capture) {
        stream->capture->invalid = true;
        return told(cudaErrorStreamCaptureUnsupported);
    }
    if (const cudaError_t error = unsafe("a query of a stream")) {
        return error;
    }
    return stream->done >= stream->put ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t
cudaStreamSynchronize(cudaStream_t handle)
{
    Stream *stream;
    {
        LOCKED;
        stream = stream_of(handle);
    }
    return wait_for(stream, "for a stream");
}

cudaError_t
cudaDeviceSynchronize()
{
    has_waited("for the device");
    {
        LOCKED;
        if (const cudaError_t error = unsafe("a wait for the device")) {
            return error;
        }
    }
    wait_for_device();
    return cudaSuccess;
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}

cudaError_t
cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    delete reinterpret_cast<Event *>(event);
    return cudaSuccess;
}

cudaError_t
cudaEventRecord(cudaEvent_t handle, cudaStream_t of)
{
    LOCKED;
    auto *event = reinterpret_cast<Event *>(handle);
    Stream *stream = stream_of(of);
    *event = {};
    event->stream = stream;
    event->time = std::make_shared<std::chrono::steady_clock::time_point>();
    if (stream->capture) {
        event->capture = stream->capture;
        event->reached = stream->capture->reached[stream];
        return cudaSuccess;
    }
    put(stream, [time = event->time] { *time = std::chrono::steady_clock::now(); });
    event->until = stream->put;
    return cudaSuccess;
}

cudaError_t
cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned)
{
    return cudaEventRecord(event, stream);
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned)
{
    LOCKED;
    auto *event = reinterpret_cast<Event *>(of);
    Stream *stream = stream_of(handle);
    if (event->stream == nullptr) {
        return cudaSuccess;
    }
    if (event->capture) {
        if (captures.count(event->capture.get()) == 0) {
            return told(cudaErrorStreamCaptureIsolation); // of a graph that was captured before
        }
        if (stream->is_default || (stream->capture && stream->capture != event->capture)) {
            event->capture->invalid = true;
            return told(stream->is_default ? cudaErrorStreamCaptureImplicit : cudaErrorStreamCaptureMerge);
        }
        stream->capture = event->capture;
        merge(event->capture->reached[stream], event->reached);
        return cudaSuccess;
    }
    if (stream->capture) {
        stream->capture->invalid = true;
        std::fprintf(stderr, "stand-in for CUDA: a wait for what was not captured\n");
        return told(cudaErrorStreamCaptureIsolation);
    }
    if (event->stream != stream) {
        put(stream, [on = event->stream, until = event->until] {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return on->done >= until; });
        });
    }
    return cudaSuccess;
}

cudaError_t
cudaEventQuery(cudaEvent_t handle)
{
    LOCKED;
    auto *event = reinterpret_cast<Event *>(handle);
    if (event->capture) {
        event->capture->invalid = true;
        return told(cudaErrorCapturedEvent);
    }
    if (const cudaError_t error = unsafe("a query of an event")) {
        return error;
    }
    return event->stream == nullptr || event->stream->done >= event->until ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t handle)
{
    has_waited("for an event");
    std::unique_lock lock(mutex);
    auto *event = reinterpret_cast<Event *>(handle);
    if (event->capture) {
        event->capture->invalid = true;
        return told(cudaErrorCapturedEvent);
    }
    if (const cudaError_t error = unsafe("a wait for an event")) {
        return error;
    }
    Stream *stream = event->stream;
    const uint64_t until = event->until;
    changed.wait(lock, [&] { return stream == nullptr || stream->done >= until; });
    return cudaSuccess;
}

cudaError_t
cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    LOCKED;
    const auto *a = reinterpret_cast<Event *>(from), *b = reinterpret_cast<Event *>(to);
    if (!a->time || !b->time) {
        return told(cudaErrorInvalidResourceHandle);
    }
    *ms = std::chrono::duration<float, std::milli>(*b->time - *a->time).count();
    return cudaSuccess;
}

cudaError_t
cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    LOCKED;
    put(stream_of(stream), [=] { function(data); });
    return cudaSuccess;
}

cudaError_t
cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned)
{
    LOCKED;
    put(stream_of(stream), [=] { function(stream, cudaSuccess, data); });
    return cudaSuccess;
}

} // extern "C"
