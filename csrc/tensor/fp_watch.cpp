// tensor/fp_watch.cpp -- see fp_watch.h.
#include "tensor/fp_watch.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <set>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "tensor/fp_board.hpp"

namespace fp {
namespace {

constexpr double store_may_be_away = 1.0; // seconds

// Of groups that are watched, the streams that have waited for a collective. It lives as long as the process.
struct Waiting {
    std::mutex lock;
    std::multimap<const c10d::ProcessGroup *, std::vector<c10::Stream>> streams;
};
Waiting &waiting = *new Waiting;

class Watch {
  public:
    Watch(Board &board, const fp_trace *trace, std::set<int> ranks, c10::intrusive_ptr<c10d::Store> store,
          const c10d::ProcessGroup *group)
        : board_(board), trace_(trace), ranks_(std::move(ranks)), store_(std::move(store))
    {
        const std::lock_guard held(waiting.lock);
        streams_ = waiting.streams.emplace(group, std::vector<c10::Stream>());
    }
    Watch(const Watch &) = delete;
    Watch &operator=(const Watch &) = delete;
    ~Watch()
    {
        const std::lock_guard held(waiting.lock);
        waiting.streams.erase(streams_);
    }

    // Whether there is a reason to abort.
    bool finds()
    {
        const Clock::time_point now = Clock::now();
        if (fp_trace_count(trace_) != count_) {
            count_ = fp_trace_count(trace_);
            idle_since_ = now;
        }
        bool lost;
        try {
            if (store_->check({"broken"}) || differs()) {
                return true;
            }
            lost = has_lost(seconds(now - idle_since_));
            away_since_.reset();
        }
        catch (const std::exception &) {
            away_since_ = away_since_.value_or(now);
            lost = seconds(now - *away_since_) > store_may_be_away;
        }
        return lost && has_work();
    }

  private:
    bool has_lost(double waited)
    {
        (void)board_.look(waited, true);
        for (const auto &[rank, why] : board_.said()) {
            if (ranks_.count(rank) != 0) {
                return true;
            }
        }
        return false;
    }

    // Whether the device may wait for the others. One that has ended may have done its part of all that was begun.
    bool has_work()
    {
        std::vector<c10::Stream> streams;
        {
            const std::lock_guard held(waiting.lock);
            streams = streams_->second;
        }
        return streams.empty() || std::any_of(streams.begin(), streams.end(), [](const c10::Stream &stream) {
                   return !c10::impl::VirtualGuardImpl(stream.device_type()).queryStream(stream);
               });
    }

    // Whether this rank has come to another collective than a rank that asks about it.
    bool differs()
    {
        const std::string pending = store_->check({"pending"}) ? store_->get_to_str("pending") : "";
        uint64_t event, asked;
        int new_pass;
        if (pending.empty() || !fp_trace_at(trace_, std::stoll(pending), &event, &new_pass) ||
            !store_->check({pending})) {
            return false;
        }
        const std::string post = store_->get_to_str(pending); /* [rank, step, event, ... */
        return std::sscanf(post.c_str(), "[%*d, %*d, %" SCNu64, &asked) == 1 &&
               asked != event * 2 + static_cast<uint64_t>(new_pass);
    }

    Board &board_;
    const fp_trace *trace_;
    std::set<int> ranks_;
    c10::intrusive_ptr<c10d::Store> store_;
    decltype(Waiting::streams)::iterator streams_;
    int64_t count_ = -1;
    Clock::time_point idle_since_;
    std::optional<Clock::time_point> away_since_;
};

} // namespace

void
note_waiting(const c10d::ProcessGroup &group, const c10::Device &device)
{
    const std::lock_guard held(waiting.lock);
    const auto [first, last] = waiting.streams.equal_range(&group);
    for (auto each = first; each != last; ++each) {
        const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
        std::vector<c10::Stream> &streams = each->second;
        if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
            streams.push_back(stream);
        }
    }
}

} // namespace fp

extern "C" int
fp_watch(fp_board *board, fp_trace *trace, const fp_watched *watched)
{
    return fp::guarded(-1, [&] {
        const fp::WithoutGil released;
        const std::string name = watched->group;
        const c10::Device device(watched->device);
        c10::intrusive_ptr<c10d::ProcessGroup> found = c10d::resolve_process_group(name);
        const c10d::ProcessGroup *const group = found.get();
        const auto store = fp::store_below(watched->prefix, found->getStore(), true);
        found.reset(); /* it may be destroyed meanwhile */
        fp::Watch watch(board->board, trace, {watched->ranks, watched->ranks + watched->n}, store, group);
        while (!board->ending->wait(watched->interval)) {
            if (!fp::registered(name, group)) {
                return 0;
            }
            if (watch.finds()) {
                fp_trace_set_broken(trace, 1);
                if (const auto there = fp::registered(name, group)) {
                    there->getBackend(device.type())->abort();
                }
                return 1;
            }
        }
        return 0;
    });
}
