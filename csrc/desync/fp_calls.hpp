// desync/fp_calls.hpp -- ranks call each other through a store, and those who do not answer can be told. In the store: "call",
// the last one; "answer of R", the last one that rank R has answered. flatparam/fsdp/desync/trace.py calls and answers so, too.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tensor/fp_begun.hpp"

namespace fp {

// What is in a store at a key, or at name and each rank; empty, or left out: nothing is.
std::string value_at(c10d::Store &store, const std::string &key);
std::map<int, std::string> values_at(c10d::Store &store, const std::string &name, int size);

// A call of all ranks.
struct Call {
    std::string text; // no other call has it
    bool is_mine;
    std::map<int, std::string> before; // the answers that there were
    Clock::time_point since = Clock::now(), looked = since;

    // Whether ranks have had so many seconds to answer. To be asked now and then: if the thread, or the store, was held up for
    // more than 2 s since it was asked last, so may be the answers, and the seconds begin anew.
    bool has_waited(double patience);
};

// The calls of one rank, and its answers. By one thread at a time.
class Calls {
  public:
    Calls(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

    bool is_called(); // whether the last call is new
    void answer();    // it, then

    Call call();
    Call call_after(const std::string &last); // or that of another rank, which has come after `last`
    Call call_or_join(double recent);         // or the last one, if this rank has answered it in the last seconds
    std::string last();                       // empty: nobody has called

    // The other ranks that have not answered, also those that never answer any.
    std::vector<int> silent(const Call &call);

  private:
    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_, size_;
    int calls_ = 0; // by this rank
    std::string answered_;
    Clock::time_point answered_since_;

    std::map<int, std::string> answers();
    std::string new_text();
};

} // namespace fp
