/* runtime/fp_types.h -- the structs of the runtime: a unit, and what the units of a tree share. Files of the runtime include
 * each other one way, those that are further down in this list those above:
 *     fp_types, fp_flat_param    the structs; one flat parameter
 *     fp_fresh                   whether what is gathered of a unit is of now
 *     fp_unshard, fp_reduction   what is done to one unit
 *     fp_consensus               what ranks tell each other
 *     fp_reduce_order            which unit is reduced when
 *     fp_iteration               an iteration of the model: threads, order, recovery
 *     fp_forward, fp_backward    what Python and autograd call
 *     fp_unit, fp_root           the Python types */
#pragma once

#include "runtime/fp_flat_param.h"

struct fp_unit;

/* What ranks tell each other of the units that are spread over one group. */
typedef struct {
    fp_sum *sum;            /* NULL: it was read */
    struct fp_unit **units; /* owned references; the same on all ranks of the group, in one order */
    Py_ssize_t n, n_flags;
    int32_t *flags;
    int rank, ranks; /* ours in the group, and how many there are */
} fp_exchange;

/* What the units of a tree share: _C.Root. */
typedef struct {
    PyObject_HEAD
    PyObject *collectives;  /* does collectives in Python's way */
    PyObject *watched;      /* ((dict, name, function), ...): Python's way is taken once one of them was replaced */
    PyObject *find_tensors; /* finds the tensors in an output of any type */
    PyObject *model_traces; /* tuple of ModelTrace: of the groups that the units are spread over */
    struct fp_unit **units; /* all units, borrowed: a unit that goes takes itself out; in the order they joined */
    Py_ssize_t n_units;
    struct fp_unit **order; /* units by the end of their forward in this pass, borrowed; NULL: it is gone */
    Py_ssize_t n_order, room_order;
    struct fp_unit *last_forward, *last_refreshed; /* borrowed; see prefetch_forward */
    struct fp_unit *reducing;                      /* borrowed: the unit whose reduction was started last */
    struct fp_unit *halfway; /* borrowed: the one before, whose reduction may have a second half */
    fp_unit_ref *ref;
    int backward_prefetch, forward_prefetch;
    int synchronize;               /* 0: no_sync */
    int blocks;                    /* of no_sync that are open */
    int64_t resets;                /* how often all of them were ended at once */
    int through_python;            /* for this pass */
    int always_python;             /* a hook is set */
    int in_backward;               /* between the first before_backward and the end of that pass */
    int create_graph;              /* this backward's gradients may be differentiated: see fp_unshard_is_for_graph */
    int retain_graph;              /* and its graph may be gone through again */
    int closed;                    /* during a recovery or refresh: nothing may begin */
    Py_ssize_t depth;              /* units whose forward is under way */
    uintptr_t caller;              /* the thread that the iteration runs for: see fp_graph_caller */
    PyThread_type_lock lock;       /* who has it works on units in a backward, which has a thread for each device */
    unsigned long holder;          /* that thread */
    int held;                      /* how often it has it; 0: nobody */
    int has_secondary_shards;      /* of some unit */
    struct fp_unit **reduce_order; /* all units, borrowed; those with a secondary shard are reduced in it */
    Py_ssize_t reduce_order_at;    /* in it: whose turn is next in this backward */
    Py_ssize_t cursor;             /* in order: to which unit this backward has come */
    Py_ssize_t entries;            /* first forwards of units so far */
    fp_exchange *exchanges;        /* of this backward, one for each group */
    Py_ssize_t n_exchanges;
    PyObject *error;                  /* what is raised when this backward ends, on all ranks; or NULL */
    const struct fp_unit *error_unit; /* which that is of, borrowed */
    int64_t pass;
    int64_t
        optimizer_steps; /* between its backwards, of optimizers that hold some of its parameters: alike on all ranks */
    int64_t gathers, refreshes, reductions; /* how many there were: for tests and plans; refreshes: gathers of shards */
} fp_root;

/* One unit: _C.Unit. */
typedef struct fp_unit {
    PyObject_HEAD
    fp_root *root;               /* owned, or NULL before the unit has joined one */
    PyObject *name;              /* str */
    PyObject *on_param_replaced; /* called when parameters are not where they were put */
    PyObject *reason;
    PyObject *opaque; /* the same, when its last output had no tensor that was found; or NULL */
    PyObject
        *reduced; /* called with the index of a flat parameter whose gradient is reduced and in .grad; or None, NULL */
    fp_flat_param *flat_params;
    Py_ssize_t n_flat_params;
    struct fp_unit *next_forward;   /* borrowed: whose forward came next the last time */
    struct fp_unit *next_refreshed; /* borrowed: the same of those that were out of date */
    struct fp_unit *next_full;      /* borrowed: another one that stays full, in the process */
    struct fp_unit **full_at;       /* where this one is among them; NULL: it does not */
    fp_unit_ref *ref;
    int reshard_after_forward;
    int sharded;             /* some flat parameter is spread over ranks */
    int has_secondary_shard; /* forward and backward gather from one, until the shards change */
    int stale;               /* in this pass the first gather is from the shards, on all ranks */
    int suspect;             /* the next pass compares the shards with what it would gather from */
    int64_t stale_pass;      /* the last pass that began so */
    fp_pass_state pass;      /* changed by fp_iteration_move() alone */
    fp_unit_state state;     /* of its unsharded data; changed by fp_unshard_move() alone */
    Py_ssize_t depth;        /* forwards of this unit that are within each other */
    Py_ssize_t pending;      /* forwards whose inputs' gradients are waited for, to free what is frozen */
    int64_t rests;  /* generation: incremented at the end of each backward; callbacks of older forwards are ignored */
    uint64_t began; /* the moment at which the forward that is under way, or the last one, did; see fp_graph_now */
    int64_t gather_pass;        /* pass of the gather */
    int64_t entered_pass;       /* of its last forward */
    Py_ssize_t entered;         /* how many forwards that backward comes back to had ended when its first one began */
    Py_ssize_t entry;           /* which of all first forwards that was */
    int64_t accumulated_steps;  /* fp_optimizer_steps when it was gathered, or KEPT */
    int64_t gather_steps;       /* optimizer_steps of the root at the gather */
    int accumulated_in_no_sync; /* KEPT, for forwards too, until a rank calls it old: see fp_consensus_on_stale */
    int for_graph;              /* KEPT for a graph */
    unsigned observed,
        learned; /* kinds of forwards in which this rank, and all, know whether it is written before its turn */
    int saw_writes, written_ahead;  /* it was, on this rank; on some rank: it is not gathered ahead */
    int64_t seen_pass, seen_writes; /* fp_fresh_learn(): pass and writes when the forward came to the unit before */
    int64_t recorded;    /* optimizer_steps of the root when a backward with create_graph=True came to it last; or -1 */
    int task;            /* graph task that came to this unit last */
    Py_ssize_t position; /* in the order of this pass; -1: none */
} fp_unit;

enum { FP_PREFETCH_NONE = 0, FP_PREFETCH_PRE = 1, FP_PREFETCH_POST = 2 };

extern int64_t fp_optimizer_steps; /* of any optimizer in this process: decides nothing that ranks have not agreed on */

/* fp_state_next(), with RuntimeError naming the unit where event may not happen in state. */
int fp_unit_next(const fp_unit *unit, const fp_state_table *table, unsigned state, unsigned event, unsigned *next);

static inline int
fp_unit_is_in_forward(const fp_unit *unit)
{
    return unit->pass == FP_PASS_FORWARD || unit->pass == FP_PASS_FORWARD_AGAIN || unit->pass == FP_PASS_RECOMPUTING;
}

static inline int
fp_unit_awaits_backward(const fp_unit *unit)
{
    return unit->pass == FP_PASS_FORWARD_AGAIN || unit->pass == FP_PASS_AWAITING_BACKWARD;
}

/* A graph that a backward has recorded may use what is gathered before any hook of the unit is called. */
static inline int
fp_unit_is_recorded(const fp_unit *unit)
{
    return unit->recorded == unit->root->optimizer_steps;
}

/* RuntimeError that the unit cannot do what in the middle of a pass. */
int fp_unit_check_idle(const fp_unit *unit, const char *what);

/* All of its flat parameters are gathered, or being gathered. */
static inline int
fp_unit_is_full(const fp_unit *unit)
{
    return unit->state >= FP_UNIT_GATHERING;
}

PyObject *fp_root_units(const fp_root *root);       /* tuple of all units, for loops in which one may take itself out */
PyObject *fp_unit_collectives(const fp_unit *unit); /* what does collectives in Python's way; NULL: nobody */

/* Call each flat parameter of a unit, or each unit that is a root's when this begins, until one call gives another value than 0,
 * which is returned; -1 too where there is no memory. */
int fp_unit_each(const fp_unit *unit, int (*call)(fp_flat_param *flat_param));
int fp_root_each(fp_root *root, int (*call)(fp_root *root, fp_unit *unit));

/* fp_flat_buffers_can_join, _begin and _end for all flat parameters of a unit; 0 also where Python does the collectives. status < 0:
 * an exception is set, which stays. */
int fp_unit_can_join(const fp_unit *unit, int what);
int fp_unit_begin_together(const fp_unit *unit, int what);
int fp_unit_end_together(const fp_unit *unit, int what, int status);
