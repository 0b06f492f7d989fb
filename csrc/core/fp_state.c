/* core/fp_state.c -- the table of legal moves. */
#include "core/fp_state.h"

#include <stdio.h>

/* [event][state] -> 1 + the next state; 0: not allowed. */
#define TO(state) (1 + FP_STATE_##state)
static const unsigned char moves[FP_EVENT_COUNT][FP_STATE_COUNT] = {
    [FP_EVENT_BEGIN_FORWARD] =
        {
            [FP_STATE_IDLE] = TO(FORWARD),
            [FP_STATE_BACKWARD_PRE] = TO(BACKWARD_PRE), /* recomputed inside the backward pass */
            [FP_STATE_BACKWARD_POST] = TO(FORWARD),     /* recomputed for another use of the same unit */
        },
    [FP_EVENT_END_FORWARD] =
        {
            [FP_STATE_FORWARD] = TO(IDLE),
            [FP_STATE_BACKWARD_PRE] = TO(BACKWARD_PRE),
        },
    [FP_EVENT_BEGIN_BACKWARD] =
        {
            [FP_STATE_IDLE] = TO(BACKWARD_PRE),
            [FP_STATE_BACKWARD_PRE] = TO(BACKWARD_PRE), /* one call for each output tensor */
            [FP_STATE_BACKWARD_POST] = TO(BACKWARD_PRE),
        },
    [FP_EVENT_END_BACKWARD] =
        {
            [FP_STATE_IDLE] = TO(BACKWARD_POST), /* no output needed a gradient */
            [FP_STATE_BACKWARD_PRE] = TO(BACKWARD_POST),
            [FP_STATE_BACKWARD_POST] = TO(BACKWARD_POST),
        },
    [FP_EVENT_FINISH_BACKWARD] =
        {
            [FP_STATE_IDLE] = TO(IDLE),
            [FP_STATE_BACKWARD_PRE] = TO(IDLE), /* no parameter got a gradient */
            [FP_STATE_BACKWARD_POST] = TO(IDLE),
        },
    [FP_EVENT_BEGIN_SUMMON] = {[FP_STATE_IDLE] = TO(SUMMON_FULL_PARAMS)},
    [FP_EVENT_END_SUMMON] = {[FP_STATE_SUMMON_FULL_PARAMS] = TO(IDLE)},
    [FP_EVENT_RESET] =
        {
            [FP_STATE_IDLE] = TO(IDLE),
            [FP_STATE_FORWARD] = TO(IDLE),
            [FP_STATE_BACKWARD_PRE] = TO(IDLE),
            [FP_STATE_BACKWARD_POST] = TO(IDLE),
            [FP_STATE_SUMMON_FULL_PARAMS] = TO(IDLE),
        },
};

static const char *const state_names[FP_STATE_COUNT] = {
    "IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST", "SUMMON_FULL_PARAMS",
};

static const char *const event_names[FP_EVENT_COUNT] = {
    "begin_forward",   "end_forward",  "begin_backward", "end_backward",
    "finish_backward", "begin_summon", "end_summon",     "reset",
};

fp_status
fp_state_next(fp_unit_state state, fp_unit_event event, fp_unit_state *next)
{
    if ((unsigned)state >= FP_STATE_COUNT || (unsigned)event >= FP_EVENT_COUNT) {
        return FP_EINVAL;
    }
    const unsigned char move = moves[event][state];
    if (move == 0) {
        return FP_ESTATE;
    }
    *next = (fp_unit_state)(move - 1);
    return FP_OK;
}

const char *
fp_state_name(fp_unit_state state)
{
    return (unsigned)state < FP_STATE_COUNT ? state_names[state] : NULL;
}

const char *
fp_event_name(fp_unit_event event)
{
    return (unsigned)event < FP_EVENT_COUNT ? event_names[event] : NULL;
}

void
fp_state_message(fp_unit_state state, fp_unit_event event, char *text, size_t size)
{
    int used =
        snprintf(text, size, "%s is not possible in state %s, only in ", fp_event_name(event), fp_state_name(state));
    const char *separator = "";
    for (int other = 0; other < FP_STATE_COUNT && used >= 0 && (size_t)used < size; other++) {
        if (moves[event][other] != 0) {
            used += snprintf(text + used, size - (size_t)used, "%s%s", separator, state_names[other]);
            separator = ", ";
        }
    }
}
