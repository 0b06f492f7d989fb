/* core/fp_trace.h -- a record of the events (collectives) of one process, and a prediction of the next one. Pure C11: no
 * Python.h, no torch.
 *
 * All processes of a group must come to the same events in the same order. Each process notes an event before it begins,
 * and learns whether the events before predict it. The prediction follows from the events alone, so processes with the same
 * past predict the same. A process whose event was predicted asks nobody: a process that comes to another event sees that
 * its event was not predicted, and it asks.
 *
 * Events belong to passes. A prediction is looked up by three keys, one after the other: the pass so far and the
 * FP_TRACE_PASSES passes before it; the pass so far; from the second pass on the last event.
 *
 * _C.CollectiveTrace (runtime/fp_trace_py.c) owns one for each group. One thread notes events; the watch over a device
 * (desync/fp_watch.h) reads from its own thread. The functions that other threads may call are marked below. */
#pragma once

#include <stdint.h>

#include "core/fp_status.h"

/* Stands in the record for an event that was noted and did not begin. Events are smaller. */
#define FP_TRACE_MISSED ((UINT64_C(1) << 62) - 1)

enum {
    FP_TRACE_PASSES = 16,   /* passes in the longest key */
    FP_TRACE_RECENT = 4095, /* the last events, which fp_trace_at() finds */
    /* Room for predictions. When it is half full all are dropped: by each process after the same event. */
    FP_TRACE_MOST = 1 << 17,
};

typedef enum {
    FP_TRACE_EXPECTED, /* this event was predicted */
    FP_TRACE_NEW,      /* nothing was predicted */
    FP_TRACE_OTHER,    /* another event was predicted */
} fp_trace_verdict;

typedef struct fp_trace fp_trace;

fp_trace *fp_trace_new(void); /* NULL: no memory */
void fp_trace_free(fp_trace *trace);

/* Note an event, < FP_TRACE_MISSED, that is about to begin. new_pass: 1: it is the first event of a pass. *verdict is written
 * with FP_OK only. FP_EINVAL, FP_ENOMEM: nothing has changed. */
fp_status fp_trace_note(fp_trace *trace, uint64_t event, int new_pass, fp_trace_verdict *verdict);
/* The event that was noted last has begun. If the next event is noted without this call before, the event counts as missed:
 * an exception came in between. Predictions are made from a missed event as from one that has begun. */
void fp_trace_begin(fp_trace *trace);
/* The call that begins the event noted last starts, or an exception has left it: until fp_trace_begin() it is unknown whether
 * the event has begun. If it is missed then, the digest is 0. */
void fp_trace_launch(fp_trace *trace);
/* 1: events were missed since the last fp_trace_confirm_not_begun(). *index: the index of the first of them; *digest: a hash
 * of all, to compare with other processes; 0 if it is unknown whether one of them has begun. 0: none was missed, and nothing
 * is written. */
int fp_trace_missed(const fp_trace *trace, int64_t *index, uint64_t *digest);
/* The processes have found out that none of them has begun the missed events: forget that they were missed. */
void fp_trace_confirm_not_begun(fp_trace *trace);

/* ---- other threads may call these, too ---- */
int64_t fp_trace_count(const fp_trace *trace);  /* events so far */
int64_t fp_trace_passes(const fp_trace *trace); /* passes that these events began */

/* 1: the event with this index, counted from 0, is written to *event, and whether it is the first of a pass to *new_pass.
 * 0: it is not noted yet, or too old; nothing is written. */
int fp_trace_at(const fp_trace *trace, int64_t index, uint64_t *event, int *new_pass);

/* 1: the event with this index has begun; 0: it has not, or is not found. */
int fp_trace_has_begun(const fp_trace *trace, int64_t index);

typedef enum {
    FP_TRACE_WHOLE,
    FP_TRACE_BROKEN, /* the processes differ in their events, or one of them has ended */
    FP_TRACE_LOST, /* the same, and a collective was aborted, so its tensors have no values. BROKEN does not replace it */
} fp_trace_state;
fp_trace_state fp_trace_broken(const fp_trace *trace);
void fp_trace_set_broken(fp_trace *trace, fp_trace_state broken); /* of this trace alone; WHOLE mends it */

/* Let fp_trace_break(trace) break other, too: a model may use several groups, and cannot go on without one of them. other is
 * borrowed for the call, and may be freed before trace. FP_ENOMEM: nothing has changed. One thread at a time may call this,
 * while others call fp_trace_break(). */
fp_status fp_trace_join(fp_trace *trace, fp_trace *other);
/* Set the state of trace, and of all traces that were joined to it. */
void fp_trace_break(fp_trace *trace, fp_trace_state how);
