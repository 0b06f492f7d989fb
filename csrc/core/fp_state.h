/* core/fp_state.h -- the states of a unit and of its flat parameters, the legal moves between them, and the message for an
 * illegal move. Pure C11: no Python.h, no torch. A call is O(1), allocates nothing and is safe without the GIL.
 *
 * The core has the tables alone: the struct of a unit or flat parameter has the state, and one function each changes it.
 *
 * A unit in an iteration (fp_pass_state):
 *
 *              begin_forward           expect_backward                  begin_backward
 *        IDLE <-------------> FORWARD ---------------> FORWARD_AGAIN   (any) ---------> BACKWARD
 *         |    end_forward                              |        ^                       |     ^
 *         |                                 end_forward v        | begin_forward         v     | end_forward
 *         +------------ expect_backward ---------> AWAITING_BACKWARD                   RECOMPUTING
 *
 * FORWARD_AGAIN is a forward of a unit whose earlier forward awaits its backward. RECOMPUTING is a forward while backward
 * has come to the unit: activation checkpointing begins one in BACKWARD, and begin_backward in a forward leads to it.
 * fp_state.c has the tables of moves.
 *
 *   state                 of                                               changed by
 *   fp_pass_state         a unit in an iteration                           fp_iteration_move(), runtime/fp_iteration.c
 *   fp_unit_state         the unsharded data of a unit                     fp_unshard_move(), runtime/fp_unshard.c
 *   fp_data_state         the storage of one flat parameter                fp::move(), tensor/fp_flat_buffer.cpp
 *   fp_gradient_state     the gradient of one flat parameter               the same
 *   fp_reduce_slot_state  the turn of one flat parameter                   fp_reduce_order_move(), runtime/fp_reduce_order.c
 *   fp_shown_state        .grad of the parameters of one                   move_shown(), runtime/fp_flat_param.c */
#pragma once

#include <stddef.h>

#include "core/fp_status.h"

typedef enum {
    FP_PASS_IDLE = 0,          /* no forward is under way, and none awaits its backward */
    FP_PASS_FORWARD,           /* a forward is under way */
    FP_PASS_FORWARD_AGAIN,     /* a forward is under way, and an output awaits its backward */
    FP_PASS_AWAITING_BACKWARD, /* forwards are over, and an output awaits its backward */
    FP_PASS_BACKWARD,          /* this backward has come to the unit */
    FP_PASS_RECOMPUTING,       /* this backward has come to the unit, and a forward is under way again */
    FP_PASS_STATES,
} fp_pass_state;

typedef enum {
    FP_PASS_BEGIN_FORWARD = 0,
    FP_PASS_END_FORWARD,
    FP_PASS_EXPECT_BACKWARD, /* an output of the forward has a hook */
    FP_PASS_BEGIN_BACKWARD,  /* autograd has the gradient of an output */
    FP_PASS_FINISH_BACKWARD, /* the whole backward is over */
    FP_PASS_RESET,           /* after an exception */
    FP_PASS_EVENTS,
} fp_pass_event;

typedef enum {
    FP_UNIT_SHARDED = 0, /* no flat parameter is gathered */
    FP_UNIT_PARTLY,      /* some flat parameters are gathered, or being gathered */
    FP_UNIT_GATHERING,   /* all flat parameters are gathered, or being gathered */
    FP_UNIT_UNSHARDED,   /* all flat parameters are gathered */
    FP_UNIT_KEPT, /* all are gathered since an earlier pass: no_sync keeps the data, for forwards until it is stale */
    FP_UNIT_KEPT_FOR_GRAPH, /* all are gathered since an earlier pass: a recorded graph needs the data, no forward uses it */
    FP_UNIT_STATES,
} fp_unit_state;

typedef enum {
    FP_UNIT_BEGIN_GATHER = 0, /* before the first gather of the unit starts */
    FP_UNIT_END_START,        /* the gathers of all flat parameters were started */
    FP_UNIT_USE,              /* this iteration uses the data */
    FP_UNIT_ARRIVE,           /* the gathers have ended */
    FP_UNIT_FAIL,             /* a gather has failed */
    FP_UNIT_FREE_SOME,        /* a flat parameter was freed, others are still gathered */
    FP_UNIT_FREE,             /* the last gathered flat parameter was freed */
    FP_UNIT_KEEP,             /* a pass ends, and the data stays for the forwards of later ones */
    FP_UNIT_KEEP_FOR_GRAPH,   /* a pass ends, and the data stays for a recorded graph */
    FP_UNIT_EVENTS,
} fp_unit_event;

typedef enum {
    FP_DATA_SHARDED = 0, /* the unsharded tensor has no valid values, and mostly no memory */
    FP_DATA_BORROWED,    /* the unsharded tensor is the shard itself */
    FP_DATA_REFRESHING,  /* the secondary shard is being gathered */
    FP_DATA_GATHERING,   /* the unsharded tensor is being gathered */
    FP_DATA_UNSHARDED,   /* it has its values */
    FP_DATA_ABANDONED,   /* a gather that nobody waits for may still write to the memory, which is not freed */
    FP_DATA_STATES,
} fp_data_state;

typedef enum {
    FP_DATA_PREPARE = 0, /* a new storage, freed */
    FP_DATA_BORROW,      /* the shard is the whole: no gather is needed */
    FP_DATA_REFRESH,     /* the gather of the secondary shard has begun */
    FP_DATA_GATHER,      /* the gather of the unsharded tensor has begun */
    FP_DATA_FILL,        /* gathered by copying: there is nothing to wait for */
    FP_DATA_ARRIVE,      /* the gather under way has ended */
    FP_DATA_FAIL,        /* it has failed */
    FP_DATA_ABANDON,     /* nobody waits for it any more */
    FP_DATA_FORGET,      /* the values are out of date, or freed */
    FP_DATA_EVENTS,
} fp_data_event;

typedef enum {
    FP_GRADIENT_NONE = 0,         /* no gradient of this backward is held, or it was accumulated */
    FP_GRADIENT_PACKED,           /* packed for the collective, which has not begun; more gradients may be added */
    FP_GRADIENT_REDUCING_INNER,   /* over the first of two groups */
    FP_GRADIENT_REDUCING_PARTIAL, /* over the first of two groups, and no further in this backward */
    FP_GRADIENT_REDUCING,         /* over the last group */
    FP_GRADIENT_ARRIVING,         /* reduced, and on its way to the shard's device */
    FP_GRADIENT_STATES,
} fp_gradient_state;

typedef enum {
    FP_GRADIENT_PACK = 0,       /* gradients of views were packed */
    FP_GRADIENT_REDUCE_INNER,   /* the collective over the first of two groups has begun */
    FP_GRADIENT_REDUCE_PARTIAL, /* the same, and the second group does not follow in this backward */
    FP_GRADIENT_REDUCE,         /* the collective over the last group has begun */
    FP_GRADIENT_ACCUMULATE,     /* the result over the first group was added to the accumulated gradient */
    FP_GRADIENT_SEND,           /* the copy of the result to the shard's device has begun */
    FP_GRADIENT_TAKE,           /* the caller has taken the result */
    FP_GRADIENT_FORGET,         /* dropped, after an error */
    FP_GRADIENT_EVENTS,
} fp_gradient_event;

typedef enum {
    FP_REDUCE_SLOT_OPEN = 0, /* no gradient was foreseen, and none has come */
    FP_REDUCE_SLOT_COMING,   /* this backward gives the flat parameter a gradient on this rank */
    FP_REDUCE_SLOT_PACKED,   /* the gradient has come and is packed; the turn is still to come */
    FP_REDUCE_SLOT_PASSED,   /* the turn has come in this backward */
    FP_REDUCE_SLOT_STATES,
} fp_reduce_slot_state;

typedef enum {
    FP_REDUCE_SLOT_EXPECT = 0, /* the graph task of this backward comes to the unit's node, or will come again */
    FP_REDUCE_SLOT_PACK,       /* the gradient has come */
    FP_REDUCE_SLOT_PASS,       /* the turn has come, or the gradient was reduced at once */
    FP_REDUCE_SLOT_FORGET,     /* the backward is over */
    FP_REDUCE_SLOT_EVENTS,
} fp_reduce_slot_event;

typedef enum {
    FP_SHOWN_REDUCED = 0, /* the gradient of the shard, or none */
    FP_SHOWN_ACCUMULATED, /* the accumulated gradient of a flat parameter that is not sharded: an optimizer can step it */
    FP_SHOWN_ACCUMULATED_WIDE, /* the same in a wider dtype than the parameters: an optimizer cannot step it */
    FP_SHOWN_UNREDUCED, /* the accumulated gradient of a sharded one: it must be reduced before an optimizer steps */
    FP_SHOWN_STATES,
} fp_shown_state;

typedef enum {
    FP_SHOWN_SHOW_ACCUMULATED = 0, /* .grad shows the accumulated gradient: the next state is the one of this name */
    FP_SHOWN_SHOW_WIDE,
    FP_SHOWN_SHOW_UNREDUCED,
    FP_SHOWN_READ, /* the user's edits of .grad were read, and .grad shows the reduced gradient again */
    FP_SHOWN_EVENTS,
} fp_shown_event;

/* One of these tables, in static storage. */
typedef struct {
    const char *const *states, *const *events; /* [n_states], [n_events] their names, for messages */
    const unsigned char *moves;                /* [n_events][n_states] 1 + the next state; 0: the move is illegal */
    unsigned n_states, n_events;
} fp_state_table;
extern const fp_state_table fp_pass_moves, fp_unit_moves, fp_data_moves, fp_gradient_moves, fp_reduce_slot_moves,
    fp_shown_moves;

/* The state after event. FP_ESTATE if event is illegal in state, FP_EINVAL for a value that is no state or event;
 * *next is written only when FP_OK is returned. */
fp_status fp_state_next(const fp_state_table *table, unsigned state, unsigned event, unsigned *next);

/* Enough bytes for any message of fp_state_message. */
enum { FP_STATE_MESSAGE_BYTES = 256 };

/* Write the message for an illegal move into text: the event, the state, and the states in which the event is legal. It is
 * terminated, has at most size bytes, and is cut if it does not fit. state and event are valid, size >= 1. */
void fp_state_message(const fp_state_table *table, unsigned state, unsigned event, char *text, size_t size);
