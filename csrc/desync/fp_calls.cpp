// desync/fp_calls.cpp -- see fp_calls.hpp.
#include "desync/fp_calls.hpp"

#include <sstream>
#include <utility>

namespace fp {

std::string
value_at(c10d::Store &store, const std::string &key)
{
    const std::string nothing = "-";
    std::string said =
        store.compareSet(key, nothing, nothing); /* changes nothing, and unlike get() does not wait for the key */
    return said == nothing ? "" : said;
}

std::map<int, std::string>
values_at(c10d::Store &store, const std::string &name, int size)
{
    std::vector<std::string> keys;
    for (int rank = 0; rank < size; rank++) {
        keys.push_back(name + std::to_string(rank));
    }
    std::map<int, std::string> found;
    if (store.check(keys)) {
        const auto all = store.multiGet(keys);
        for (int rank = 0; rank < size; rank++) {
            const auto &value = all[static_cast<size_t>(rank)];
            found[rank] = {value.begin(), value.end()};
        }
        return found;
    }
    for (int rank = 0; rank < size; rank++) {
        if (store.check({keys[static_cast<size_t>(rank)]})) {
            found[rank] = store.get_to_str(keys[static_cast<size_t>(rank)]);
        }
    }
    return found;
}

bool
Call::has_waited(double patience)
{
    const Clock::time_point now = Clock::now();
    if (seconds(now - std::exchange(looked, now)) > 2.0) {
        since = now;
    }
    return seconds(now - since) >= patience;
}

Calls::Calls(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size)
{
}

bool
Calls::is_called()
{
    return last() != answered_;
}

void
Calls::answer()
{
    const std::string called = last();
    if (called != answered_) {
        store_->set("answer of " + std::to_string(rank_), called);
        answered_ = called;
        answered_since_ = Clock::now();
    }
}

int64_t
Calls::next()
{
    return store_->add("calls", 1);
}

int64_t
Calls::number_of(const std::string &text)
{
    std::istringstream fields(text);
    int64_t rank, number = 0;
    return fields >> rank >> number ? number : 0;
}

void
Calls::ring()
{
    const std::string mine = new_text();
    for (std::string now = last(); number_of(now) < number_of(mine);) {
        now = store_->compareSet("call", now, mine);
    }
}

Call
Calls::call()
{
    Call made{.text = new_text(), .is_mine = true, .before = answers()};
    store_->set("call", made.text);
    return made;
}

Call
Calls::call_after(const std::string &last)
{
    Call made{.text = new_text(), .is_mine = true, .before = answers()};
    const std::string found = store_->compareSet("call", last, made.text);
    made.is_mine = found == made.text;
    made.text = found;
    return made;
}

Call
Calls::call_or_join(double recent)
{
    const std::string called = last();
    if (called == answered_ && seconds(Clock::now() - answered_since_) < recent) {
        return {.text = called, .is_mine = false, .before = answers()};
    }
    return call_after(called);
}

std::string
Calls::last()
{
    return value_at(*store_, "call");
}

std::vector<int>
Calls::silent(const Call &call)
{
    const auto of = [](const std::map<int, std::string> &answers, int rank) {
        const auto found = answers.find(rank);
        return found == answers.end() ? "" : found->second;
    };
    const auto now = answers();
    std::vector<int> found;
    for (int rank = 0; rank < size_; rank++) {
        const std::string answer = of(now, rank);
        if (rank != rank_ && answer != call.text && answer == of(call.before, rank)) {
            found.push_back(rank);
        }
    }
    return found;
}

std::map<int, std::string>
Calls::answers()
{
    return values_at(*store_, "answer of ", size_);
}

std::string
Calls::new_text()
{
    return std::to_string(rank_) + " " + std::to_string(next());
}

} // namespace fp
