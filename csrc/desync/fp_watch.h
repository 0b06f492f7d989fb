/* desync/fp_watch.h -- the watch over a group whose collectives a device waits for, as with NCCL. The host goes on meanwhile,
 * or waits in a call of torch that Ctrl-C does not end, so Python cannot look after the other ranks. A thread does it, and
 * aborts the group's communicator if a rank is lost or differs. flatparam/fsdp/desync/trace.py starts one thread a group.
 * Plain C, under the rules of fp_torch.h. */
#pragma once

#include "desync/fp_board.h"

FP_BEGIN_C

#include "core/fp_trace.h"

/* A group whose collectives a device waits for. All pointers are borrowed during fp_watch(). */
typedef struct {
    const char *group;    /* the name under which torch registered it */
    const char *device;   /* the type of the device: "cuda" */
    const char *prefix;   /* begins the keys in its store by which its ranks ask each other about events */
    const int64_t *ranks; /* [n] the world ranks of the group, in the group's order */
    Py_ssize_t n;
    double interval; /* seconds between two looks */
} fp_watched;

/* Look every interval seconds until there is a reason to end the group's collectives. It blocks: each group has a thread for
 * it. The GIL is released throughout, as the thread that waits for the device may hold it.
 *
 * Reasons, in the order in which they are checked. "If pending": only while a collective of the group has begun and not ended.
 *
 *   reason                                                                                      key that it sets   if pending
 *   the store has been out of reach for 1 s                                                                         yes
 *   another rank has declared the group broken (key "broken")
 *   a rank asks about an event (key "pending"), and trace has another event at its index; or an
 *   exception has kept that rank from an event that trace has begun
 *   another rank has raised and lives on (key "trouble"), more often in this step than this rank, and
 *   the device waits for 2 s                                                                        "told"
 *   a rank of the group is lost: fp_board_said() has a reason                                                       yes
 *   4 s before the group's time-out some ranks have nothing pending, and do not answer a call     "absent"          yes
 *
 * 1: there was a reason. trace is FP_TRACE_LOST if the abort took values from a device, else FP_TRACE_BROKEN, and the
 *    communicator is aborted: the device goes on, and the collectives that it waited for give no values.
 * 0: the group was destroyed, or fp_board_stop() was called.
 * -1 with an exception: torch has no such group or device; or the backend cannot abort, and trace is broken. */
int fp_watch(fp_board *board, fp_trace *trace, const fp_watched *watched);

/* Call wait(), a Python function that lets the current stream of device wait for a collective that Python has issued over
 * group. fp_watch() then sees that the device waits. -1 with the exception of wait(). */
int fp_watch_around(const char *group, const char *device, PyObject *wait);

/* The time-out of collectives over group on device ("cuda"), in seconds. Infinite: torch has no such group, or its backend
 * tells no time-out. -1 with an exception: torch has no such device. */
double fp_time_out(const char *group, const char *device);

/* Start a thread that destroys group, without the GIL, as soon as the thread has the only reference. The destructor of a gloo
 * group waits until the group's collectives have ended, and a collective with a stopped rank does not end: in the caller's
 * thread that wait would hold the GIL. The thread ends at the latest with the process. Call this before torch's
 * destroy_process_group(). Does nothing if torch has no such group. -1 with an exception: no thread can be started. */
int fp_let_go(const char *group);

/* Block the host until the current stream of device ("cuda:1") has done all that was queued. Ctrl-C ends the wait: -1 with
 * KeyboardInterrupt. It does nothing for the host's own device, and in the capture of a CUDA graph. */
int fp_wait_device(const char *device);

FP_END_C
