// desync/fp_board.hpp -- the health board for the C++ side; see fp_board.h.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
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

// A flag that is set once and never reset: "threads shall end", or "the thread has ended". Any thread may use it.
class Ending {
  public:
    // Wait until the flag is set, or for so many seconds. Returns whether it is set.
    bool wait(double seconds);
    void say(); // set it

  private:
    std::mutex lock_;
    std::condition_variable changed_;
    bool said_ = false;
};

// The health board without its thread; its functions are those of fp_board.h. Any thread may call them, without the GIL, as
// most of them wait for the store under lock_. They throw the exceptions of the store.
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
    int ended();
    int call(); // the number of the call, from 1; 0: no rank answers calls
    void miss_silent(int call);
    std::map<int, std::string> said();    // from ranks to reasons
    std::map<int, std::string> entered(); // from ranks to places

  private:
    // A process. The system may use its number again, so its start is compared, too.
    struct Place {
        long process;
        long long began; // ticks from the machine's start to the start of the process

        bool has_ended() const;
    };

    int64_t number_at(c10d::Store &store, const std::string &key);
    void set_place(std::string_view end);
    std::map<int, std::string> places();
    bool has_answered(int rank);
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
    double since_ = 0.0;              // seconds since the machine's start: this world began then
    int64_t number_ = 0;              // of this rank's place: later numbers belong to this world
    std::mutex said_lock_;            // protects said_. Not held while the store is asked, so said() returns at once
    std::map<int, std::string> said_; // from ranks to reasons; the first reason of a rank stays
    std::mutex lock_;                 // protects the members below. Held while the store is asked
    c10::intrusive_ptr<c10d::Store> posts_; // the keys of this generation; store_ itself before join()
    int64_t announced_ = 0;                 // posts that this rank knows of
    std::set<int64_t> unread_;              // those of them whose text it has not read
    int64_t appeared_ = 0;                  // the counter "places" when places_ was filled
    Calls calls_;
    std::optional<Call> asked_;     // the call of look() that waits for answers
    std::map<int, Call> made_;      // the calls of call(), by number
    std::string other_call_;        // the last call of another rank. That rank posts which ranks are silent,
    Clock::time_point other_since_; // so this rank makes no call within a beat of it
    std::map<int, Place> places_;   // the processes on this machine, by rank
};

// The keys below prefix in the store of group. own: over a second connection, which the wait of another thread does not delay,
// and on which a call takes 10 s at most; null if this kind of store has no second connection. Throws if group has no store.
c10::intrusive_ptr<c10d::Store> store_of(const c10d::ProcessGroup &group, const std::string &prefix, bool own);

// The keys below prefix in the store of group: over a second connection if there is one, else over the shared one. Throws if
// group has no store.
c10::intrusive_ptr<c10d::Store> best_store_of(const c10d::ProcessGroup &group, const std::string &prefix);

// A process group by the name under which torch registered it. It does not keep the group alive.
class Registered {
  public:
    explicit Registered(const std::string &name); // throws if torch knows no such group

    c10::intrusive_ptr<c10d::ProcessGroup> group() const; // null: it was destroyed. Does not throw

  private:
    std::string name_;
    c10::weak_intrusive_ptr<c10d::ProcessGroup>
        group_; // keeps the address, so a later group of that name is another one
};

} // namespace fp

struct fp_board {
    fp::Board board;
    std::string name, prefix; // arguments of fp_board_new(): the group's name, and the prefix of all keys
    double beat;
    std::shared_ptr<fp::Ending> ending =
        std::make_shared<fp::Ending>(); // tells threads to end; they may outlive the board
    std::shared_ptr<fp::Ending> answering =
        nullptr;              // set when the thread that answers has ended; null: there is no thread
    pid_t process = getpid(); // a forked process has a copy of the board, and no threads
};
