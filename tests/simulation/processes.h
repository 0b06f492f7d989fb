/* simulation/processes.h -- ranks that are processes: see fp_sim_share() in seams.h. seams.c includes it once.
 *
 * A process that ends keeps the baton to its very end, whatever ends it: exit(), _exit(), a signal. The controller, which is
 * the parent, waits for that, and gives the baton away. So no order depends on the real time of an end. */
#ifndef FLATPARAM_SIMULATION_PROCESSES_H
#define FLATPARAM_SIMULATION_PROCESSES_H

#include "scheduler.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

static void (*at_death)(int rank);

/* A child has ended. */
static void
on_child(int number)
{
    (void)number;
    const int before = errno;
    futex_wake(&run.controller);
    errno = before;
}

void
fp_sim_share(void)
{
    if (mmap(&run, sizeof run, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        abort();
    }
    if (heap == NULL) {
        make_heap();
    }
    run.is_forked = true;
    run.current = -1;
    const struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_RESTART};
    (void)sigaction(SIGCHLD, &action, NULL);
}

int
fp_sim_is_forked(void)
{
    return run.is_forked;
}

int
fp_sim_home(void)
{
    return home;
}

void
fp_sim_allocate(int is_common)
{
    shares += is_common != 0 ? 1 : -1;
}

void
fp_sim_at_death(void (*function)(int rank))
{
    at_death = function;
}

void
fp_sim_expect(int rank)
{
    run.threads[run.n_threads++] =
        (struct thread){.rank = rank, .home = rank + 1, .is_first = true, .kind = before_begin};
    run.n_first++;
}

void
fp_sim_born(int rank, int process)
{
    run.ranks[rank].process = process;
}

void
fp_sim_live(int rank)
{
    (void)signal(SIGCHLD, SIG_DFL);
    home = rank + 1;
    for (int i = 0; i < run.n_threads; i++) {
        if (run.threads[i].home == home) {
            me = &run.threads[i];
        }
    }
    futex_wait(&me->baton);
}

int
fp_sim_status(int rank)
{
    return run.ranks[rank].status;
}

int64_t
fp_sim_ended_at(int rank)
{
    return run.ranks[rank].ended_at;
}

/* The rank of a process; -1: none. */
static int
rank_of(pid_t process)
{
    for (int i = 0; i < run.n_threads; i++) {
        if (run.threads[i].home != 0 && run.ranks[run.threads[i].rank].process == process) {
            return run.threads[i].rank;
        }
    }
    return -1;
}

/* The process of a rank is gone. Meanwhile the controller is that rank's first thread, in virtual time. */
static void
bury(int rank, int status)
{
    struct rank *const dead = &run.ranks[rank];
    dead->status = status;
    dead->ended_at = run.now;
    if (run.is_running) {
        for (int i = 0; i < run.n_threads; i++) {
            struct thread *const thread = &run.threads[i];
            if (thread->home == rank + 1) {
                thread->kind = gone;
                me = thread->is_first ? thread : me;
            }
        }
        dead->ended = true;
        run.n_first--;
        if (WIFSIGNALED(status)) { /* as fp_sim_end(): the digest is that of ranks that are threads */
            note(0x456e6445ULL + (uint64_t)rank);
        }
        if (at_death != NULL) {
            at_death(rank);
        }
        me = NULL;
        if (run.holder == rank + 1) {
            struct thread *const other = next();
            if (other != NULL) {
                futex_wake(&other->baton);
            }
        }
    }
    futex_wake(&dead->buried);
}

static void
bury_all(void)
{
    int status;
    for (pid_t process; (process = waitpid(-1, &status, WNOHANG)) > 0;) {
        const int rank = rank_of(process);
        if (rank >= 0) {
            bury(rank, status);
        }
    }
}

/* Kill the process of a rank. Time stands still until it is gone. */
static void
kill_process(int rank)
{
    if (run.ranks[rank].ended) {
        return;
    }
    (void)syscall(SYS_kill, run.ranks[rank].process, SIGKILL);
    do {
        futex_wait(&run.ranks[rank].buried);
    } while (home == rank + 1);
}

/* Signals that end and stop a process do so in virtual time. */
int
kill(pid_t process, int number)
{
    static int (*real)(pid_t, int);
    if (real == NULL) {
        real = (int (*)(pid_t, int))dlsym(RTLD_NEXT, "kill");
    }
    const int rank = is_simulated() && run.is_forked ? rank_of(process) : -1;
    if (rank < 0 || run.ranks[rank].ended || (number != SIGKILL && number != SIGSTOP && number != SIGCONT)) {
        return real(process, number);
    }
    if (number == SIGKILL) {
        kill_process(rank);
    }
    else {
        fp_sim_freeze(rank, number == SIGSTOP ? FOR_EVER : 0);
    }
    return 0;
}

#endif
