/* core/fp_order.h -- the order of events that many processes must have alike. Pure C11: no Python.h, no torch.
 *
 * Each process tells it of one event after the other, and is told whether that was to be expected from those before. What
 * is expected follows from the events alone, so processes with the same past expect the same: one whose event was expected
 * needs to ask nobody, because any other process that does something else knows that it does.
 *
 * Events belong to passes. An event is looked for after the same pass so far and the same FP_ORDER_PASSES passes before
 * it; else after the same pass so far; else, from the second pass on, after the same last event. */
#ifndef FP_ORDER_H
#define FP_ORDER_H

#include <stdint.h>

#include "core/fp_status.h"

enum {
    FP_ORDER_PASSES = 16,   /* how far back the longest memory goes */
    FP_ORDER_RECENT = 4096, /* events that fp_order_at() finds */
    FP_ORDER_MOST = 1
        << 17, /* expectations that are kept; then all are forgotten, by every process after the same event */
};

typedef enum {
    FP_ORDER_EXPECTED, /* as every process with this past expects */
    FP_ORDER_NEW,      /* no process with this past expects anything */
    FP_ORDER_OTHER,    /* another event was expected */
} fp_order_verdict;

typedef struct fp_order fp_order;

fp_order *fp_order_new(void); /* NULL: no memory */
void fp_order_free(fp_order *order);

/* Take note of an event, below 2**62. new_pass: the first of a pass. *verdict is written with FP_OK only; FP_EINVAL,
 * FP_ENOMEM: nothing has changed. */
fp_status fp_order_note(fp_order *order, uint64_t event, int new_pass, fp_order_verdict *verdict);

int64_t fp_order_count(const fp_order *order);  /* events so far */
int64_t fp_order_passes(const fp_order *order); /* passes that they began */

/* The event with this index, counted from 0: 1, and *event and *new_pass are written; 0: not yet, or too long ago. */
int fp_order_at(const fp_order *order, int64_t index, uint64_t *event, int *new_pass);

#endif
