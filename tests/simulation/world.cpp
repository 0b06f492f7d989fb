// simulation/world.cpp -- the module _simulated_world: a c10d store and a c10d backend for ranks that are threads of one
// process, or processes, and the faults that strike them. test_conformance_simulated.py compares both with TCPStore and gloo.
#include <pybind11/chrono.h>

#include "backend.hpp"
#include "disk.h"
#include "store.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <ATen/CPUGeneratorImpl.h>

namespace {

void
end_process(int rank)
{
    const std::lock_guard held(universe->lock);
    for (const auto &[id, group] : universe->groups) {
        for (const auto &[member, world_rank] : group->world_ranks) {
            if (world_rank == rank) {
                close(*group, member);
            }
        }
    }
    universe->store_is_gone = universe->store_is_gone || rank == universe->host;
    universe->changed.notify_all();
}

// Let the faults of this point strike. While this thread holds the GIL, none can: it would keep the GIL for ever.
void
strike(int rank, int64_t point)
{
    for (Fault &fault : universe->faults) {
        if (fault.rank != rank || fault.kind >= FILL || fault.point > point || fault.struck >= 0 ||
            PyGILState_Check() != 0) {
            continue;
        }
        fault.struck = fp_sim_now();
        switch (fault.kind) {
            case KILL:
                end_process(rank);
                fp_sim_end(rank);
                break;
            case FREEZE:
                fp_sim_freeze(rank, fault.nanoseconds);
                break;
            case INTERRUPT_WAIT:
                fp_sim_interrupt(rank);
                break;
            case INTERRUPT: {
                const PyGILState_STATE state = PyGILState_Ensure();
                const PyThreadState *const mine = PyThreadState_Get();
                const PyThreadState *first = PyInterpreterState_ThreadHead(mine->interp);
                while (first->thread_id != mine->thread_id) {
                    first = PyThreadState_Next(const_cast<PyThreadState *>(first));
                }
                if (first == mine) {
                    (void)PyThreadState_SetAsyncExc(mine->thread_id, PyExc_KeyboardInterrupt);
                }
                else { /* it would go to a thread that this one has made, and that has not begun */
                    fp_sim_interrupt(rank);
                }
                PyGILState_Release(state);
                break;
            }
            default:
                fp_sim_starve(rank);
        }
    }
}

// Let the faults of this point of the disk strike: see disk.h. A write that is torn brings half of its bytes to the disk.
bool
strike_disk(int rank, bool takes_room, int file, const void *data, size_t size)
{
    std::unique_lock held(universe->lock);
    const int64_t point = universe->disk_points[rank]++;
    held.unlock();
    for (Fault &fault : universe->faults) {
        if (fault.rank != rank || fault.kind < FILL || fault.point > point || fault.struck >= 0) {
            continue;
        }
        if (fault.kind == FILL && takes_room) {
            fault.struck = fp_sim_now();
            return false;
        }
        if (fault.kind == TEAR && PyGILState_Check() == 0) {
            fault.struck = fp_sim_now();
            if (file >= 0) {
                (void)!syscall(SYS_write, file, data, size / 2);
            }
            end_process(rank);
            fp_sim_end(rank);
        }
    }
    return true;
}

// The default generator of random numbers, of which a process has one, and each rank should.
struct Randomness {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
};

std::map<int, Randomness> randomness; // of the ranks that do not have the baton

void
change_randomness(int from, int to)
{
    auto *generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    randomness[from] = {generator->engine(), generator->next_float_normal_sample(),
                        generator->next_double_normal_sample()};
    const auto found = randomness.find(to);
    const Randomness &next = found == randomness.end() ? randomness.at(-1) : found->second; /* all begin alike */
    generator->set_engine(next.engine);
    generator->set_next_float_normal_sample(next.next_float);
    generator->set_next_double_normal_sample(next.next_double);
}

} // namespace

PYBIND11_MODULE(_simulated_world, module)
{
    namespace py = pybind11;
    module.def(
        "reset",
        [](int64_t longest, int host, const std::vector<std::tuple<int, int, int64_t, int64_t>> &faults) {
            if (fp_sim_is_forked() != 0) {
                fp_sim_allocate(1);
            }
            universe = std::make_shared<Universe>();
            universe->longest = longest;
            universe->host = host;
            for (const auto &[kind, rank, point, nanoseconds] : faults) {
                universe->faults.push_back({.kind = kind, .rank = rank, .point = point, .nanoseconds = nanoseconds});
            }
            fp_sim_at_points(&strike);
            fp_sim_at_disk(&strike_disk);
            if (fp_sim_is_forked() != 0) {
                fp_sim_allocate(0);
                fp_sim_at_death(&end_process);
                return;
            }
            randomness.clear();
            fp_sim_at_change(change_randomness);
        },
        "Begin another run. longest: virtual nanoseconds until a rank sees that a collective has ended; host: the rank "
        "whose process has the store, or -1; faults: (kind, rank, point, nanoseconds) of each.");
    module.def(
        "struck",
        [] {
            std::vector<int64_t> found;
            for (const Fault &fault : universe->faults) {
                found.push_back(fault.struck);
            }
            return found;
        },
        "The virtual time at which each fault has struck; -1: it has not.");
    module.def(
        "disk_points",
        [](int rank) {
            const std::lock_guard held(universe->lock);
            return universe->disk_points[rank];
        },
        "Points of the disk of rank so far.");
    module.def("end_process", &end_process, py::call_guard<py::gil_scoped_release>(),
               "Close all connections of rank; if it is the host, the store is gone, too.");
    module.def(
        "calls", [] { return py::make_tuple(universe->calls, universe->bytes); },
        "Calls to the store, and their bytes.");
    py::class_<Store, c10d::Store, c10::intrusive_ptr<Store>>(module, "Store").def(py::init([](Milliseconds timeout) {
        return c10::make_intrusive<Store>(universe, timeout);
    }));
    py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
        .def(py::init([](const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, Milliseconds timeout,
                         bool connects) { return c10::make_intrusive<Backend>(store, rank, size, timeout, connects); }),
             py::call_guard<py::gil_scoped_release>())
        .def("_set_default_timeout", &Backend::setTimeout)
        .def_property_readonly("options", [](Backend &backend) { return backend.getBackendOptions(); });
}
