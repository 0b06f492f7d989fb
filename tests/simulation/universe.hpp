// simulation/universe.hpp -- a Universe is all that the ranks of a run share. Its lock is a std::mutex and each wait one of a
// std::condition_variable, so seams.c decides who goes on, and when; the files of the world know nothing of threads.
//
// If ranks are processes, the Universe is in common memory (heap.h). What is put into it is made under its lock, and refers to
// no memory of one process: a work has the tensors and closures of its rank in Work::own, which other processes let be.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "seams.h"

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;
using Tensors = std::vector<at::Tensor>;
using c10d::OpType;

class Work;

// What one rank brings to a collective.
struct Part {
    Tensors inputs, outputs; // see do_collective() for the order
    c10::intrusive_ptr<Work> work;
};

// Ranks meet in a collective if these are equal: the number of their calls, the type, the root.
using Key = std::tuple<uint64_t, OpType, int>;

struct Collective {
    c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
    std::map<int, Part> parts; // by the rank in the group
};

struct Message {
    at::Tensor tensor; // to be sent, or written
    c10::intrusive_ptr<Work> work;
};

using Channel = std::tuple<int, int, int>; // source, or -1 for any; destination, tag

struct Group {
    std::condition_variable changed; // with the lock of the universe
    int size = 0;
    bool is_given_up = false;          // a rank did not wait until all had come
    std::map<int, int> world_ranks;    // of the members that have come, by the rank in the group
    std::vector<uint64_t> counts;      // collectives that each rank has begun
    std::map<Key, Collective> pending; // that a rank has begun, and not all have come to
    std::map<Channel, std::deque<Message>> sends, receives;
    std::map<uint64_t, c10::intrusive_ptr<Work>> works;          // that have not ended, in the order of their begin
    uint64_t begun = 0;                                          // works
    Clock::time_point first_deadline = Clock::time_point::max(); // of pending works, or an earlier time
    std::set<int> closed;                                        // ranks whose connections are closed
};

// What happens to a rank at a point: of the seams, see seams.h; of the disk, from FILL on, see disk.h.
enum Kind { KILL, FREEZE, INTERRUPT_WAIT, INTERRUPT, STARVE, FILL, TEAR };

struct Fault {
    int kind, rank;
    int64_t point;       // of its rank; it strikes there, or at the next one where it can
    int64_t nanoseconds; // of FREEZE
    int64_t struck = -1; // virtual time
};

struct Universe {
    std::mutex lock;
    std::condition_variable changed;
    std::map<std::string, Bytes> values; // of the store
    std::map<std::string, std::deque<Bytes>> queues;
    int64_t calls = 0; // to the store
    int64_t bytes = 0; // that went to the store and came from it
    bool store_is_gone = false;
    std::map<std::string, std::shared_ptr<Group>> groups;
    int64_t longest = 0; // nanoseconds until a rank sees that a collective has ended
    int host = -1;       // the rank whose process has the store; -1: none
    std::vector<Fault> faults;
    std::map<int, int64_t> disk_points; // so far, by rank
};

std::shared_ptr<Universe> &universe = *new std::shared_ptr<Universe>; // a process that ends leaves it to the others

// The GIL must not be held by a thread that hands over at its own wish: the others would only wait for it.
void
pause()
{
    if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
        fp_sim_pause();
    }
}

// Keys of all ranks are alike, though names of groups are unique: see NAMES in ranks.py.
std::string
common(const std::string &key)
{
    std::string found;
    for (size_t i = 0; i < key.size(); i++) {
        if (key[i] == '\x01') {
            while (key[++i] != '\x01') {
            }
            continue;
        }
        found += key[i];
    }
    return found;
}

Bytes
as_bytes(const std::string &text)
{
    return {text.begin(), text.end()};
}

} // namespace
