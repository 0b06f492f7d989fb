/* core/fp_state.h -- the life cycle of a unit: its states, what may happen in each, and the words for what may not.
 * Pure C11: no Python.h, no torch. Everything here is O(1), allocates nothing and is safe without the GIL.
 *
 *                    begin_forward             begin_backward             end_backward
 *              IDLE ---------------> FORWARD   IDLE -----> BACKWARD_PRE -------------> BACKWARD_POST
 *              IDLE <--------------- FORWARD                 (either one back to IDLE: finish_backward)
 *                     end_forward
 *              IDLE <--- begin_summon, end_summon ---> SUMMON_FULL_PARAMS        any state --- reset ---> IDLE
 *
 * Activation checkpointing runs the forward pass again inside the backward pass: begin_forward and end_forward then
 * leave BACKWARD_PRE as it is, so that the parameters stay unsharded for the gradients. A unit that was used more than
 * once goes from BACKWARD_POST to BACKWARD_PRE, or through another recomputed forward pass, again. A unit whose output
 * needs no gradient skips begin_backward. The states are torch's HandleTrainingState. */
#ifndef FP_STATE_H
#define FP_STATE_H

#include <stddef.h>

#include "core/fp_status.h"

typedef enum {
    FP_STATE_IDLE = 0,
    FP_STATE_FORWARD,
    FP_STATE_BACKWARD_PRE,
    FP_STATE_BACKWARD_POST,
    FP_STATE_SUMMON_FULL_PARAMS,
} fp_unit_state;

typedef enum {
    FP_EVENT_BEGIN_FORWARD = 0,
    FP_EVENT_END_FORWARD,
    FP_EVENT_BEGIN_BACKWARD,  /* the gradient of the unit's output is there */
    FP_EVENT_END_BACKWARD,    /* the gradients of its parameters are there */
    FP_EVENT_FINISH_BACKWARD, /* the whole backward pass is over */
    FP_EVENT_BEGIN_SUMMON,
    FP_EVENT_END_SUMMON,
    FP_EVENT_RESET, /* after an exception: start again */
} fp_unit_event;

enum { FP_STATE_COUNT = 5, FP_EVENT_COUNT = 8 };

/* The state after event. FP_ESTATE if it may not happen in state, FP_EINVAL for a value that is no state or event;
 * *next is written only when FP_OK is returned. */
fp_status fp_state_next(fp_unit_state state, fp_unit_event event, fp_unit_state *next);

/* "IDLE", "begin_forward" and so on; NULL for a value that is none. Static storage. */
const char *fp_state_name(fp_unit_state state);
const char *fp_event_name(fp_unit_event event);

/* Enough bytes for any message of fp_state_message. */
enum { FP_STATE_MESSAGE_BYTES = 256 };

/* Say why event may not happen in state, and in which states it may: a terminated text of at most size bytes, cut if it
 * does not fit. Both values are valid, size >= 1. */
void fp_state_message(fp_unit_state state, fp_unit_event event, char *text, size_t size);

#endif
