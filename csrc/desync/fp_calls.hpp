// desync/fp_calls.hpp -- ranks call each other through a store. A rank that does not answer a call is stopped, or has ended.
// The health board (fp_board.hpp) and the watch over a device (fp_watch.cpp) call all ranks, each in its own group.
//
//   key in the store   value
//   "call"             the text of the last call, by whichever rank
//   "calls"            how many numbers Calls::next() has given
//   "answer of R"      the text of the last call that rank R has answered; it shows that R lived then. The board sets another
//                      text first, which shows that R answers calls
//
// flatparam/fsdp/desync/trace.py uses "call" and "answer of R", and counts its calls itself. Ranks are numbered as in the group
// that has the store. The functions wait for the store: the GIL must not be held. They throw the exceptions of the store.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tensor/fp_begun.hpp"

namespace fp {

// The value of a key; empty: the key is not set. It does not wait until a rank sets the key.
std::string value_at(c10d::Store &store, const std::string &key);
// The values of the keys name + "R" by rank R, 0 <= R < size; a key that is not set is left out.
std::map<int, std::string> values_at(c10d::Store &store, const std::string &name, int size);

// One call of all ranks, and this rank's wait for the answers.
struct Call {
    std::string text;                                       // unique: the calling rank, the number of the call
    bool is_mine;                                           // this rank has made the call
    std::map<int, std::string> before;                      // each rank's answer when the wait began
    Clock::time_point since = Clock::now(), looked = since; // the begin of the wait; the last has_waited()

    // Whether ranks have had so many seconds to answer. Call it at least every 2 s: a longer pause means that this thread, or
    // the store, was held up. The answers may be late for the same reason, so the wait begins anew.
    bool has_waited(double patience);
};

// The calls of one rank, and its answers. One thread at a time may use it.
class Calls {
  public:
    Calls(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

    bool is_called(); // whether this rank has not answered the last call yet
    void answer();    // answer the last call, unless this rank has answered it

    // A number above all numbers and calls of all ranks so far, and the number of a call in its text or an answer; 0: none.
    int64_t next();
    static int64_t number_of(const std::string &text);

    void ring(); // call without a wait, unless a later call is under way: all ranks that live answer one of the two
    Call call(); // call all ranks
    // Two ways not to call while another rank does: then this rank joins that call, and waits for the same answers.
    Call call_after(const std::string &last); // call if `last` is still the last call; else join the later one
    Call call_or_join(double recent); // join the last call if this rank answered it within `recent` seconds; else call
    std::string last();               // the text of the last call; empty: no rank has called

    // The other ranks whose answer has not changed since the wait began, and is not this call. Ranks that have never answered
    // a call are among them; Call::before has no answer of theirs.
    std::vector<int> silent(const Call &call);

  private:
    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_, size_;
    std::string answered_;             // the last call that this rank has answered
    Clock::time_point answered_since_; // the time of that answer

    std::map<int, std::string> answers();
    std::string new_text();
};

} // namespace fp
