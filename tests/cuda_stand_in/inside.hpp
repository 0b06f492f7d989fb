// inside.hpp -- what the files of the stand-in for libcudart share. All of it is used with the mutex, but for what says otherwise.
#pragma once

#include "stand_in.hpp"

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace stand_in {

using Work = std::function<void()>;
using Clock = std::map<struct Stream *, uint64_t>; // how much of each stream comes before

// Threads of streams outlive static variables.
template <class Value>
Value &
for_good()
{
    return *new Value;
}

// A graph that is captured.
struct Capture {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    std::thread::id thread; // that has begun it
    Stream *origin;
    std::vector<Work> nodes;
    Clock issued;                      // on each stream
    std::map<Stream *, Clock> reached; // what comes before the next node of each stream
    bool invalid = false;
};

struct Stream {
    int device;
    bool is_default;
    std::deque<Work> waiting;
    uint64_t put = 0, done = 0;
    std::shared_ptr<Capture> capture;
    bool started = false; // its thread
};

extern std::mutex &mutex;
extern std::condition_variable &changed;
extern std::vector<Stream *> &streams;
extern std::set<Capture *> &captures; // under way
extern thread_local int current_device;
extern thread_local cudaStreamCaptureMode thread_mode;

int setting(const char *name, int otherwise); // of the environment; without the mutex

Stream *stream_of(cudaStream_t handle);
void put(Stream *stream, Work work);
void merge(Clock &into, const Clock &other);

// Keep an error for cudaGetLastError(), and return it. Without the mutex.
cudaError_t told(cudaError_t error);

// What may not be called while a graph is captured, but by threads that have said that they know: an error then.
cudaError_t unsafe(const char *what);

// The process ends: streams do nothing more. Without the mutex.
void end_streams();

// The host waits for all that was put to a stream so far. Without the mutex.
cudaError_t wait_for(Stream *stream, const char *what);
void has_waited(const char *what); // without the mutex
void wait_for_device();            // of this thread, as a free does; without the mutex

} // namespace stand_in

#define LOCKED const std::lock_guard lock(stand_in::mutex)
