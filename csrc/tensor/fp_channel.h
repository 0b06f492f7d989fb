/* tensor/fp_channel.h -- ranks that share something: their collectives, who is told of those, and the sum of flags that
 * they agree by. Plain C, under the rules of fp_torch.h. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

/* Ranks that share something. Counted by nobody: whoever made it frees it. */
typedef struct fp_group fp_group;

/* The process group that torch registered as name; NULL: every collective goes through Python. group is the Python
 * object, kept. host_name: of a group of gloo's of the same ranks, which has the sums of flags; NULL: none. */
fp_group *fp_group_new(PyObject *group, const char *name, const char *host_name);
void fp_group_free(fp_group *group); /* NULL is allowed */

/* What is told of a group's collectives: before each, which it is (see fp_event); that it has begun; that nobody knows
 * whether it has (launched); and a few times a second while one is waited for, if sliced. before and waiting are called
 * with the GIL held and give 0, or -1 with an exception: then the collective does not begin, or the wait ends. failed: one
 * has, with this message; -1 with an exception to raise instead. is_broken: 1 if those under way may never end. watcher is
 * kept; number: in the events.
 * A group has a first watcher, and may have another one, which is told before it. */
typedef struct {
    int (*before)(PyObject *watcher, uint64_t event);
    void (*begun)(PyObject *watcher);
    void (*launched)(PyObject *watcher);
    int (*waiting)(PyObject *watcher);
    int (*failed)(PyObject *watcher, const char *message);
    int (*is_broken)(PyObject *watcher);
} fp_group_calls;
enum { FP_WATCHERS = 2 };
void fp_group_watch(fp_group *group, int which, PyObject *watcher, const fp_group_calls *calls, uint32_t number,
                    int sliced);

/* The kinds of events, in Python _C.EVENT_GATHERS and so on. */
enum {
    FP_EVENT_GATHERS = 0,
    FP_EVENT_REDUCES = 1,
    FP_EVENT_GATHERS_OUTSIDE = 2,     /* of a step; begun by Python, as the next ones that show, clip or scale */
    FP_EVENT_REDUCES_ACCUMULATED = 3, /* the gradients that no_sync has kept too */
    FP_EVENT_AGREES = 4,              /* on what has changed */
    FP_EVENT_CLIPS = 5,
    FP_EVENT_SHOWS_GRADIENTS = 6,
    FP_EVENT_SCALES = 7,
    FP_EVENT_AGREES_ON_GRADIENTS = 8,
    FP_EVENT_EXCHANGES = 9, /* of no unit: the number says what for */
    FP_EVENT_KINDS = 10
};
enum { FP_EVENT_TRAINED_BITS = 26 };
/* trained: of a reduction, a hash of who requires grad; else 0. An event has 62 bits. */
static inline uint64_t
fp_event(uint32_t number, unsigned kind, uint32_t trained)
{
    return ((uint64_t)trained << 32 | number) * FP_EVENT_KINDS + kind;
}

int fp_group_is_same(const fp_group *a, const fp_group *b) FP_NOEXCEPT; /* of one process group */
int fp_group_place(const fp_group *group, int *rank, int *size);        /* ours in it; -1 on failure */
int fp_group_world_rank(const fp_group *group, int rank);               /* of one of it in the world; -1 on failure */

/* The all-gathers of one unit over a group, one at a time, which nobody is told of. */
typedef struct fp_gather fp_gather;
/* group: C++ knows it under this name. sliced: its waits can be left and begun again. */
fp_gather *fp_gather_new(PyObject *group, const char *name, int sliced);
void fp_gather_free(fp_gather *gather); /* NULL is allowed; one under way goes on */
/* Begin to gather the shard of every rank into output, in rank order. RuntimeError if one is under way. */
int fp_gather_begin(fp_gather *gather, PyObject *output, PyObject *shard);
/* Until it has ended: 1; 0: sliced, and a moment is over; -1: it has failed, and is forgotten. */
int fp_gather_wait(fp_gather *gather);
int fp_gather_is_under_way(const fp_gather *gather) FP_NOEXCEPT; /* 0 also if it has ended and nobody has waited */

/* The sum of flags over the ranks of a group, on the host or on the device of like: started, and waited for when it is read. */
typedef struct fp_sum fp_sum;
fp_sum *fp_sum_start(fp_group *group, PyObject *like, const int32_t *flags, Py_ssize_t n, PyObject *collectives,
                     unsigned kind);
int fp_sum_read(fp_sum *sum, int32_t *flags); /* all n of them */
void fp_sum_free(fp_sum *sum);                /* NULL is allowed */

FP_END_C
