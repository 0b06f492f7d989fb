// simulated_device.cpp -- an accelerator that is not there: torch's PrivateUse1 device "sim" in host memory.
//
// Each stream is a queue of kernels, copies and waits for events, and each group has a stream for its collectives. Which
// streams are late is chosen: what is put to a late one happens only when an event behind it, or the host, asks for it; what
// is put to another one at once. So of two streams with no event between them the one that is late is as late as a device
// may be, and the other as early: a wait that is missing shows in the values. "others": all are late but the one that
// computes; "computing": that one is, and no other. A copy to pinned memory reaches the host when that waits for it, however
// early its stream is. Freed memory is overwritten in the order of the stream that it was allocated on, and used again first.
#include "sim/collectives.hpp"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(simulated_device, m)
{
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> host) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Collectives>(std::move(host));
    });
    m.def("set_time_out", [](const c10::intrusive_ptr<c10d::Backend> &backend, double seconds) {
        backend->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds)));
    });
    m.def("memory", [] {
        const Locked locked(mutex());
        free_what_is_aside();
        return std::make_tuple(bytes_now, bytes_peak, pinned_now);
    });
    m.def("allocations", [] {
        const Locked locked(mutex());
        return allocations;
    });
    m.def("reset_peak", [] {
        const Locked locked(mutex());
        free_what_is_aside();
        bytes_peak = bytes_now;
    });
    const auto sets = [&m](const char *name, auto *variable) {
        m.def(name, [variable](std::remove_pointer_t<decltype(variable)> value) {
            const Locked locked(mutex());
            *variable = value;
        });
    };
    sets("fail_after", &fail_after);
    m.def("fail", [] { // for good: it does nothing that it was given
        const Locked locked(mutex());
        has_failed = true;
        for (auto &[stream, queue] : queues()) {
            queue.waiting.clear();
            queue.landing.clear();
            queue.ended = queue.done = queue.put;
        }
    });
    sets("capturing", &capturing);
    sets("room", &room);
    sets("registers", &registers);
    m.def("put_off", [] {
        const Locked locked(mutex());
        return put_off;
    });
    m.def("end_first", [] { std::atexit([] { ended = true; }); });
    m.def("compute_for", [](double seconds) { // the current stream
        const Locked locked(mutex());
        put(current, [seconds, end = std::optional<std::chrono::steady_clock::time_point>()]() mutable {
            const auto now = std::chrono::steady_clock::now();
            end = end.value_or(
                now + std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
            if (polled && now < *end) {
                throw NotYet{};
            }
            std::this_thread::sleep_until(*end);
        });
    });
    m.def("behind", [] {
        const Locked locked(mutex());
        return queues()[computing].waiting.size();
    });
    m.def("operations", [] {
        const Locked locked(mutex());
        return std::exchange(operations, {}); // since the last call
    });
    m.def("waits", [] {
        const Locked locked(mutex());
        return waits;
    });
    m.def(
        "synchronize",
        [](bool with_gil) {
            const Locked locked(mutex());
            free_what_is_aside();
            waits++;
            keeps_gil = with_gil;
            const std::unique_ptr<bool, void (*)(bool *)> till_the_end(&keeps_gil, [](bool *keeps) { *keeps = false; });
            force_all();
            check_unused();
        },
        pybind11::arg("with_gil") = false);
    m.def("of_ranks", [](uintptr_t rank, int size) {
        rank_of_thread = reinterpret_cast<int (*)()>(rank);
        devices = size;
    });
    m.def("count", [] { return devices; });
    m.def("here", [] { return device_here().index(); });
    m.def("captured_beside", [](uintptr_t asked) { is_relaxed = reinterpret_cast<int (*)()>(asked); });
    m.def(
        "late",
        [](const std::string &which, int64_t stream) {
            const Locked locked(mutex());
            force_all();
            TORCH_CHECK_VALUE(which == "others" || which == "computing", "expected others or computing, got ", which);
            computes_late = which == "computing";
            computing = stream;
        },
        pybind11::arg("which"), pybind11::arg("computing") = 0);
}
