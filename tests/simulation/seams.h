/* simulation/seams.h -- threads of simulated ranks, in virtual time. A library that is preloaded (seams.c) takes the place of
 * libc's clocks, sleeps, semaphores, condition variables, mutexes and thread creation, for these threads alone.
 *
 * One thread runs at a time: it has the baton. It gives the baton up where it waits, sleeps or calls fp_sim_pause(); a
 * generator, seeded by fp_sim_reset(), picks the next one among those that can run. Time stands still while a thread runs, and
 * jumps to the earliest deadline if no thread can run. A thread that looks at clocks 10,000 times and does not wait sees 1 ms
 * go by.
 *
 * A rank is a number from 0. Its threads are the one that the controller makes after fp_sim_spawn(), each thread that a
 * thread of the rank makes, and the thread of torch's autograd for the device with the number of the rank. A rank has a
 * process number of its own, and a place in /proc.
 *
 * Ranks may be processes instead: see fp_sim_share().
 *
 * The controller is a thread that belongs to no rank: it calls reset, spawn, run and the functions that read. All others are
 * called by threads of ranks, without the GIL. Nothing here allocates after fp_sim_reset(). */
#ifndef FLATPARAM_SIMULATION_SEAMS_H
#define FLATPARAM_SIMULATION_SEAMS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FP_SIM_ENDED = 0,    /* each rank has ended, or was killed */
    FP_SIM_STUCK = 1,    /* no thread can run, and none waits for a time */
    FP_SIM_LATE = 2,     /* the virtual time has reached the limit */
    FP_SIM_TOO_LONG = 3, /* the baton was handed over too often */
};

/* Forget all threads, and begin a run at virtual time 0. seed: of the generator. limit: virtual nanoseconds that the run may
 * take. switches: the chance, of 256, that a thread that could go on hands over when it calls fp_sim_pause(). */
void fp_sim_reset(uint64_t seed, int64_t limit, int switches);

/* The next thread that this thread makes belongs to rank. It begins when fp_sim_run() is called. */
void fp_sim_spawn(int rank);

/* Run until all ranks have ended, or nothing goes on. Returns one of the values above. Threads that have not ended stay where
 * they are for ever. */
int fp_sim_run(void);

/* The rank of this thread; -1: none. */
int fp_sim_rank(void);

/* Call hook(from, to) each time when a thread of another rank gets the baton, in the thread that gives it up, which may not
 * have the GIL; the controller's rank is -1. The hook keeps what the process has once and each rank should have. It waits
 * for nothing. */
void fp_sim_at_change(void (*hook)(int from, int to));

/* Virtual nanoseconds since the run began. */
int64_t fp_sim_now(void);

/* Let another thread run, perhaps. */
void fp_sim_pause(void);

/* A number below n, from the generator of the run. */
uint64_t fp_sim_random(uint64_t n);

/* No thread of rank runs for so many virtual nanoseconds from now on: its process is stopped, or slow. A thread that waits for
 * a mutex or a condition, such as the GIL's, goes on until it comes to a point: it would keep them from the other ranks. */
void fp_sim_freeze(int rank, int64_t nanoseconds);

/* End rank: its threads stop for ever, as in fp_sim_freeze(), and its process is gone from /proc. If it is the rank of this
 * thread, this does not return. */
void fp_sim_end(int rank);

/* Points are where a rank's first thread calls fp_sim_pause(), sleeps, or waits for a semaphore. Count those of rank from now
 * on, and call the function of fp_sim_at_points() at each of them, with its number from 0. */
void fp_sim_count_points(int rank);
void fp_sim_at_points(void (*function)(int rank, int64_t point));

/* How many points of rank were counted. */
int64_t fp_sim_points(int rank);

/* The next allocation of a tensor by the rank's first thread fails; not between fp_sim_serve(1) and fp_sim_serve(0), where the
 * thread does the work of all ranks. */
void fp_sim_starve(int rank);
void fp_sim_serve(int does);

/* Whether rank has ended. */
int fp_sim_has_ended(int rank);

/* The next PyErr_CheckSignals() of the rank's first thread raises KeyboardInterrupt. */
void fp_sim_interrupt(int rank);

/* A digest of the order in which threads had the baton, and when: equal for equal runs. */
uint64_t fp_sim_digest(void);

/* How often the baton was handed over. */
int64_t fp_sim_steps(void);

/* The process number of a rank. */
int fp_sim_process(int rank);

/* Ranks that are processes. One thread of all processes runs at a time. The process that forks them is the controller. It calls
 *
 *   fp_sim_share()           once, before fp_sim_reset(): the state of the run, and what heap.h says, become common memory
 *   fp_sim_expect(rank)      before it forks the process of rank, which calls fp_sim_live(rank): that returns when the run has
 *                            begun, in the rank's first thread
 *   fp_sim_born(rank, pid)   after that
 *   fp_sim_run()
 *
 * A rank ends when its process is gone; fp_sim_end() kills it. The real process number and /proc are seen. kill() with
 * SIGKILL, SIGSTOP and SIGCONT acts in virtual time on a rank's process; other signals act in real time. */
void fp_sim_share(void);
void fp_sim_expect(int rank);
void fp_sim_born(int rank, int process);
void fp_sim_live(int rank);

/* Whether ranks are processes. */
int fp_sim_is_forked(void);

/* A number of this process: 0 of the controller, or if ranks are threads; 1 + rank. */
int fp_sim_home(void);

/* Have this thread allocate common memory, as if it had one more common mutex (1), or one less (0). */
void fp_sim_allocate(int is_common);

/* Call function(rank) when the process of rank is gone, in the controller, before another thread runs. */
void fp_sim_at_death(void (*function)(int rank));

/* How the process of rank has ended, as waitpid() says it, and when, in virtual nanoseconds. */
int fp_sim_status(int rank);
int64_t fp_sim_ended_at(int rank);

/* What thread i waits for, as text in static storage; NULL: there is no thread i. */
const char *fp_sim_state(int i);

#ifdef __cplusplus
}
#endif

#endif
