// desync/fp_calls.hpp -- ranks call each other through a store. A rank that does not answer a call is stopped, or has ended.
//
// Keys in the store: "call" is the text of the last call, by whichever rank; "answer of R" is the text of the last call that
// rank R has answered. flatparam/fsdp/desync/trace.py uses the same keys. Ranks are those of the group that has the store.
// The functions wait for the store: do not hold the GIL. They throw what the store throws.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tensor/fp_begun.hpp"

namespace fp {

// The value of a key, without a wait for it; empty: the key is not set. And the values of the keys name + rank by rank, for
// 0 <= rank < size; a key that is not set is left out.
std::string value_at(c10d::Store &store, const std::string &key);
std::map<int, std::string> values_at(c10d::Store &store, const std::string &name, int size);

// One call of all ranks, as this rank waits for the answers.
struct Call {
    std::string text;                  // unique: the calling rank, its count of calls, the time
    bool is_mine;                      // this rank has made it
    std::map<int, std::string> before; // each rank's answer when the wait began
    Clock::time_point since = Clock::now(), looked = since;

    // Whether ranks have had so many seconds to answer. Ask at least every 2 s: a longer pause means that this thread, or the
    // store, was held up. The answers may be late for the same reason, so the seconds are counted anew.
    bool has_waited(double patience);
};

// The calls of one rank, and its answers. One thread at a time may use it.
class Calls {
  public:
    Calls(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

    bool is_called(); // whether this rank has not answered the last call
    void answer();    // answer the last call, if this rank has not

    Call call();
    Call
    call_after(const std::string &last); // call if `last` is still the last call; else join the call that came after
    Call call_or_join(double recent); // join the last call if this rank answered it within `recent` seconds; else call
    std::string last();               // the text of the last call; empty: no rank has called

    // The other ranks that have answered neither this call nor a later one. Ranks that never answer any call are among them;
    // Call::before tells them apart.
    std::vector<int> silent(const Call &call);

  private:
    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_, size_;
    int calls_ = 0;        // made by this rank
    std::string answered_; // the last call that this rank has answered
    Clock::time_point answered_since_;

    std::map<int, std::string> answers();
    std::string new_text();
};

} // namespace fp
