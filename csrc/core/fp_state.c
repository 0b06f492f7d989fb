/* core/fp_state.c -- the tables of legal moves. A row is an event; its columns are the states in their order. */
#include "core/fp_state.h"

#include <stdio.h>

#define TABLE(rows, state_names, event_names)                                                                          \
    {.states = state_names,                                                                                            \
     .events = event_names,                                                                                            \
     .moves = &rows[0][0],                                                                                             \
     .n_states = sizeof rows[0],                                                                                       \
     .n_events = sizeof rows / sizeof rows[0]}

/* ---- a unit in an iteration ---- */

enum { IDLE = 1 + FP_PASS_IDLE, FORWARD, AGAIN, AWAITING, BACKWARD, RECOMPUTING };
static const unsigned char pass_moves[FP_PASS_EVENTS][FP_PASS_STATES] = {
    [FP_PASS_BEGIN_FORWARD] = {FORWARD, FORWARD, AGAIN, AGAIN, RECOMPUTING, RECOMPUTING}, /* a module may call itself */
    [FP_PASS_END_FORWARD] = {0, IDLE, AWAITING, 0, 0, BACKWARD},
    [FP_PASS_EXPECT_BACKWARD] = {AWAITING, AGAIN, AGAIN, AWAITING, 0, 0},
    /* From IDLE: the backward of a retained graph, or of a forward that was recomputed in this backward. */
    [FP_PASS_BEGIN_BACKWARD] = {BACKWARD, RECOMPUTING, RECOMPUTING, BACKWARD, BACKWARD, RECOMPUTING},
    [FP_PASS_FINISH_BACKWARD] = {IDLE, FORWARD, FORWARD, IDLE, IDLE, FORWARD}, /* backward may not have come to it */
    [FP_PASS_RESET] = {IDLE, IDLE, IDLE, IDLE, IDLE, IDLE},
};
static const char *const pass_states[] = {"IDLE",     "FORWARD",    "FORWARD_AGAIN", "AWAITING_BACKWARD",
                                          "BACKWARD", "RECOMPUTING"};
static const char *const pass_events[] = {"begin_forward",  "end_forward",     "expect_backward",
                                          "begin_backward", "finish_backward", "reset"};
const fp_state_table fp_pass_moves = TABLE(pass_moves, pass_states, pass_events);

/* ---- the unsharded data of a unit ---- */

enum { SHARDED = 1 + FP_UNIT_SHARDED, PARTLY, GATHERING, UNSHARDED, KEPT, FOR_GRAPH };
static const unsigned char unit_moves[FP_UNIT_EVENTS][FP_UNIT_STATES] = {
    [FP_UNIT_BEGIN_GATHER] = {PARTLY, PARTLY, PARTLY, PARTLY, PARTLY, PARTLY}, /* the values may have changed since */
    [FP_UNIT_END_START] = {0, GATHERING, 0, 0, 0, 0},
    [FP_UNIT_USE] = {0, 0, GATHERING, UNSHARDED, GATHERING,
                     GATHERING}, /* kept: perhaps no call has waited for the gather */
    [FP_UNIT_ARRIVE] = {0, 0, UNSHARDED, 0, 0, 0},
    [FP_UNIT_FAIL] = {0, 0, PARTLY, 0, 0, 0},
    [FP_UNIT_FREE_SOME] = {SHARDED, PARTLY, PARTLY, PARTLY, PARTLY, PARTLY},
    [FP_UNIT_FREE] = {SHARDED, SHARDED, SHARDED, SHARDED, SHARDED, SHARDED},
    [FP_UNIT_KEEP] = {0, 0, KEPT, KEPT, KEPT, KEPT},
    [FP_UNIT_KEEP_FOR_GRAPH] = {0, 0, FOR_GRAPH, FOR_GRAPH, FOR_GRAPH, FOR_GRAPH},
};
static const char *const unit_states[] = {"SHARDED", "PARTLY", "GATHERING", "UNSHARDED", "KEPT", "KEPT_FOR_GRAPH"};
static const char *const unit_events[] = {"begin_gather", "end_start", "use",  "arrive",        "fail",
                                          "free_some",    "free",      "keep", "keep_for_graph"};
const fp_state_table fp_unit_moves = TABLE(unit_moves, unit_states, unit_events);

/* ---- the storage of a flat parameter ---- */

enum { Sharded = 1 + FP_DATA_SHARDED, Borrowed, Refreshing, Gathering, Unsharded, Abandoned };
static const unsigned char data_moves[FP_DATA_EVENTS][FP_DATA_STATES] = {
    [FP_DATA_PREPARE] = {Sharded, Sharded, Abandoned, Abandoned, Sharded, Abandoned},
    [FP_DATA_BORROW] = {Borrowed, Borrowed, 0, 0, Borrowed, 0},
    [FP_DATA_REFRESH] = {Refreshing, 0, 0, 0, 0, 0},
    [FP_DATA_GATHER] = {Gathering, 0, 0, 0, 0, 0},
    [FP_DATA_FILL] = {Unsharded, 0, 0, 0, 0, 0},
    [FP_DATA_ARRIVE] = {0, 0, Sharded, Unsharded, 0, Sharded},
    [FP_DATA_FAIL] = {0, 0, Sharded, Sharded, 0, Sharded},
    [FP_DATA_ABANDON] = {0, 0, Abandoned, Abandoned, 0, Abandoned},
    [FP_DATA_FORGET] = {Sharded, Borrowed, 0, 0, Sharded, 0}, /* not while a collective may write to the memory */
};
static const char *const data_states[] = {"SHARDED", "BORROWED", "REFRESHING", "GATHERING", "UNSHARDED", "ABANDONED"};
static const char *const data_events[] = {"prepare", "borrow", "refresh", "gather", "fill",
                                          "arrive",  "fail",   "abandon", "forget"};
const fp_state_table fp_data_moves = TABLE(data_moves, data_states, data_events);

/* ---- the gradient of a flat parameter ---- */

enum { NONE = 1 + FP_GRADIENT_NONE, PACKED, INNER, PARTIAL, REDUCING, ARRIVING };
static const unsigned char gradient_moves[FP_GRADIENT_EVENTS][FP_GRADIENT_STATES] = {
    [FP_GRADIENT_PACK] = {PACKED, PACKED, 0, 0, 0, 0},       /* PACKED: another graph task gives more before the turn */
    [FP_GRADIENT_REDUCE_INNER] = {INNER, INNER, 0, 0, 0, 0}, /* NONE: the accumulated gradient, or zeros */
    [FP_GRADIENT_REDUCE_PARTIAL] = {PARTIAL, PARTIAL, 0, 0, 0, 0},
    [FP_GRADIENT_REDUCE] = {REDUCING, REDUCING, REDUCING, 0, 0, 0},
    [FP_GRADIENT_ACCUMULATE] = {0, 0, NONE, NONE, 0, 0},
    [FP_GRADIENT_SEND] = {0, 0, 0, 0, ARRIVING, 0},
    [FP_GRADIENT_TAKE] = {0, 0, 0, 0, NONE, NONE},
    [FP_GRADIENT_FORGET] = {NONE, NONE, NONE, NONE, NONE, NONE},
};
static const char *const gradient_states[] = {"NONE",     "PACKED",  "REDUCING_INNER", "REDUCING_PARTIAL",
                                              "REDUCING", "ARRIVING"};
static const char *const gradient_events[] = {"pack",       "reduce_inner", "reduce_partial", "reduce",
                                              "accumulate", "send",         "take",           "forget"};
const fp_state_table fp_gradient_moves = TABLE(gradient_moves, gradient_states, gradient_events);

/* ---- the reduce slot of a flat parameter ---- */

enum { OPEN = 1 + FP_REDUCE_SLOT_OPEN, COMING, WAITING, PASSED };
static const unsigned char reduce_slot_moves[FP_REDUCE_SLOT_EVENTS][FP_REDUCE_SLOT_STATES] = {
    [FP_REDUCE_SLOT_EXPECT] = {COMING, 0, COMING, 0},            /* PACKED: a reentrant checkpoint gives more */
    [FP_REDUCE_SLOT_PACK] = {WAITING, WAITING, WAITING, PASSED}, /* PASSED: accumulated in no_sync after the turn */
    [FP_REDUCE_SLOT_PASS] = {PASSED, PASSED, PASSED, PASSED},
    [FP_REDUCE_SLOT_FORGET] = {OPEN, OPEN, OPEN, OPEN},
};
static const char *const reduce_slot_states[] = {"OPEN", "COMING", "PACKED", "PASSED"};
static const char *const reduce_slot_events[] = {"expect", "pack", "pass", "forget"};
const fp_state_table fp_reduce_slot_moves = TABLE(reduce_slot_moves, reduce_slot_states, reduce_slot_events);

/* ---- the gradient that .grad shows ---- */

enum { REDUCED = 1 + FP_SHOWN_REDUCED, ACCUMULATED, ACCUMULATED_WIDE, UNREDUCED };
static const unsigned char shown_moves[FP_SHOWN_EVENTS][FP_SHOWN_STATES] = {
    /* From REDUCED alone: showing puts the present .grad aside as the reduced gradient. */
    [FP_SHOWN_SHOW_ACCUMULATED] = {ACCUMULATED, 0, 0, 0},
    [FP_SHOWN_SHOW_WIDE] = {ACCUMULATED_WIDE, 0, 0, 0},
    [FP_SHOWN_SHOW_UNREDUCED] = {UNREDUCED, 0, 0, 0},
    [FP_SHOWN_READ] = {REDUCED, REDUCED, REDUCED, REDUCED},
};
static const char *const shown_states[] = {"REDUCED", "ACCUMULATED", "ACCUMULATED_WIDE", "UNREDUCED"};
static const char *const shown_events[] = {"show_accumulated", "show_wide", "show_unreduced", "read"};
const fp_state_table fp_shown_moves = TABLE(shown_moves, shown_states, shown_events);

/* ---- moves ---- */

fp_status
fp_state_next(const fp_state_table *table, unsigned state, unsigned event, unsigned *next)
{
    if (state >= table->n_states || event >= table->n_events) {
        return FP_EINVAL;
    }
    const unsigned char move = table->moves[event * table->n_states + state];
    if (move == 0) {
        return FP_ESTATE;
    }
    *next = move - 1U;
    return FP_OK;
}

void
fp_state_message(const fp_state_table *table, unsigned state, unsigned event, char *text, size_t size)
{
    int used =
        snprintf(text, size, "%s is not possible in state %s, only in ", table->events[event], table->states[state]);
    const char *separator = "";
    for (unsigned other = 0; other < table->n_states && used >= 0 && (size_t)used < size; other++) {
        if (table->moves[event * table->n_states + other] != 0) {
            used += snprintf(text + used, size - (size_t)used, "%s%s", separator, table->states[other]);
            separator = ", ";
        }
    }
}
