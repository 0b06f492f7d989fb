/* core/fp_state.h -- the states of a unit and of its flat parameters, which moves between them are legal, and the words
 * for one that is not. Pure C11: no Python.h, no torch. Everything here is O(1), allocates nothing and is safe without the
 * GIL.
 *
 * A unit in an iteration (fp_pass_state):
 *
 *              begin_forward           expect_backward                  begin_backward
 *        IDLE <-------------> FORWARD ---------------> FORWARD_AGAIN   (any) ---------> BACKWARD
 *         |    end_forward                              |        ^                       |     ^
 *         |                                 end_forward v        | begin_forward         v     | end_forward
 *         +------------ expect_backward ---------> AWAITING_BACKWARD                   RECOMPUTING
 *
 * FORWARD_AGAIN is a forward of a unit whose earlier forward awaits its backward. RECOMPUTING is a forward that runs after
 * backward came to the unit, as activation checkpointing does. The unsharded data of a unit: fp_unit_state. The storage of
 * one flat parameter: fp_data_state. Its gradient: fp_gradient_state, in the order of reductions fp_reduce_slot_state, and as .grad shows it
 * fp_shown_state. */
#pragma once

#include <stddef.h>

#include "core/fp_status.h"

typedef enum {
    FP_PASS_IDLE = 0,
    FP_PASS_FORWARD,
    FP_PASS_FORWARD_AGAIN,
    FP_PASS_AWAITING_BACKWARD,
    FP_PASS_BACKWARD,
    FP_PASS_RECOMPUTING,
    FP_PASS_STATES,
} fp_pass_state;

typedef enum {
    FP_PASS_BEGIN_FORWARD = 0,
    FP_PASS_END_FORWARD,
    FP_PASS_EXPECT_BACKWARD, /* an output of the forward has a hook */
    FP_PASS_BEGIN_BACKWARD,  /* the gradient of an output is there */
    FP_PASS_FINISH_BACKWARD, /* the whole backward is over */
    FP_PASS_RESET,           /* after an exception */
    FP_PASS_EVENTS,
} fp_pass_event;

typedef enum {
    FP_UNIT_SHARDED = 0,
    FP_UNIT_PARTLY,    /* some flat parameters are gathered, or being gathered */
    FP_UNIT_GATHERING, /* all are */
    FP_UNIT_UNSHARDED, /* all are gathered */
    FP_UNIT_KEPT,      /* no_sync has left them gathered: good until the next optimizer step */
    FP_UNIT_STATES,
} fp_unit_state;

typedef enum {
    FP_UNIT_BEGIN_GATHER = 0,
    FP_UNIT_END_START, /* the gathers of all flat parameters were started */
    FP_UNIT_USE,       /* what is there is good for this iteration */
    FP_UNIT_ARRIVE,    /* the gathers have ended */
    FP_UNIT_FAIL,      /* one has failed */
    FP_UNIT_FREE_SOME,
    FP_UNIT_FREE,
    FP_UNIT_KEEP,
    FP_UNIT_EVENTS,
} fp_unit_event;

typedef enum {
    FP_DATA_SHARDED = 0,
    FP_DATA_BORROWED,   /* the unsharded tensor is the shard itself */
    FP_DATA_REFRESHING, /* the secondary shard is being gathered */
    FP_DATA_GATHERING,
    FP_DATA_UNSHARDED,
    FP_DATA_ABANDONED, /* a gather that nobody waits for may still write to the memory, which is not freed */
    FP_DATA_STATES,
} fp_data_state;

typedef enum {
    FP_DATA_PREPARE = 0, /* a new storage, freed */
    FP_DATA_BORROW,
    FP_DATA_REFRESH,
    FP_DATA_GATHER,
    FP_DATA_FILL,   /* gathered without anything to wait for */
    FP_DATA_ARRIVE, /* the gather under way has ended */
    FP_DATA_FAIL,
    FP_DATA_ABANDON,
    FP_DATA_FORGET, /* what was gathered is of no use, or freed */
    FP_DATA_EVENTS,
} fp_data_event;

typedef enum {
    FP_GRADIENT_NONE = 0,
    FP_GRADIENT_PACKED,
    FP_GRADIENT_REDUCING_INNER,   /* over the first of two groups */
    FP_GRADIENT_REDUCING_PARTIAL, /* over the first of two groups, and no further in this backward */
    FP_GRADIENT_REDUCING,         /* over the last group */
    FP_GRADIENT_ARRIVING,         /* reduced, and on its way to the shard's device */
    FP_GRADIENT_STATES,
} fp_gradient_state;

typedef enum {
    FP_GRADIENT_PACK = 0,
    FP_GRADIENT_REDUCE_INNER,
    FP_GRADIENT_REDUCE_PARTIAL,
    FP_GRADIENT_REDUCE,
    FP_GRADIENT_ACCUMULATE, /* what was reduced over the first group is added to what was before */
    FP_GRADIENT_SEND,
    FP_GRADIENT_TAKE,
    FP_GRADIENT_FORGET,
    FP_GRADIENT_EVENTS,
} fp_gradient_event;

typedef enum {
    FP_REDUCE_SLOT_OPEN = 0, /* no gradient was foreseen, and none has come */
    FP_REDUCE_SLOT_COMING,   /* this backward gives it a gradient on this rank */
    FP_REDUCE_SLOT_PACKED,   /* that has come, and waits for its turn */
    FP_REDUCE_SLOT_PASSED,   /* its turn has come in this backward */
    FP_REDUCE_SLOT_STATES,
} fp_reduce_slot_state;

typedef enum {
    FP_REDUCE_SLOT_EXPECT = 0,
    FP_REDUCE_SLOT_PACK,
    FP_REDUCE_SLOT_PASS,
    FP_REDUCE_SLOT_FORGET,
    FP_REDUCE_SLOT_EVENTS,
} fp_reduce_slot_event;

typedef enum {
    FP_SHOWN_REDUCED = 0,      /* the gradient of the shard, or none */
    FP_SHOWN_ACCUMULATED,      /* the gradient accumulated in no_sync, and an optimizer can step with */
    FP_SHOWN_ACCUMULATED_WIDE, /* what it has kept in another dtype than the parameters': to be rounded for an optimizer */
    FP_SHOWN_UNREDUCED,        /* what it has kept, and is to be reduced first */
    FP_SHOWN_STATES,
} fp_shown_state;

typedef enum {
    FP_SHOWN_SHOW_KEPT = 0,
    FP_SHOWN_SHOW_WIDE,
    FP_SHOWN_SHOW_UNREDUCED,
    FP_SHOWN_READ, /* what users have done to it counts */
    FP_SHOWN_EVENTS,
} fp_shown_event;

/* The states and events of one of these, by number; moves: [event][state], 1 + the next state, 0 for an illegal move. */
typedef struct {
    const char *const *states, *const *events;
    const unsigned char *moves;
    unsigned n_states, n_events;
} fp_state_table;
extern const fp_state_table fp_pass_moves, fp_unit_moves, fp_data_moves, fp_gradient_moves, fp_reduce_slot_moves,
    fp_shown_moves;

/* The state after event. FP_ESTATE if it may not happen in state, FP_EINVAL for a value that is no state or event;
 * *next is written only when FP_OK is returned. */
fp_status fp_state_next(const fp_state_table *table, unsigned state, unsigned event, unsigned *next);

/* Enough bytes for any message of fp_state_message. */
enum { FP_STATE_MESSAGE_BYTES = 256 };

/* Say why event may not happen in state, and in which states it may: a terminated text of at most size bytes, cut if it
 * does not fit. Both values are valid, size >= 1. */
void fp_state_message(const fp_state_table *table, unsigned state, unsigned event, char *text, size_t size);
