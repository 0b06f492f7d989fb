// desync/fp_watch.cpp -- see fp_watch.h. The keys in the store, below the prefix of the watch; trace.py writes all but two:
//
//   "broken"          a rank has declared the group broken
//   "pending"         the index of the event that ranks ask about
//   INDEX             the report (core/fp_report.h) of the rank that asks first about the event of this index
//   INDEX/kept        set if an exception has kept that rank from the event
//   "trouble"         the reports of ranks that have raised and live on, each but the first after the character 0x1e
//   "raised by R"     the last report that rank R of the world has written to "trouble"
//   "told"            the report in "trouble" for which this watch has ended the wait
//   "absent"          "[ranks]": the ranks of the world that this watch has found absent
#include "desync/fp_watch.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

extern "C" {
#include "core/fp_report.h"
}
#include "tensor/fp_begun.hpp"
#include "desync/fp_board.hpp"
#include "tensor/fp_launch.hpp"
#include "tensor/fp_streams.hpp"

namespace fp {
namespace {

constexpr double store_may_be_away = 1.0; // seconds after which a store that is out of reach counts as gone
constexpr double before_time_out = 4.0;   // seconds before the time-out of the group, whose message does not name ranks
constexpr double troubled_for =
    2.0; // seconds that the device waits before another rank's exception is a reason to abort
constexpr double answers_come = 1.5; // seconds for answers to a call: each rank looks for calls every interval

class Watch {
  public:
    Watch(Board &board, const fp_trace *trace, const fp_watched &watched, const c10d::ProcessGroup &group)
        : board_(board), trace_(trace), ranks_(watched.ranks, watched.ranks + watched.n),
          store_(best_store_of(group, watched.prefix)), pending_(&group, &board),
          me_(ranks_[static_cast<size_t>(group.getRank())]),
          calls_(store_, group.getRank(), static_cast<int>(watched.n))
    {
    }

    // One look: whether there is a reason to abort. time_out: of the group's collectives, in seconds.
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
                /* Answer only while a collective is pending: the others ask whether this rank comes to theirs. On a grid this
                 * rank may wait in another group, for a rank that waits for it here: a collective of any group counts. */
                if (calls_.is_called() && pending_.world_has_work()) {
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

    // Whether a collective is pending: an abort then takes the values of it from the device.
    bool has_work()
    {
        return pending_.has_work();
    }

  private:
    bool has_lost(double waited)
    {
        (void)board_.look(waited, true);
        const auto said = board_.said();
        return std::any_of(ranks_.begin(), ranks_.end(),
                           [&](int64_t rank) { return said.count(static_cast<int>(rank)) != 0; });
    }

    // Whether this rank has another event at the index about which a rank asks; or whether this rank has begun that event, and
    // an exception has kept the asking rank from it.
    bool differs()
    {
        const std::string pending = value_at(*store_, "pending");
        uint64_t event;
        int new_pass;
        if (pending.empty() || !fp_trace_at(trace_, std::stoll(pending), &event, &new_pass) ||
            event == FP_TRACE_MISSED) {
            return false;
        }
        if (!value_at(*store_, pending + "/kept").empty() && fp_trace_has_begun(trace_, std::stoll(pending))) {
            return true;
        }
        const std::string said = value_at(*store_, pending);
        fp_report asked;
        return fp_report_read(said.c_str(), &asked) != 0 && asked.event != event * 2 + static_cast<uint64_t>(new_pass);
    }

    // Whether another rank has raised and lives on, while the device has waited for 2 s. Not if this rank has raised as often
    // in that step: then all may have caught the same, and the other is only slower. Sets "told".
    bool is_told_of_trouble()
    {
        if (!pending_.has_waited(troubled_for)) {
            return false;
        }
        std::istringstream troubles(value_at(*store_, "trouble"));
        for (std::string said; std::getline(troubles, said, '\x1e');) {
            fp_report trouble, mine;
            if (fp_report_read(said.c_str(), &trouble) == 0 || trouble.rank == me_) {
                continue;
            }
            const std::string raised = value_at(*store_, "raised by " + std::to_string(me_));
            if (fp_report_read(raised.c_str(), &mine) == 0 ||
                std::tie(mine.step, mine.event) < std::tie(trouble.step, trouble.event)) {
                (void)store_->compareSet("told", "", said);
                return true;
            }
        }
        return false;
    }

    // Make the device of the waits this thread's current one. A new thread has device 0, and its first call there would take
    // memory of that device.
    void be_on_device()
    {
        const auto device = on_device_ ? std::nullopt : pending_.device();
        if (device) {
            on_device_.emplace(*device);
            spared_.emplace(*device);
        }
    }

    // Whether ranks do not come to the collective that this rank waits for. A moment before the time-out one of the ranks that
    // wait calls all; a rank with a pending collective answers. Sets "absent".
    bool misses(double time_out)
    {
        const double long_time = std::max(time_out - before_time_out, time_out / 2);
        if (std::isinf(time_out) || time_out - long_time < answers_come + 1.0 || !pending_.has_waited(long_time)) {
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
        if (absent.empty() || !pending_.has_waited(long_time)) { /* the ranks have come meanwhile */
            return false;
        }
        (void)store_->compareSet("absent", "", "[" + absent + "]");
        return true;
    }

    Board &board_;
    const fp_trace *trace_;
    const std::vector<int64_t> ranks_; // the world ranks of the group
    const c10::intrusive_ptr<c10d::Store> store_;
    std::optional<c10::DeviceGuard> on_device_;
    std::optional<SparedCaptures> spared_;
    PendingCollectives pending_;
    const int64_t me_;                            // the world rank of this process
    int64_t count_ = -1;                          // events of trace_ at the last look
    Clock::time_point idle_since_;                // the time of the look that found the last new event
    std::optional<Clock::time_point> away_since_; // the first look at which the store was out of reach
    bool is_gone_ = false; // the store is gone, and is not asked again: torch prints a message for each failed call
    Calls calls_;
    std::optional<Call> call_; // the call of misses() that waits for answers
};

// Whether the environment tells torch not to end a collective of NCCL at its time-out: then ranks may come at any time later.
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

// The time-out of the group's collectives in seconds; users may change it at any time. Infinite: torch has no such group, or
// its backend tells no time-out.
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
fp_let_go(const char *group)
{
    return fp::guarded(-1, [&] {
        c10::intrusive_ptr<c10d::ProcessGroup> held;
        try {
            held = fp::unlocked([&] { return c10d::resolve_process_group(group); });
        }
        catch (const c10::Error &) {
            return; /* it was not made to its end, and has no collectives */
        }
        std::thread([held = std::move(held)]() mutable {
            auto pause = std::chrono::milliseconds(20);
            while (held.use_count() > 1) { /* the user may keep a reference for ever */
                std::this_thread::sleep_for(pause);
                pause = std::min(2 * pause, std::chrono::milliseconds(1000));
            }
            held.reset();
        }).detach();
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
        if (const auto group = registered.group()) { /* not kept: users may destroy the group while this looks */
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
