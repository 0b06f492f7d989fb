/* simulation/scheduler.h -- which thread of a rank has the baton, and the virtual time. seams.c includes it once, and calls
 * wait_for() in place of each wait of libc, and come_to_point() before those at which a fault may strike.
 *
 * Whoever gives up the baton may hold the GIL: the others then wait for it in virtual time, as they would in real time. */
#ifndef FLATPARAM_SIMULATION_SCHEDULER_H
#define FLATPARAM_SIMULATION_SCHEDULER_H

#include "heap.h"
#include "seams.h"

#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { THREADS = 8192, RANKS = 2048, ROUNDS = 4 /* PTHREAD_DESTRUCTOR_ITERATIONS of glibc */ };
#define FOR_EVER INT64_MAX
#define FIRST_PROCESS 5000000 /* above the highest process number of Linux */
#define STEPS 50000000

enum kind { runs, in_semaphore, in_mutex, in_condition, in_sleep, in_join, before_begin, gone };
static const char *const KIND_NAMES[] = {"runs",    "a semaphore", "a mutex", "a condition",
                                         "a sleep", "a join",      "begin",   "gone"};

struct thread {
    _Atomic uint32_t baton; /* futex: 1 while this thread may run */
    int rank, home;         /* home: its process, which is 0 if ranks are threads, and else 1 + rank */
    bool is_first;          /* of its rank */
    bool serves;            /* does the work of all ranks */
    enum kind kind;
    void *object;     /* that it waits for */
    int64_t deadline; /* virtual time of the end of its wait */
    bool signalled;
    bool is_there; /* what it waits for, when its process gave up the baton; since then that cannot have changed */
    pthread_t handle;
    void *(*start)(void *);
    void *argument;
    int rounds; /* of the destructors of its thread-local values */
};

struct rank {
    bool ended, interrupted, starved, counts;
    int64_t frozen_until, points;
    int process, status;     /* if ranks are processes; status: of waitpid() */
    int64_t ended_at;        /* virtual time */
    _Atomic uint32_t buried; /* futex: 1 once its process is gone */
};

/* The state of a run: pages of its own, which the processes of ranks have in common. */
static struct {
    struct thread threads[THREADS];
    struct rank ranks[RANKS];
    uint64_t generator, digest;
    int64_t now, limit, steps, looks;
    int n_threads, n_first, chance, reason;
    int current; /* the rank of the thread that has the baton */
    int holder;  /* and its process */
    bool is_running, is_forked;
    _Atomic uint32_t controller; /* futex: 1 once the run is over, or the process of a rank has ended */
} run __attribute__((aligned(4096))) = {.current = -1};

static void (*at_point)(int rank, int64_t point);
static void (*at_change)(int from, int to);
static int home; /* of the threads of this process */

static __thread struct thread *me __attribute__((tls_model("initial-exec")));
static __thread int spawning __attribute__((tls_model("initial-exec"))) = -1;
static pthread_key_t at_end;

static void
futex_wait(_Atomic uint32_t *word)
{
    while (atomic_load(word) == 0) {
        (void)syscall(SYS_futex, word, FUTEX_WAIT, 0, NULL, NULL, 0);
    }
    atomic_store(word, 0);
}

static void
futex_wake(_Atomic uint32_t *word)
{
    atomic_store(word, 1);
    (void)syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

uint64_t
fp_sim_random(uint64_t n)
{
    run.generator ^= run.generator >> 12;
    run.generator ^= run.generator << 25;
    run.generator ^= run.generator >> 27;
    return (run.generator * 2685821657736338717ULL >> 11) % n;
}

static void
note(uint64_t fact)
{
    run.digest = (run.digest ^ fact) * 1099511628211ULL;
}

/* Whether what the thread waits for is there. The memory of another process cannot be read. */
static bool
is_there(const struct thread *thread)
{
    int value;
    switch (thread->kind) {
        case runs:
            return true;
        case in_condition:
            return thread->signalled;
        case in_join:
            return ((struct thread *)thread->object)->kind == gone;
        case in_semaphore:
        case in_mutex:
            if (thread->home != home && !is_common(thread->object)) {
                return thread->is_there;
            }
            return thread->kind == in_mutex ? ((pthread_mutex_t *)thread->object)->__data.__lock == 0
                                            : sem_getvalue(thread->object, &value) == 0 && value > 0;
        default:
            return false;
    }
}

/* The virtual time at which the thread can run; FOR_EVER: it waits for another thread, and for no time. */
static int64_t
ready_at(struct thread *thread)
{
    if (thread->kind == before_begin || thread->kind == gone) {
        return FOR_EVER;
    }
    thread->is_there = is_there(thread);
    const int64_t at = thread->is_there ? run.now : thread->deadline;
    if (!run.is_forked && (thread->kind == in_mutex || thread->kind == in_condition)) { /* see fp_sim_freeze() */
        return at;
    }
    const int64_t frozen = run.ranks[thread->rank].frozen_until;
    return run.ranks[thread->rank].ended || at == FOR_EVER ? FOR_EVER : at > frozen ? at : frozen;
}

static void
change_to(int rank)
{
    if (rank != run.current && at_change != NULL) {
        at_change(run.current, rank);
    }
    run.current = rank;
}

static void
stop(int why)
{
    change_to(-1);
    run.reason = why;
    run.is_running = false;
    futex_wake(&run.controller);
}

/* Pick the next thread; NULL: the run is over, and the controller goes on. */
static struct thread *
next(void)
{
    for (;;) {
        int64_t earliest = FOR_EVER;
        int n = 0;
        static int found[THREADS];
        for (int i = 0; i < run.n_threads; i++) {
            const int64_t at = ready_at(&run.threads[i]);
            if (at <= run.now) {
                found[n++] = i;
            }
            earliest = at < earliest ? at : earliest;
        }
        if (run.n_first == 0 || n == 0 || run.steps > STEPS || run.now > run.limit) {
            if (run.n_first != 0 && n == 0 && earliest != FOR_EVER && earliest <= run.limit) {
                run.now = earliest;
                continue;
            }
            stop(run.n_first == 0       ? FP_SIM_ENDED
                 : run.steps > STEPS    ? FP_SIM_TOO_LONG
                 : run.now > run.limit  ? FP_SIM_LATE
                 : earliest == FOR_EVER ? FP_SIM_STUCK
                                        : FP_SIM_LATE);
            return NULL;
        }
        const int i = found[n == 1 ? 0 : (int)fp_sim_random((uint64_t)n)];
        run.steps++;
        run.looks = 0;
        note((uint64_t)i);
        note((uint64_t)run.now);
        change_to(run.threads[i].rank);
        run.holder = run.threads[i].home;
        return &run.threads[i];
    }
}

/* Give up the baton, and return when this thread has it again. */
static void
hand_over(void)
{
    struct thread *const mine = me;
    struct thread *const other = next();
    if (other == mine) {
        return;
    }
    if (other != NULL) {
        futex_wake(&other->baton);
    }
    futex_wait(&mine->baton);
}

static void
wait_for(enum kind kind, void *object, int64_t deadline)
{
    me->kind = kind;
    me->object = object;
    me->deadline = deadline;
    hand_over();
    me->kind = runs;
    me->object = NULL;
}

static void bury_all(void);
static void kill_process(int rank);

static bool
is_simulated(void)
{
    return me != NULL && run.is_running;
}

/* Come to a point: a fault may strike, and a thread of a rank that has ended or is frozen stops. */
static void
come_to_point(void)
{
    struct rank *const rank = &run.ranks[me->rank];
    if (me->is_first && rank->counts && at_point != NULL) {
        at_point(me->rank, rank->points++);
    }
    if (rank->ended || rank->frozen_until > run.now) {
        wait_for(in_sleep, NULL, run.now);
    }
}

void
fp_sim_pause(void)
{
    if (is_simulated()) {
        come_to_point();
        if ((int)fp_sim_random(256) < run.chance) {
            hand_over();
        }
    }
}

void
fp_sim_count_points(int rank)
{
    run.ranks[rank].counts = true;
}

void
fp_sim_at_points(void (*function)(int rank, int64_t point))
{
    at_point = function;
}

int64_t
fp_sim_points(int rank)
{
    return run.ranks[rank].points;
}

void
fp_sim_starve(int rank)
{
    run.ranks[rank].starved = true;
}

void
fp_sim_serve(int does)
{
    if (me != NULL) {
        me->serves = does != 0;
    }
}

int
fp_sim_rank(void)
{
    return me == NULL ? -1 : me->rank;
}

void
fp_sim_at_change(void (*hook)(int from, int to))
{
    at_change = hook;
}

int64_t
fp_sim_now(void)
{
    return run.now;
}

uint64_t
fp_sim_digest(void)
{
    return run.digest;
}

int64_t
fp_sim_steps(void)
{
    return run.steps;
}

int
fp_sim_process(int rank)
{
    return run.is_forked ? run.ranks[rank].process : FIRST_PROCESS + rank;
}

void
fp_sim_freeze(int rank, int64_t nanoseconds)
{
    run.ranks[rank].frozen_until = nanoseconds == FOR_EVER ? FOR_EVER : run.now + nanoseconds;
    if (me->rank == rank) {
        wait_for(in_sleep, NULL, run.now);
    }
}

void
fp_sim_end(int rank)
{
    if (run.is_forked) {
        kill_process(rank);
        return;
    }
    if (!run.ranks[rank].ended) {
        run.ranks[rank].ended = true;
        note(0x456e6445ULL + (uint64_t)rank);
        run.n_first--;
    }
    if (me != NULL && me->rank == rank) {
        hand_over();
    }
}

int
fp_sim_has_ended(int rank)
{
    return run.ranks[rank].ended;
}

void
fp_sim_interrupt(int rank)
{
    run.ranks[rank].interrupted = true;
}

const char *
fp_sim_state(int i)
{
    static char text[128];
    if (i < 0 || i >= run.n_threads) {
        return NULL;
    }
    const struct thread *thread = &run.threads[i];
    (void)snprintf(text, sizeof text, "rank %d%s: %s%s%s", thread->rank, thread->is_first ? "" : ", another thread",
                   KIND_NAMES[thread->kind], run.ranks[thread->rank].ended ? ", ended" : "",
                   run.ranks[thread->rank].frozen_until > run.now ? ", frozen" : "");
    return text;
}

void
fp_sim_reset(uint64_t seed, int64_t nanoseconds, int switches)
{
    memset(run.ranks, 0, sizeof run.ranks);
    run.n_threads = run.n_first = 0;
    run.generator = seed * 0x9E3779B97F4A7C15ULL + 0x1234567ULL;
    run.generator = run.generator == 0 ? 1 : run.generator;
    run.digest = 14695981039346656037ULL;
    run.now = run.steps = run.looks = 0;
    run.limit = nanoseconds;
    run.chance = switches;
    atomic_store(&run.controller, 0);
}

void
fp_sim_spawn(int rank)
{
    spawning = rank;
}

int
fp_sim_run(void)
{
    run.is_running = true;
    for (int i = 0; i < run.n_threads; i++) {
        run.threads[i].kind = run.threads[i].kind == before_begin ? runs : run.threads[i].kind;
    }
    struct thread *const first = next();
    if (first != NULL) {
        futex_wake(&first->baton);
    }
    while (run.is_running) {
        futex_wait(&run.controller);
        if (run.is_forked) {
            bury_all();
        }
    }
    return run.reason;
}

/* The last destructor of a thread's values hands over: until then it runs Python's and C++'s own. */
static void
at_thread_end(void *value)
{
    struct thread *const thread = value;
    if (++thread->rounds < ROUNDS) {
        (void)pthread_setspecific(at_end, value);
        return;
    }
    if (!run.is_running) {
        return;
    }
    thread->kind = gone;
    if (thread->is_first && !run.ranks[thread->rank].ended) {
        run.ranks[thread->rank].ended = true;
        run.n_first--;
    }
    struct thread *const other = next();
    me = NULL;
    if (other != NULL) {
        futex_wake(&other->baton);
    }
}

static void *
begin(void *argument)
{
    struct thread *const thread = argument;
    me = thread;
    (void)pthread_setspecific(at_end, thread);
    futex_wait(&thread->baton);
    return thread->start(thread->argument);
}

static void
make_key(void)
{
    (void)pthread_key_create(&at_end, at_thread_end);
}

#endif
