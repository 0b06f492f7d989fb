/* desync/fp_watch.h -- a look after the other ranks where a device waits for them, as with NCCL: the host goes on meanwhile, or
 * waits in a call of torch that no Ctrl-C and no look ends. Plain C, under the rules of fp_torch.h. */
#pragma once

#include "desync/fp_board.h"

FP_BEGIN_C

#include "core/fp_trace.h"

/* A group whose collectives a device waits for. Borrowed. */
typedef struct {
    const char *group;    /* the name under which torch registered it */
    const char *device;   /* "cuda", ... */
    const char *prefix;   /* where its ranks ask and answer, in its store: flatparam/fsdp/desync/trace.py */
    const int64_t *ranks; /* of it, in the world */
    Py_ssize_t n;
    double interval; /* seconds between two looks */
} fp_watched;

/* Looks without the GIL, as whoever waits for the device may hold it. 1: one of the ranks has come to another collective than
 * trace has, or has said why it goes on no more; or one that lives on has raised an exception in the pass in which this device waits, and
 * is in the store at "told" then; or one is lost, or the store out of reach, while this rank waits for
 * others; or some, which are in the store at "absent" then, come to no collective that it waits for, a moment before the
 * time-out of the group. Then trace is broken, or lost, and the communicator aborted: the device goes on, and what it was
 * waiting for has no values. 0: the group was destroyed, or fp_board_stop() was called. -1 with an exception: torch has no
 * such group or device, or its backend cannot abort; then trace is broken. */
int fp_watch(fp_board *board, fp_trace *trace, const fp_watched *watched);

/* Call wait(), in which the current stream of device begins to wait for a collective over group that Python has begun. */
int fp_watch_around(const char *group, const char *device, PyObject *wait);

/* Seconds after which a collective over group, as fp_watched.group, fails on device ("cuda"). Infinite: there is no
 * such group, or its backend does not say. -1 with an exception: torch has no such device. */
double fp_time_out(const char *group, const char *device);

/* The host waits until the current stream of device ("cuda:1") has done all that it was given; Ctrl-C ends it. In a capture, and
 * for the host itself, nothing is waited for. */
int fp_wait_device(const char *device);

FP_END_C
