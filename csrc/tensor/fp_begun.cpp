// tensor/fp_begun.cpp -- see fp_begun.hpp. Neither a device nor a destructor of torch is called under the lock: on a stuck
// device it may not return.
#include "tensor/fp_begun.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tensor/fp_streams.hpp"

namespace fp {

// A wait of a stream for other ranks: between the two events it does nothing else.
struct Wait {
    enum State { coming, put, failed }; // coming: `after` is not recorded yet, and the host itself may wait; put: it is

    Wait(const c10::Stream &on, Clock::time_point since)
        : stream(on), begun(since), before(on.device_type()), after(on.device_type())
    {
    }

    bool has_ended() const
    {
        return state == failed || (state == put && has_come(after));
    }

    const c10::Stream stream;
    Clock::time_point begun; // when the collective began
    c10::Event before, after;
    std::atomic<State> state = coming;
};

namespace {

using Waits = std::deque<std::shared_ptr<Wait>>;
using Works = std::vector<std::pair<c10::weak_intrusive_ptr<c10d::Work>, Clock::time_point>>;

} // namespace

// The pending collectives of one group.
struct Begun {
    const void *world;
    int connecting = 0; // first collectives that make the communicator
    Clock::time_point connecting_since;
    bool captured = false; // a CUDA graph has collectives; its replays are not seen, so it always has work
    Works works;           // for which no stream waits yet, and when each began
    std::vector<std::pair<c10::Stream, Waits>> streams; // the waits of each stream, in its order

    Waits &waits_of(const c10::Stream &stream)
    {
        auto found =
            std::find_if(streams.begin(), streams.end(), [&](const auto &each) { return each.first == stream; });
        return found == streams.end() ? streams.emplace_back(stream, Waits()).second : found->second;
    }
};

namespace {

// All noted groups. Never destroyed.
struct Groups {
    std::mutex lock;                                                         // of all that follows
    std::multimap<const c10d::ProcessGroup *, std::shared_ptr<Begun>> begun; // one for each PendingCollectives
    std::atomic<size_t> n = 0;                                               // the size of begun
};
Groups &groups = *new Groups;

// call(begun) under the lock for each PendingCollectives of group; most groups have none.
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
        call(*each->second);
    }
}

// Whether one of these has a collective that has not ended. false if the device has failed: its next user raises that.
bool
has_work(const std::vector<std::shared_ptr<Begun>> &all)
{
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    Waits last;
    {
        const std::lock_guard held(groups.lock);
        for (const auto &begun : all) {
            if (begun->connecting > 0 || begun->captured) {
                return true;
            }
            for (const auto &[work, since] : begun->works) {
                if (auto there = work.lock()) {
                    works.push_back(std::move(there));
                }
            }
            for (const auto &[stream, waits] : begun->streams) {
                last.insert(last.end(), waits.end() - (waits.empty() ? 0 : 1), waits.end());
            }
        }
    }
    try {
        return !std::all_of(last.begin(), last.end(), [](const auto &wait) { return wait->has_ended(); }) ||
               !std::all_of(works.begin(), works.end(), [](const auto &work) { return work->isCompleted(); });
    }
    catch (const std::exception &) {
        return false;
    }
}

} // namespace

FirstCollective::FirstCollective(const c10d::ProcessGroup &group, bool is_first) : group_(is_first ? &group : nullptr)
{
    for_each_begun(group_, [](Begun &begun) {
        if (begun.connecting++ == 0) {
            begun.connecting_since = Clock::now();
        }
    });
}

FirstCollective::~FirstCollective()
{
    for_each_begun(group_, [](Begun &begun) { begun.connecting = std::max(0, begun.connecting - 1); });
}

void
note_begun(const c10d::ProcessGroup &group, const c10::intrusive_ptr<c10d::Work> &work)
{
    Works gone;
    for_each_begun(&group, [&](Begun &begun) {
        auto &works = begun.works;
        const auto there =
            std::partition(works.begin(), works.end(), [](const auto &each) { return !each.first.expired(); });
        std::move(there, works.end(), std::back_inserter(gone));
        works.erase(there, works.end());
        works.emplace_back(work, Clock::now());
    });
}

WaitScope::WaitScope(const c10d::ProcessGroup &group, const c10d::Work *work, const c10::Device &device)
{
    if (groups.n == 0 || device.is_cpu()) {
        return;
    }
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    const bool captured = is_captured(device);
    Clock::time_point since = Clock::now();
    Works gone;
    std::shared_ptr<Wait> oldest;
    bool is_watched = false;
    for_each_begun(&group, [&](Begun &begun) {
        const auto found = std::find_if(begun.works.begin(), begun.works.end(),
                                        [&](const auto &each) { return each.first._unsafe_get_target() == work; });
        if (found != begun.works.end()) {
            since = found->second;
            gone.push_back(std::move(*found));
            begun.works.erase(found);
        }
        begun.captured = begun.captured || captured;
        const Waits &waits = begun.waits_of(stream);
        oldest = waits.empty() ? nullptr : waits.front();
        is_watched = true;
    });
    if (!is_watched || captured) {
        return;
    }
    if (oldest && oldest->has_ended()) {
        for_each_begun(&group, [&](Begun &begun) {
            Waits &waits = begun.waits_of(stream);
            if (!waits.empty() && waits.front() == oldest) {
                waits.pop_front();
            }
        });
    }
    const bool is_free =
        oldest && oldest.use_count() == 1; /* no other thread queries its events, so they can be reused */
    const auto wait = is_free ? std::move(oldest) : std::make_shared<Wait>(stream, since);
    wait->begun = since;
    wait->state = Wait::coming;
    wait->before.record(stream);
    for_each_begun(&group, [&](Begun &begun) { begun.waits_of(stream).push_back(wait); });
    wait_ = wait;
}

void
WaitScope::end()
{
    if (wait_) {
        wait_->after.record(wait_->stream);
        wait_->state = Wait::put;
    }
}

WaitScope::~WaitScope()
{
    if (wait_ && wait_->state == Wait::coming) {
        wait_->state = Wait::failed;
    }
}

PendingCollectives::PendingCollectives(const c10d::ProcessGroup *group, const void *world)
    : begun_(std::make_shared<Begun>())
{
    begun_->world = world;
    const std::lock_guard held(groups.lock);
    groups.begun.emplace(group, begun_);
    groups.n++;
}

PendingCollectives::~PendingCollectives()
{
    const std::lock_guard held(groups.lock);
    groups.n -= std::erase_if(groups.begun, [this](const auto &each) { return each.second == begun_; });
}

bool
PendingCollectives::has_work()
{
    return fp::has_work({begun_});
}

bool
PendingCollectives::world_has_work()
{
    std::vector<std::shared_ptr<Begun>> all;
    {
        const std::lock_guard held(groups.lock);
        for (const auto &[group, begun] : groups.begun) {
            if (begun->world == begun_->world) {
                all.push_back(begun);
            }
        }
    }
    return fp::has_work(all);
}

std::optional<c10::Device>
PendingCollectives::device()
{
    const std::lock_guard held(groups.lock);
    return begun_->streams.empty() ? std::nullopt : std::optional(begun_->streams.front().first.device());
}

// Events are queried only for waits that are old enough: without our kernels a query spoils a capture of another thread.
bool
PendingCollectives::has_waited(double patience)
{
    const auto is_long_ago = [now = Clock::now(), patience](const Clock::time_point &since) {
        return seconds(now - since) >= patience;
    };
    std::vector<Waits> streams;
    {
        const std::lock_guard held(groups.lock);
        if (begun_->connecting > 0 && is_long_ago(begun_->connecting_since)) {
            return true;
        }
        for (const auto &[stream, waits] : begun_->streams) {
            if (std::any_of(waits.begin(), waits.end(), [&](const auto &wait) { return is_long_ago(wait->begun); })) {
                streams.push_back(waits);
            }
        }
    }
    try {
        return std::any_of(streams.begin(), streams.end(), [&](const Waits &waits) {
            const auto first =
                std::find_if(waits.begin(), waits.end(), [](const auto &wait) { return !wait->has_ended(); });
            return first != waits.end() && is_long_ago((*first)->begun) && has_come((*first)->before);
        });
    }
    catch (const std::exception &) { /* as above */
        return false;
    }
}

} // namespace fp
