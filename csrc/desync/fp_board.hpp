// desync/fp_board.hpp -- what ranks tell each other, for the C++ side.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "desync/fp_board.h"
#include "tensor/fp_bridge.hpp"
#include "desync/fp_calls.hpp"

namespace fp {

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

    void appear(double since);
    void finish();
    void join(const std::string &generation);
    void enter();
    int64_t post(const std::string &text);
    int64_t number(const std::string &key);
    bool look(double waited, bool processes);
    int call(); // its number; 0: nobody answers calls
    void miss_silent(int call);
    std::map<int, std::string> said();    // why ranks have ended
    std::map<int, std::string> entered(); // where ranks are

  private:
    struct Place {
        long process;
        long long began;
    };

    int64_t number_at(c10d::Store &store, const std::string &key);
    void set_place(std::string_view end);
    std::map<int, std::string> places();
    std::string gone(int rank, const std::string &why);
    int64_t post_of(int rank, const std::string &text);
    bool read_posts();
    void miss_processes();
    void miss_answers(double waited);
    std::vector<int> silent(const Call &call);
    void say(int rank, const std::string &text);
    bool has_said(int rank);

    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_, size_;
    const double beat_;
    double since_ = 0.0;   // when this rank's world, or process, began
    std::mutex said_lock_; // never kept while a store is waited for
    std::map<int, std::string> said_;
    std::mutex lock_;                       // of what follows, and of a call's way through the store
    c10::intrusive_ptr<c10d::Store> posts_; // below the name of this generation, if it has one
    int64_t read_ = 0;                      // posts so far
    int64_t appeared_ = 0;                  // what "places" was when places_ were read
    Calls calls_;
    std::optional<Call> asked_;     // who gives signs of generation
    std::map<int, Call> made_;      // by call()
    std::string other_call_;        // of another rank,
    Clock::time_point other_since_; // and when it was seen first
    std::map<int, Place> places_;   // the processes on this machine
};

// What is below prefix in the store of group. own: over a connection of its own, which no other thread's wait delays; null if
// the store has no such.
c10::intrusive_ptr<c10d::Store> store_of(const c10d::ProcessGroup &group, const std::string &prefix, bool own);

// The same over a connection of its own, or else over that of others.
c10::intrusive_ptr<c10d::Store> best_store_of(const c10d::ProcessGroup &group, const std::string &prefix);

// A group under the name that torch has for it, which may be destroyed meanwhile.
class Registered {
  public:
    explicit Registered(const std::string &name); // throws if there is none

    c10::intrusive_ptr<c10d::ProcessGroup> group() const; // null: it is not there any more

  private:
    std::string name_;
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group_; // no other group gets its address
};

} // namespace fp

struct fp_board {
    fp::Board board;
    std::string name, prefix; // of the group, in its store
    double beat;
    std::shared_ptr<fp::Ending> ending = std::make_shared<fp::Ending>(); // threads may outlive the board
    std::shared_ptr<fp::Ending> answering = nullptr;                     // of the thread that answers; or null
    pid_t process = getpid();                                            // a forked one has no such thread
};
