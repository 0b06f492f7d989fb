// tensor/fp_watch.cpp -- see fp_watch.h.
#include "tensor/fp_watch.hpp"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "tensor/fp_board.hpp"
#include "tensor/fp_streams.hpp"

namespace fp {
namespace {

constexpr double store_may_be_away = 1.0; // seconds

// What a group that is watched has begun.
struct Begun {
    int connecting = 0;
    bool captured = false; // a CUDA graph has collectives, and nobody is told when it is replayed
    std::vector<c10::weak_intrusive_ptr<c10d::Work>> works;  // no stream waits for them
    std::vector<std::pair<c10::Stream, c10::Event>> streams; // that wait for others, and after the last of those
};

// It lives as long as the process.
struct Groups {
    std::mutex lock;
    std::multimap<const c10d::ProcessGroup *, Begun> begun; // one for each watch
    std::atomic<size_t> n = 0;                              // of them
};
Groups &groups = *new Groups;

// Of each watch of group, of which there is none for most.
template <class Call>
void
for_each_begun(const c10d::ProcessGroup *group, Call &&call)
{
    if (groups.n == 0) {
        return;
    }
    const std::lock_guard held(groups.lock);
    const auto [first, last] = groups.begun.equal_range(group);
    for (auto each = first; each != last; ++each) {
        call(each->second);
    }
}

class Watch {
  public:
    Watch(Board &board, const fp_trace *trace, std::set<int> ranks, c10::intrusive_ptr<c10d::Store> store,
          const c10d::ProcessGroup *group)
        : board_(board), trace_(trace), ranks_(std::move(ranks)), store_(std::move(store))
    {
        const std::lock_guard held(groups.lock);
        begun_ = groups.begun.emplace(std::piecewise_construct, std::forward_as_tuple(group), std::tuple<>());
        groups.n++;
    }
    Watch(const Watch &) = delete;
    Watch &operator=(const Watch &) = delete;
    ~Watch()
    {
        const std::lock_guard held(groups.lock);
        groups.begun.erase(begun_);
        groups.n--;
    }

    // Whether there is a reason to abort.
    bool finds()
    {
        const Clock::time_point now = Clock::now();
        if (fp_trace_count(trace_) != count_) {
            count_ = fp_trace_count(trace_);
            idle_since_ = now;
        }
        bool lost = true;
        try {
            if (!is_away(now)) {
                if (store_->check({"broken"}) || differs()) {
                    return true;
                }
                lost = has_lost(seconds(now - idle_since_));
                away_since_.reset();
            }
        }
        catch (const std::exception &) {
            away_since_ = away_since_.value_or(now);
            lost = false;
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

    // Whether the store is out of reach for so long that it is asked no more: torch prints a message each time.
    bool is_away(Clock::time_point now) const
    {
        return away_since_ && seconds(now - *away_since_) > store_may_be_away;
    }

    // Whether this rank waits for others. One that has ended may have done its part of all that was begun.
    bool has_work()
    {
        std::vector<c10::intrusive_ptr<c10d::Work>> works; // may go without the lock
        try {
            const std::lock_guard held(groups.lock);
            const Begun &begun = begun_->second;
            for (const auto &work : begun.works) {
                if (auto there = work.lock()) {
                    works.push_back(std::move(there));
                }
            }
            return begun.connecting > 0 || begun.captured ||
                   !std::all_of(begun.streams.begin(), begun.streams.end(),
                                [](const auto &each) { return each.second.query(); }) ||
                   !std::all_of(works.begin(), works.end(), [](const auto &work) { return work->isCompleted(); });
        }
        catch (const std::exception &) { /* the device has failed: whoever uses it next says so */
            return false;
        }
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
    decltype(Groups::begun)::iterator begun_;
    int64_t count_ = -1;
    Clock::time_point idle_since_;
    std::optional<Clock::time_point> away_since_;
};

} // namespace

Connecting::Connecting(const c10d::ProcessGroup &group, bool is_first) : group_(is_first ? &group : nullptr)
{
    for_each_begun(group_, [](Begun &begun) { begun.connecting++; });
}

Connecting::~Connecting()
{
    for_each_begun(group_, [](Begun &begun) { begun.connecting = std::max(0, begun.connecting - 1); });
}

void
note_begun(const c10d::ProcessGroup &group, const c10::intrusive_ptr<c10d::Work> &work)
{
    for_each_begun(&group, [&](Begun &begun) {
        auto &works = begun.works;
        works.erase(std::remove_if(works.begin(), works.end(), [](const auto &each) { return each.expired(); }),
                    works.end());
        works.emplace_back(work);
    });
}

void
note_waiting(const c10d::ProcessGroup &group, const c10d::Work *work, const c10::Device &device)
{
    for_each_begun(&group, [&](Begun &begun) {
        auto &works = begun.works;
        works.erase(std::remove_if(works.begin(), works.end(),
                                   [&](const auto &each) { return each._unsafe_get_target() == work; }),
                    works.end());
        if (is_captured(device)) {
            begun.captured = true;
            return;
        }
        const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
        auto found = std::find_if(begun.streams.begin(), begun.streams.end(),
                                  [&](const auto &each) { return each.first == stream; });
        if (found == begun.streams.end()) {
            found = begun.streams.emplace(found, stream, c10::Event(device.type()));
        }
        found->second.record(stream);
    });
}

} // namespace fp

extern "C" {

int
fp_watch_note(const char *group, const char *device)
{
    return fp::guarded(-1,
                       [&] { fp::note_waiting(*c10d::resolve_process_group(group), nullptr, c10::Device(device)); });
}

int
fp_watch(fp_board *board, fp_trace *trace, const fp_watched *watched)
{
    return fp::guarded(-1, [&] {
        const fp::WithoutGil released;
        const c10::Device device(watched->device);
        const fp::Registered registered(watched->group);
        std::optional<fp::Watch> watch;
        if (const auto group = registered.group()) { /* not kept: it may be destroyed meanwhile */
            auto store = fp::store_of(*group, watched->prefix, true);
            watch.emplace(board->board, trace, std::set<int>(watched->ranks, watched->ranks + watched->n),
                          store ? store : fp::store_of(*group, watched->prefix, false), group.get());
        }
        while (watch && !board->ending->wait(watched->interval) && registered.group()) {
            if (watch->finds()) {
                fp_trace_break(trace);
                if (const auto group = registered.group()) {
                    group->getBackend(device.type())->abort();
                }
                return 1;
            }
        }
        return 0;
    });
}

} // extern "C"
