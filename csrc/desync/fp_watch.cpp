// desync/fp_watch.cpp -- see fp_watch.h.
#include "desync/fp_watch.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "tensor/fp_begun.hpp"
#include "desync/fp_board.hpp"
#include "tensor/fp_launch.hpp"
#include "tensor/fp_streams.hpp"

namespace fp {
namespace {

constexpr double store_may_be_away = 1.0; // seconds
constexpr double before_time_out = 4.0;   // seconds before the group's own time-out, to say more than it does
constexpr double troubled_for = 2.0;      // seconds before a device that waits for a rank is told of its exception
constexpr double answers_come = 1.5;      // seconds after a call: each rank looks for one as seldom as this one

class Watch {
  public:
    Watch(Board &board, const fp_trace *trace, const fp_watched &watched, const c10d::ProcessGroup &group)
        : board_(board), trace_(trace), ranks_(watched.ranks, watched.ranks + watched.n),
          store_(best_store_of(group, watched.prefix)), kept_(&group),
          me_(ranks_[static_cast<size_t>(group.getRank())]),
          calls_(store_, group.getRank(), static_cast<int>(watched.n))
    {
    }

    // Whether there is a reason to abort. time_out: of the group's collectives, in seconds.
    bool finds(double time_out)
    {
        const Clock::time_point now = Clock::now();
        if (fp_trace_count(trace_) != count_) {
            count_ = fp_trace_count(trace_);
            idle_since_ = now;
        }
        be_on_device();
        if (is_gone_) {
            return has_work();
        }
        bool lost = false;
        try {
            if (store_->check({"broken"}) || differs() || is_told_of_trouble()) {
                return true;
            }
            lost = has_lost(seconds(now - idle_since_));
            if (!lost) {
                /* others may wait for this rank's work; on a grid it may wait in another group, for one who misses it */
                if (calls_.is_called() && PendingCollectives::any_has_work()) {
                    calls_.answer();
                }
                lost = misses(time_out);
            }
            away_since_.reset();
        }
        catch (const std::exception &) {
            away_since_ = away_since_.value_or(now);
            is_gone_ = lost = seconds(now - *away_since_) > store_may_be_away;
        }
        return lost && has_work();
    }

    // Whether an abort takes values from something that waits for them, or will.
    bool has_work()
    {
        return kept_.has_work();
    }

  private:
    bool has_lost(double waited)
    {
        (void)board_.look(waited, true);
        const auto said = board_.said();
        return std::any_of(ranks_.begin(), ranks_.end(),
                           [&](int64_t rank) { return said.count(static_cast<int>(rank)) != 0; });
    }

    // Whether this rank has come to another collective than a rank that asks about it, or has begun one that an exception has
    // kept that rank from.
    bool differs()
    {
        const std::string pending = value_at(*store_, "pending");
        uint64_t event, asked;
        int new_pass;
        if (pending.empty() || !fp_trace_at(trace_, std::stoll(pending), &event, &new_pass) ||
            event == FP_TRACE_MISSED) {
            return false;
        }
        if (!value_at(*store_, pending + "/kept").empty() && fp_trace_has_begun(trace_, std::stoll(pending))) {
            return true;
        }
        const std::string post = value_at(*store_, pending); /* [rank, step, event, ... */
        return std::sscanf(post.c_str(), "[%*d, %*d, %" SCNu64, &asked) == 1 &&
               asked != event * 2 + static_cast<uint64_t>(new_pass);
    }

    // Whether an exception has ended a pass of another rank, which lives on and has begun nothing since, and the device waits in
    // that pass, or in one before it; then "told" says which exception.
    bool is_told_of_trouble()
    {
        const std::string said = value_at(*store_, "trouble"); /* [rank, step, text] */
        int64_t rank, step;
        if (std::sscanf(said.c_str(), "[%" SCNd64 ", %" SCNd64, &rank, &step) != 2 || rank == me_ ||
            fp_trace_passes(trace_) > step || !kept_.has_waited(troubled_for)) {
            return false;
        }
        (void)store_->compareSet("told", "", said);
        return true;
    }

    // This thread may be the first to use the device that is its current one by chance: that would take memory there.
    void be_on_device()
    {
        const auto device = on_device_ ? std::nullopt : kept_.device();
        if (device) {
            on_device_.emplace(*device);
            spared_.emplace(*device);
        }
    }

    // Whether some come to no collective that this rank waits for; then it says who. A moment before the time-out one of the
    // ranks that wait calls all of them, and who has work answers.
    bool misses(double time_out)
    {
        const double long_time = std::max(time_out - before_time_out, time_out / 2);
        if (std::isinf(time_out) || time_out - long_time < answers_come + 1.0 || !kept_.has_waited(long_time)) {
            call_.reset();
            return false;
        }
        if (!call_) {
            call_.emplace(calls_.call_or_join(answers_come));
        }
        if (!call_->has_waited(answers_come)) {
            return false;
        }
        std::string absent;
        for (const int i : calls_.silent(*call_)) {
            absent += (absent.empty() ? "" : ", ") + std::to_string(ranks_[static_cast<size_t>(i)]);
        }
        if (absent.empty() || !kept_.has_waited(long_time)) { /* they have come meanwhile */
            return false;
        }
        (void)store_->compareSet("absent", "", "[" + absent + "]");
        return true;
    }

    Board &board_;
    const fp_trace *trace_;
    const std::vector<int64_t> ranks_; // of the group, in the world
    const c10::intrusive_ptr<c10d::Store> store_;
    std::optional<c10::DeviceGuard> on_device_;
    std::optional<SparedCaptures> spared_;
    PendingCollectives kept_;
    const int64_t me_; // in the world
    int64_t count_ = -1;
    Clock::time_point idle_since_;
    std::optional<Clock::time_point> away_since_; // the store could not be asked
    bool is_gone_ = false; // nor some time later: it is asked no more, as torch prints a message each time
    Calls calls_;
    std::optional<Call> call_; // by which it goes while it misses some
};

// Whether torch was told not to end what has timed out with NCCL.
bool
goes_on_after_time_out()
{
    for (const char *name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}) {
        const char *value = std::getenv(name);
        if (value != nullptr) {
            return std::string_view(value) == "0";
        }
    }
    return false;
}

// Of the collectives of a group, in seconds. It may be changed at any time. Infinite: there is no such group, or its
// backend does not say.
double
time_out_of(const std::string &group, const c10::Device &device)
{
    try {
        if (const auto options = c10d::resolve_process_group(group)->getBackend(device.type())->getBackendOptions()) {
            return std::chrono::duration<double>(options->timeout).count();
        }
    }
    catch (const std::exception &) {
    }
    return std::numeric_limits<double>::infinity();
}

} // namespace
} // namespace fp

extern "C" {

int
fp_watch_around(const char *group, const char *device, PyObject *wait)
{
    return fp::guarded(-1, [&] {
        std::optional<fp::WaitScope> waiting;
        fp::unlocked([&] { waiting.emplace(*c10d::resolve_process_group(group), nullptr, c10::Device(device)); });
        PyObject *const result = PyObject_CallNoArgs(wait);
        if (result == nullptr) {
            throw python_error();
        }
        Py_DECREF(result);
        fp::unlocked([&] { waiting->end(); });
    });
}

double
fp_time_out(const char *group, const char *name)
{
    return fp::guarded(-1.0, [&] {
        const c10::Device device(name);
        return fp::unlocked([&] { return fp::time_out_of(group, device); });
    });
}

int
fp_wait_device(const char *name)
{
    return fp::guarded(-1, [&] {
        const c10::Device device(name);
        if (!fp::has_streams(device) || fp::is_captured(device)) {
            return;
        }
        const fp::Mark mark = fp::recorded_now(device);
        for (double pause = 0.0001; !fp::has_come(mark.event); pause = std::min(0.01, pause * 1.2)) {
            fp::unlocked([&] { std::this_thread::sleep_for(std::chrono::duration<double>(pause)); });
            if (PyErr_CheckSignals() < 0) {
                throw python_error();
            }
        }
    });
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
            watch.emplace(board->board, trace, *watched, *group);
        }
        while (watch && !board->ending->wait(watched->interval)) {
            if (!registered.group()) {
                break;
            }
            const double time_out = fp::goes_on_after_time_out() ? std::numeric_limits<double>::infinity()
                                                                 : fp::time_out_of(watched->group, device);
            if (watch->finds(time_out)) {
                fp_trace_break(trace, watch->has_work() ? FP_TRACE_LOST : FP_TRACE_BROKEN);
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
