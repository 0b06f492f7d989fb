/* tensor/fp_channel.h -- a process group for the collectives of units: the watchers that are told of each collective, the
 * all-gather for Python, and the sum of flags by which ranks agree. Plain C, under the rules of fp_torch.h. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

/* A process group for the runtime. A flat buffer owns its groups (fp_flat_buffer_plan) and frees them; sums borrow them. */
typedef struct fp_group fp_group;

/* group: the Python process group; a reference is kept.
 * name: the name under which torch registered it, so that collectives are issued from C++; NULL: Python issues all of them.
 * host_name: a group of gloo with the same ranks, for the sums of flags, so that no sum waits for a device; NULL: none.
 * NULL with an exception: torch knows no group of that name. */
fp_group *fp_group_new(PyObject *group, const char *name, const char *host_name);
void fp_group_free(fp_group *group); /* NULL is allowed */

/* The functions of a watcher. They are called with the GIL held, by the thread that issues or waits for the collective.
 *
 *   before     a collective, the event, is about to begin; -1 with an exception: it is not issued
 *   begun      the announced collective was issued
 *   launched   Ctrl-C has left the call that issues it: it may have begun or not
 *   waiting    every 300 ms of a wait, if sliced; -1 with an exception: the wait ends, the collective goes on
 *   failed     a collective has raised message; -1 with an exception: raise that one, which knows the cause
 *   is_broken  1: pending collectives of the group may never end */
typedef struct {
    int (*before)(PyObject *watcher, uint64_t event);
    void (*begun)(PyObject *watcher);
    void (*launched)(PyObject *watcher);
    int (*waiting)(PyObject *watcher);
    int (*failed)(PyObject *watcher, const char *message);
    int (*is_broken)(PyObject *watcher);
} fp_group_calls;
enum { FP_WATCHERS = 2 };
/* Set watcher number `which`, 0 or 1; a reference is kept. Of two watchers number 1 gets before() first.
 * number: the id of the unit in the events for this watcher.
 * calls, sliced: of the group: the last call of this function sets them. sliced: waits are cut into slices (gloo), else the
 * backend waits to the end (NCCL). */
void fp_group_watch(fp_group *group, int which, PyObject *watcher, const fp_group_calls *calls, uint32_t number,
                    int sliced);

/* The kinds of collectives in events; in Python _C.EVENT_GATHERS and so on. */
enum {
    FP_EVENT_GATHERS = 0,
    FP_EVENT_REDUCES = 1,
    FP_EVENT_GATHERS_OUTSIDE = 2,     /* outside of a step; issued by Python, as are 5, 6, 7 and 9 */
    FP_EVENT_REDUCES_ACCUMULATED = 3, /* with the gradients accumulated in no_sync */
    FP_EVENT_AGREES = 4,              /* the consensus of a forward: stale units, errors */
    FP_EVENT_CLIPS = 5,
    FP_EVENT_SHOWS_GRADIENTS = 6,
    FP_EVENT_SCALES = 7,
    FP_EVENT_AGREES_ON_GRADIENTS = 8, /* the consensus of a backward */
    FP_EVENT_EXCHANGES = 9,           /* a setup collective, of no unit: number is its purpose */
    FP_EVENT_LEARNS = 10,             /* the consensus on the units to which forwards write before their turn */
    FP_EVENT_KINDS = 11
};
enum { FP_EVENT_TRAINED_BITS = 26 };
/* The event as one number of 62 bits: ranks that differ in any part differ in the number. number: the id of the unit.
 * trained has FP_EVENT_TRAINED_BITS. A reduction: a hash of the flags requires_grad of the parameters. A gather of several
 * flat parameters: a hash of the ids of their units, and in the last 8 bits their number, at most 255. A sum of flags: the
 * number of units. Others: 0. */
static inline uint64_t
fp_event(uint32_t number, unsigned kind, uint32_t trained)
{
    return ((uint64_t)trained << 32 | number) * FP_EVENT_KINDS + kind;
}

int fp_group_is_same(const fp_group *a, const fp_group *b) FP_NOEXCEPT; /* 1: both have one Python process group */
int fp_group_place(const fp_group *group, int *rank, int *size); /* this rank's number in it, and its size; 0; -1 */
int fp_group_world_rank(const fp_group *group, int rank);        /* the world rank of the group's rank; -1 */

/* All-gathers over a group, one at a time. No watcher is told of them. _C.Gather owns one, for the drop-in. */
typedef struct fp_gather fp_gather;
/* group, name: as for fp_group_new(); name is needed. sliced: a wait returns after 300 ms. */
fp_gather *fp_gather_new(PyObject *group, const char *name, int sliced);
/* NULL is allowed. A pending gather goes on, and keeps the memory of its tensors. */
void fp_gather_free(fp_gather *gather);
/* Begin to gather the shard of every rank into output, in rank order. The memory of both is kept until the gather has ended,
 * even if the tensors get other data. RuntimeError if a gather is pending. */
int fp_gather_begin(fp_gather *gather, PyObject *output, PyObject *shard);
/* Wait for it, without the GIL. 1: it has ended, or none was begun; 0: sliced, and 300 ms are over; -1: it has failed, and the
 * next one may begin. */
int fp_gather_wait(fp_gather *gather);
int fp_gather_is_under_way(const fp_gather *gather) FP_NOEXCEPT; /* 1: one has begun and not ended */

/* A sum of flags over the ranks of a group, by which ranks agree. It is started early and read late, so that the wait for it is
 * short. */
typedef struct fp_sum fp_sum;
/* Start to add flags[n] over the group, on the host if it has a host group, else on the device of like. flags is copied, group
 * is borrowed. collectives: NULL, or the Python object that issues collectives; kind: FP_EVENT_*; units: the number of units
 * that the flags are about, for the event. NULL: nothing has begun, or a watcher has raised. RuntimeError in the capture of a
 * CUDA graph: its replay would ask no rank. */
fp_sum *fp_sum_start(fp_group *group, PyObject *like, const int32_t *flags, Py_ssize_t n, PyObject *collectives,
                     unsigned kind, uint32_t units);
int fp_sum_read(fp_sum *sum, int32_t *flags); /* wait, and write the n sums; -1: an interrupted wait may be repeated */
void fp_sum_free(fp_sum *sum);                /* NULL is allowed; it does not wait */

FP_END_C
