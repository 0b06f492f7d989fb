/* simulation/seams.c -- see seams.h. Linux and glibc.
 *
 * Objects of libc keep their state: a semaphore is taken by sem_trywait(), a mutex by pthread_mutex_trylock(), so threads of no
 * rank may use the same objects before and after a run. Condition variables alone have no state to take: a signal marks a
 * thread that waits here, and is handed to libc too. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "processes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>

/* libc's own functions. */
#define REAL_AT(name, find)                                                                                            \
    static __typeof__(name) *real;                                                                                     \
    if (real == NULL) {                                                                                                \
        real = (__typeof__(name) *)(find);                                                                             \
    }
#define REAL(name) REAL_AT(name, dlsym(RTLD_NEXT, #name))
#define REAL_CONDITION(name) REAL_AT(name, dlvsym(RTLD_NEXT, #name, "GLIBC_2.3.2")) /* older ones have other objects */

/* The threads of torch's autograd are one for each device, and rank i has device i. Each is made by the rank that comes to its
 * first backward first, and says its name before it does anything else. */
int
pthread_setname_np(pthread_t handle, const char *name)
{
    REAL(pthread_setname_np)
    int device;
    if (is_simulated() && !run.is_forked && sscanf(name, "pt_autograd_%d", &device) == 1) {
        me->rank = device;
        change_to(device);
    }
    return real(handle, name);
}

int
pthread_create(pthread_t *handle, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    REAL(pthread_create)
    const bool is_first = me == NULL && spawning >= 0;
    if (!is_simulated() && !is_first) {
        return real(handle, attributes, start, argument);
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, make_key);
    if (run.n_threads == THREADS) {
        return EAGAIN;
    }
    struct thread *const thread = &run.threads[run.n_threads];
    *thread = (struct thread){
        .rank = is_first ? spawning : me->rank,
        .home = home,
        .is_first = is_first,
        .kind = is_first ? before_begin : runs,
        .start = start,
        .argument = argument,
    };
    spawning = -1;
    const int status = real(handle, attributes, begin, thread);
    if (status == 0) {
        thread->handle = *handle;
        run.n_threads++;
        run.n_first += is_first;
    }
    return status;
}

int
pthread_join(pthread_t handle, void **value)
{
    REAL(pthread_join)
    if (is_simulated()) {
        for (int i = run.n_threads; i-- > 0;) {
            if (run.threads[i].home == home && run.threads[i].kind != gone &&
                pthread_equal(run.threads[i].handle, handle)) {
                wait_for(in_join, &run.threads[i], FOR_EVER);
                break;
            }
        }
    }
    return real(handle, value);
}

/* Clocks */

#define LOOKS 10000      /* after which time goes on though this thread does not wait */
#define BEGAN 1700000000 /* seconds of the wall clock at virtual time 0 */
#define UP 1000000000    /* of the other clocks: more than those of the real machine, as the world begins now */

static void
look(struct timespec *time, int64_t offset)
{
    run.now += ++run.looks % LOOKS == 0 ? 1000000 : 0;
    time->tv_sec = offset + run.now / 1000000000;
    time->tv_nsec = run.now % 1000000000;
}

static int64_t
offset_of(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ? BEGAN : UP;
}

int
clock_gettime(clockid_t clock, struct timespec *time)
{
    REAL(clock_gettime)
    if (!is_simulated()) {
        return real(clock, time);
    }
    look(time, offset_of(clock));
    return 0;
}

int
gettimeofday(struct timeval *restrict time, void *restrict zone)
{
    REAL(gettimeofday)
    if (!is_simulated()) {
        return real(time, zone);
    }
    struct timespec found;
    look(&found, BEGAN);
    time->tv_sec = found.tv_sec;
    time->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t
time(time_t *result)
{
    REAL(time)
    if (!is_simulated()) {
        return real(result);
    }
    struct timespec found;
    look(&found, BEGAN);
    if (result != NULL) {
        *result = found.tv_sec;
    }
    return found.tv_sec;
}

/* The virtual time of a deadline that the clock shows. */
static int64_t virtual(clockid_t clock, const struct timespec *time)
{
    const int64_t seconds = time->tv_sec - offset_of(clock);
    return seconds > 4000000000 ? FOR_EVER : seconds * 1000000000 + time->tv_nsec;
}

int
clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left)
{
    REAL(clock_nanosleep)
    if (!is_simulated()) {
        return real(clock, flags, time, left);
    }
    const int64_t end =
        (flags & TIMER_ABSTIME) != 0 ? virtual(clock, time) : run.now + time->tv_sec * 1000000000 + time->tv_nsec;
    come_to_point();
    wait_for(in_sleep, NULL, end > run.now ? end : run.now);
    return 0;
}

int
nanosleep(const struct timespec *time, struct timespec *left)
{
    REAL(nanosleep)
    return is_simulated() ? clock_nanosleep(CLOCK_MONOTONIC, 0, time, left) : real(time, left);
}

int
usleep(useconds_t microseconds)
{
    const struct timespec time = {.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000L};
    return nanosleep(&time, NULL);
}

/* Python 3.10 sleeps by it. */
int
select(int n, fd_set *restrict in, fd_set *restrict out, fd_set *restrict failed, struct timeval *restrict time)
{
    REAL(select)
    if (!is_simulated() || n != 0 || time == NULL) {
        return real(n, in, out, failed, time);
    }
    const struct timespec same = {.tv_sec = time->tv_sec, .tv_nsec = time->tv_usec * 1000L};
    return clock_nanosleep(CLOCK_MONOTONIC, 0, &same, NULL);
}

int
sched_yield(void)
{
    REAL(sched_yield)
    if (!is_simulated()) {
        return real();
    }
    wait_for(in_sleep, NULL, run.now + 1000);
    return 0;
}

/* Semaphores: Python's locks */

static int
take(sem_t *semaphore, int64_t deadline)
{
    while (sem_trywait(semaphore) != 0) {
        if (deadline <= run.now) {
            errno = ETIMEDOUT;
            return -1;
        }
        come_to_point();
        wait_for(in_semaphore, semaphore, deadline);
    }
    return 0;
}

int
sem_wait(sem_t *semaphore)
{
    REAL(sem_wait)
    return is_simulated() ? take(semaphore, FOR_EVER) : real(semaphore);
}

int
sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict time)
{
    REAL(sem_timedwait)
    return is_simulated() ? take(semaphore, virtual(CLOCK_REALTIME, time)) : real(semaphore, time);
}

int
sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict time)
{
    REAL(sem_clockwait)
    return is_simulated() ? take(semaphore, virtual(clock, time)) : real(semaphore, clock, time);
}

/* Mutexes and condition variables: the GIL, and those of C++ */

/* Note a mutex that this thread has taken: see heap.h. */
static int
taken(const pthread_mutex_t *mutex, int status)
{
    shares += status == 0 && is_common(mutex);
    return status;
}

static int
lock(pthread_mutex_t *mutex, int64_t deadline)
{
    int status;
    while ((status = pthread_mutex_trylock(mutex)) == EBUSY) {
        if (deadline <= run.now) {
            return ETIMEDOUT;
        }
        wait_for(in_mutex, mutex, deadline);
    }
    return taken(mutex, status);
}

int
pthread_mutex_lock(pthread_mutex_t *mutex)
{
    REAL(pthread_mutex_lock)
    return is_simulated() ? lock(mutex, FOR_EVER) : taken(mutex, real(mutex));
}

int
pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    REAL(pthread_mutex_unlock)
    shares -= is_common(mutex);
    return real(mutex);
}

int
pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict time)
{
    REAL(pthread_mutex_timedlock)
    return is_simulated() ? lock(mutex, virtual(CLOCK_REALTIME, time)) : real(mutex, time);
}

static int
wait_condition(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t deadline)
{
    me->signalled = false;
    (void)pthread_mutex_unlock(mutex);
    wait_for(in_condition, condition, deadline);
    const bool signalled = me->signalled;
    (void)lock(mutex, FOR_EVER);
    return signalled ? 0 : ETIMEDOUT;
}

int
pthread_cond_wait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex)
{
    REAL_CONDITION(pthread_cond_wait)
    return is_simulated() ? wait_condition(condition, mutex, FOR_EVER) : real(condition, mutex);
}

int
pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                       const struct timespec *restrict time)
{
    REAL(pthread_cond_clockwait)
    return is_simulated() ? wait_condition(condition, mutex, virtual(clock, time))
                          : real(condition, mutex, clock, time);
}

int
pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                       const struct timespec *restrict time)
{
    REAL_CONDITION(pthread_cond_timedwait)
    if (!is_simulated()) {
        return real(condition, mutex, time);
    }
    /* Python's have the monotonic clock, others the wall clock: their seconds tell which. */
    const clockid_t clock = time->tv_sec >= BEGAN ? CLOCK_REALTIME : CLOCK_MONOTONIC;
    return wait_condition(condition, mutex, virtual(clock, time));
}

/* Wake one of the threads that wait for the condition, or all. */
static void
wake(const pthread_cond_t *condition, bool all)
{
    int n = 0;
    static struct thread *found[THREADS];
    for (int i = 0; i < run.n_threads; i++) {
        struct thread *const thread = &run.threads[i];
        const bool is_same = thread->object == condition && (thread->home == home || is_common(condition));
        if (thread->kind == in_condition && is_same && !thread->signalled) {
            found[n++] = thread;
        }
    }
    const int only = all || n == 0 ? -1 : n == 1 ? 0 : (int)fp_sim_random((uint64_t)n);
    for (int i = 0; i < n; i++) {
        found[i]->signalled = all || i == only;
    }
}

int
pthread_cond_signal(pthread_cond_t *condition)
{
    REAL_CONDITION(pthread_cond_signal)
    if (is_simulated()) {
        wake(condition, false);
    }
    return real(condition);
}

int
pthread_cond_broadcast(pthread_cond_t *condition)
{
    REAL_CONDITION(pthread_cond_broadcast)
    if (is_simulated()) {
        wake(condition, true);
    }
    return real(condition);
}

/* The memory of tensors */

int
posix_memalign(void **memory, size_t alignment, size_t size)
{
    REAL(posix_memalign)
    if (gives_common() && alignment <= HEAD) {
        *memory = take_piece(size);
        return 0;
    }
    if (is_simulated() && me->is_first && !me->serves && run.ranks[me->rank].starved) {
        run.ranks[me->rank].starved = false;
        return ENOMEM;
    }
    return real(memory, alignment, size);
}

/* The process of a rank */

pid_t
getpid(void)
{
    REAL(getpid)
    return is_simulated() && !run.is_forked ? fp_sim_process(me->rank) : real();
}

/* A path that takes the place of path for this thread, or path itself; NULL: there is no such file. */
static const char *
placed(const char *path, char *buffer, size_t size)
{
    if (!is_simulated() || strncmp(path, "/proc/", 6) != 0) {
        return path;
    }
    if (strcmp(path, "/proc/sys/kernel/random/boot_id") == 0) { /* each rank may have a machine of its own */
        (void)snprintf(buffer, size, "%s/machine of %d", getenv("FLATPARAM_SIMULATED_PROC"), me->rank);
        return buffer;
    }
    if (run.is_forked) {
        return path;
    }
    const bool is_own = strcmp(path, "/proc/self/stat") == 0;
    char *end;
    const long process = is_own ? fp_sim_process(me->rank) : strtol(path + 6, &end, 10);
    if (process < FIRST_PROCESS || process >= FIRST_PROCESS + RANKS || (!is_own && strcmp(end, "/stat") != 0)) {
        return path;
    }
    if (run.ranks[process - FIRST_PROCESS].ended) {
        return NULL;
    }
    (void)snprintf(buffer, size, "%s/%ld", getenv("FLATPARAM_SIMULATED_PROC"), process);
    return buffer;
}

#define PLACED(failed)                                                                                                 \
    char buffer[512];                                                                                                  \
    path = placed(path, buffer, sizeof buffer);                                                                        \
    if (path == NULL) {                                                                                                \
        errno = ENOENT;                                                                                                \
        return failed;                                                                                                 \
    }

FILE *
fopen(const char *restrict path, const char *restrict mode)
{
    REAL(fopen)
    PLACED(NULL)
    return real(path, mode);
}

FILE *
fopen64(const char *restrict path, const char *restrict mode)
{
    REAL(fopen64)
    PLACED(NULL)
    return real(path, mode);
}

#define MODE                                                                                                           \
    va_list list;                                                                                                      \
    va_start(list, flags);                                                                                             \
    const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, int) : 0;                                     \
    va_end(list);

int
open(const char *path, int flags, ...)
{
    REAL(open)
    MODE PLACED(-1) return real(path, flags, mode);
}

int
open64(const char *path, int flags, ...)
{
    REAL(open64)
    MODE PLACED(-1) return real(path, flags, mode);
}

/* Ctrl-C: Python gives it to the main thread alone. */
int
PyErr_CheckSignals(void)
{
    static int (*real)(void);
    static void (*set_none)(void *);
    static void **interrupt;
    if (real == NULL) {
        real = (int (*)(void))dlsym(RTLD_NEXT, "PyErr_CheckSignals");
        set_none = (void (*)(void *))dlsym(RTLD_NEXT, "PyErr_SetNone");
        interrupt = (void **)dlsym(RTLD_NEXT, "PyExc_KeyboardInterrupt");
    }
    if (is_simulated() && me->is_first && run.ranks[me->rank].interrupted) {
        run.ranks[me->rank].interrupted = false;
        set_none(*interrupt);
        return -1;
    }
    return real();
}
