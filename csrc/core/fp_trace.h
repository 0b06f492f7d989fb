/* core/fp_trace.h -- the order of events that many processes must have alike. Pure C11: no Python.h, no torch.
 *
 * Each process tells it of one event after the other, and is told whether that was to be expected from those before. What
 * is expected follows from the events alone, so processes with the same past expect the same: one whose event was expected
 * needs to ask nobody, because any other process that does something else knows that it does.
 *
 * Events belong to passes. An event is looked for after the same pass so far and the same FP_TRACE_PASSES passes before
 * it; else after the same pass so far; else, from the second pass on, after the same last event. */
#pragma once

#include <stdint.h>

#include "core/fp_status.h"

/* What stands in the place of an event that was noted and did not begin. */
#define FP_TRACE_MISSED ((UINT64_C(1) << 62) - 1)

enum {
    FP_TRACE_PASSES = 16,   /* how far back the longest memory goes */
    FP_TRACE_RECENT = 4095, /* events that fp_trace_at() finds */
    FP_TRACE_MOST = 1
        << 17, /* expectations that are kept; then all are forgotten, by every process after the same event */
};

typedef enum {
    FP_TRACE_EXPECTED, /* as every process with this past expects */
    FP_TRACE_NEW,      /* no process with this past expects anything */
    FP_TRACE_OTHER,    /* another event was expected */
} fp_trace_verdict;

typedef struct fp_trace fp_trace;

fp_trace *fp_trace_new(void); /* NULL: no memory */
void fp_trace_free(fp_trace *order);

/* Take note of an event, below FP_TRACE_MISSED, that is about to begin. new_pass: the first of a pass. *verdict is written
 * with FP_OK only; FP_EINVAL, FP_ENOMEM: nothing has changed. */
fp_status fp_trace_note(fp_trace *order, uint64_t event, int new_pass, fp_trace_verdict *verdict);
/* The event that was noted last has begun. If this is not said before the next one is noted, the event was missed: an
 * exception came between. What is expected follows from it all the same, as if it had begun. */
void fp_trace_begin(fp_trace *order);
/* It is begun by code that an exception may leave before or after that. If it was missed, nobody knows whether it has begun. */
void fp_trace_launch(fp_trace *order);
/* Events that were missed since the last fp_trace_confirm_not_begun(): 1, and *index of the first of them and a *digest of all are
 * written, which is 0 if one was launched; 0: none. */
int fp_trace_missed(const fp_trace *order, int64_t *index, uint64_t *digest);
/* It is known that no process has begun them. */
void fp_trace_confirm_not_begun(fp_trace *order);

/* The following may be called by other threads, too. */
int64_t fp_trace_count(const fp_trace *order);  /* events so far */
int64_t fp_trace_passes(const fp_trace *order); /* passes that they began */

/* The event with this index, counted from 0: 1, and *event and *new_pass are written; 0: not yet, or too long ago. */
int fp_trace_at(const fp_trace *order, int64_t index, uint64_t *event, int *new_pass);

/* Whether that event has begun. 0 also of one that is not found. */
int fp_trace_has_begun(const fp_trace *order, int64_t index);

typedef enum {
    FP_TRACE_WHOLE,
    FP_TRACE_BROKEN, /* the processes are known not to have the same events, or not to come to them */
    FP_TRACE_LOST,   /* and something waited for a collective that was aborted, and has no values: never BROKEN again */
} fp_trace_state;
fp_trace_state fp_trace_broken(const fp_trace *order);
void fp_trace_set_broken(fp_trace *order, fp_trace_state broken);

/* From now on fp_trace_break(order) breaks other, too, which may be freed before order. FP_ENOMEM: nothing has changed. By
 * one thread at a time, while others may call fp_trace_break(). */
fp_status fp_trace_join(fp_trace *order, fp_trace *other);
void fp_trace_break(fp_trace *order, fp_trace_state how); /* it, and all that it was joined to */
