// tensor/fp_board.hpp -- what ranks tell each other, for the C++ side.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tensor/fp_board.h"
#include "tensor/fp_bridge.hpp"

namespace fp {

using Clock = std::chrono::steady_clock;

inline double
seconds(Clock::duration duration)
{
    return std::chrono::duration<double>(duration).count();
}

// Said once: that threads shall end, or that one has.
class Ending {
  public:
    // For this long at most; whether it is said.
    bool wait(double seconds);
    void say();

  private:
    std::mutex lock_;
    std::condition_variable changed_;
    bool said_ = false;
};

// What this process knows of the others. Any thread may call it, without the GIL.
class Board {
  public:
    Board(c10::intrusive_ptr<c10d::Store> store, int rank, int size, double beat);
    Board(const Board &) = delete;
    Board &operator=(const Board &) = delete;

    void enter();
    int64_t post(const std::string &text);
    int64_t number(const std::string &key);
    bool look(double waited, bool processes);
    bool call();
    void miss_silent();
    std::map<int, std::string> said();    // why ranks have ended
    std::map<int, std::string> entered(); // where ranks are

  private:
    struct Place {
        long process;
        long long began;
    };

    int64_t number_at(const std::string &key);
    int64_t post_of(int rank, const std::string &text);
    bool read_posts();
    void miss_processes();
    void miss_answers(double waited);
    std::map<int, std::string> values(const char *name);
    std::vector<int> silent(const std::map<int, std::string> &before);
    std::string new_call();

    std::mutex lock_; // of what follows, and of a call's way through the store
    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_, size_;
    const double beat_;
    std::map<int, std::string> said_;
    int64_t read_ = 0; // posts so far
    int calls_ = 0;
    std::optional<std::pair<Clock::time_point, std::map<int, std::string>>> asked_; // when, and the answers before
    std::map<int, std::string> failed_before_;                                      // answers before call()
    std::string other_call_;                                                        // of another rank,
    Clock::time_point other_since_;                                                 // and when it was seen first
    std::optional<std::map<int, Place>> places_;                                    // the processes on this machine
};

// What is below prefix in store; over a connection of its own, which no other thread's wait delays, if the store has such.
c10::intrusive_ptr<c10d::Store> store_below(const std::string &prefix, const c10::intrusive_ptr<c10d::Store> &store,
                                            bool own_connection);

// This group, if torch has it under this name; else null.
c10::intrusive_ptr<c10d::ProcessGroup> registered(const std::string &name, const c10d::ProcessGroup *group);

} // namespace fp

struct fp_board {
    fp::Board board;
    std::string name, prefix; // of the group, in its store
    double beat;
    std::shared_ptr<fp::Ending> ending = std::make_shared<fp::Ending>(); // threads may outlive the board
    std::shared_ptr<fp::Ending> answering = nullptr;                     // of the thread that answers; or null
    pid_t process = getpid();                                            // a forked one has no such thread
};
