/* runtime/fp_types.h -- the structs of the runtime: a unit (_C.Unit), and the root (_C.Root) that the units of a model share.
 *
 * The GIL protects every field. In a backward autograd runs nodes in several threads, and they give up the GIL while they wait
 * for a collective. Therefore they also take turns under fp_root.lock (runtime/fp_iteration.c).
 *
 * A "pass" is one iteration of the model, numbered by fp_root.pass from 1 on. A pass number of -1 or 0 means
 * "never".
 *
 * Files of the runtime include each other one way. A file in this list includes the files above it, not those below it:
 *     fp_types, fp_flat_param    the structs; one flat parameter
 *     fp_members                 which units are in the model now
 *     fp_check                   the invariants of these structs, for `make check-build`
 *     fp_fresh                   does the gathered data have the current values?
 *     fp_unshard, fp_reduction   the gathers and the reductions of one unit
 *     fp_consensus               what ranks tell each other about units
 *     fp_reduce_order            when each unit with a secondary shard is reduced
 *     fp_iteration               an iteration of the model: threads, order, recovery
 *     fp_forward, fp_backward    the entry points for Python and for autograd
 *     fp_unit, fp_root           the Python types */
#pragma once

#include "python/fp_lock.h"
#include "runtime/fp_flat_param.h"

struct fp_unit;

/* A growing array of units, zeroed at first. */
typedef struct {
    struct fp_unit **items; /* [n], with memory for room; the array is owned, the units are borrowed */
    Py_ssize_t n, room;
} fp_unit_list;

int fp_unit_list_reserve(fp_unit_list *list, Py_ssize_t room);  /* memory for room units; 0; -1 with MemoryError */
int fp_unit_list_add(fp_unit_list *list, struct fp_unit *unit); /* 0; -1 with MemoryError, not after a reserve */
void fp_unit_list_remove(fp_unit_list *list, const struct fp_unit *unit);
/* New tuple of the units, which it keeps alive: for loops that run Python code, in which a unit may leave the list. */
PyObject *fp_unit_list_copy(const fp_unit_list *list);

/* One all-reduce of flags over one group, about the units that are sharded over it. fp_consensus.c makes and frees it. The
 * units and their order are the same on all ranks of the group. */
typedef struct {
    fp_sum *sum;            /* owned; the all-reduce under way. NULL before it starts and after its result was read */
    struct fp_unit **units; /* [n] owned references */
    Py_ssize_t n, n_flags;
    /* [n_flags] Before the read: this rank's flags; after it: their sums over the ranks. The last `ranks` of them are error
     * slots, one a rank: 1 + the index in units of the unit that raised there; 0: none did. */
    int32_t *flags;
    int rank, ranks; /* this rank in the group; the group's size */
} fp_exchange;

/* The consensus in a backward: fp_consensus.h. Zeroed outside of a backward. */
typedef struct {
    fp_exchange *exchanges; /* [n] owned, one a group */
    Py_ssize_t n;
    PyObject *error;                  /* owned; the first error of this rank that all ranks raise at the end; or NULL */
    const struct fp_unit *error_unit; /* borrowed; the unit that raised it */
} fp_consensus;

/* The units in the model: fp_members.h. */
typedef struct {
    PyObject *model; /* owned; a weak reference to the outermost module; NULL: none was given, or the module is freed */
    /* Owned; a set of the addresses of modules, and of the units in the model. NULL: nobody has asked yet in this forward or
     * backward. */
    PyObject *found;
} fp_members;

/* Whether a forward or backward of a model may begin; in a backward, the fate of its graph. Alike on all ranks. */
typedef enum {
    FP_PHASE_OPEN = 0, /* a forward or backward may begin; forwards may be under way */
    FP_PHASE_CLOSED,   /* a recovery or refresh() is under way: none may begin */
    FP_PHASE_FREES,    /* a backward, and its graph is freed */
    FP_PHASE_RETAINS,  /* a backward, and its graph may be used again (retain_graph=True) */
    FP_PHASE_RECORDS,  /* a backward, and its gradients may be differentiated (create_graph=True) */
} fp_phase;

/* What fp_root.counts counts: gathers of sharded units; gathers of secondary shards from the shards, one a unit; reductions,
 * one a flat parameter. */
enum { FP_COUNT_GATHERS, FP_COUNT_REFRESHES, FP_COUNT_REDUCTIONS, FP_COUNTS };

/* _C.Root. Units own it (fp_unit.root); it borrows them. A unit that is freed takes itself out of every list here
 * (fp_iteration_leave_root). */
typedef struct {
    PyObject_HEAD
    /* Owned callbacks and settings. The constructor sets them; Root.tell() sets model_traces. */
    PyObject *collectives; /* Python object that does the collectives while through_python is 1 */
    /* ((dict, name, function), ...): once a user has replaced one, through_python becomes 1. NULL: it is 1 in each pass. */
    PyObject *watched;
    /* find_tensors(output): an iterable of the tensors in an output whose type is no tuple, list or dict. */
    PyObject *find_tensors;
    PyObject *model_traces; /* tuple of ModelTrace: they are told where passes begin and backwards end */

    /* Units: all pointers are borrowed. */
    fp_unit_list units; /* in the order in which they joined; with removed ones that live: fp_members.h */
    /* The post-forward order of this pass. An entry is NULL if its unit is gone. A unit whose forward ran twice has two
     * entries. Empty when a pass begins and after a backward. */
    fp_unit_list order;
    /* The unit whose forward began last in this pass, and the stale one: the next unit is noted as their next_forward and
     * next_refreshed. NULL when a pass begins. */
    struct fp_unit *last_forward, *last_refreshed;
    struct fp_unit *reducing; /* the unit whose reduction started last in this backward; NULL: none */
    struct fp_unit *halfway;  /* the unit before it: its second reduction, over replicas, may be under way */

    fp_unit_ref *ref;  /* autograd calls the end of a backward through it; it outlives this object */
    unsigned prefetch; /* a set of FP_PREFETCH_* */
    /* Units with fewer unsharded bytes that follow each other are gathered as one, up to about so many bytes. 0: none. */
    int64_t min_unit_bytes;
    int blocks;     /* no_sync() blocks that are open; 0: a backward reduces the gradients, else it accumulates them */
    int64_t resets; /* calls of end_all_no_sync(): a block that began before the last one is no longer open */
    int through_python; /* decided when a pass begins: collectives go through Python */

    /* A backward is under way from the first call of autograd until finish() in fp_backward.c. A backward that raised stays
     * under way, and the next call recovers. */
    fp_phase phase;

    /* Threads: fp_iteration.c. */
    Py_ssize_t depth; /* forwards under way, those inside another one included */
    uintptr_t caller; /* the user's thread of the iteration (fp_graph_caller); valid if depth > 0 or in a backward */
    fp_lock lock;     /* a thread holds it while it works on units in a backward */

    /* Reduce order: fp_reduce_order.h. */
    /* All units. Empty, and the next two unused, until a unit with a secondary shard joins. */
    fp_unit_list reduce_order;
    Py_ssize_t reduce_order_at; /* index in reduce_order of the unit whose turn is next; units.n: no turn is left */
    Py_ssize_t cursor;          /* index in order of the unit that this backward has come to; order.n: none yet */
    Py_ssize_t entries;         /* first forwards of units in a pass, counted over all passes: the next fp_unit.entry */

    fp_consensus consensus;
    fp_members members;

    /* Counters that never decrease. */
    int64_t pass; /* passes begun; incremented before the first collective of a pass */
    /* Grows with each step, outside of a backward, of an optimizer that holds parameters of the units. Alike on all ranks. */
    int64_t optimizer_steps;
    int64_t counts[FP_COUNTS]; /* for tests alone */
} fp_root;

/* Whether the gathered data, or the secondary shard, of a unit is older than some rank's shard. Alike on all ranks. */
typedef enum {
    FP_STALE_NO = 0,
    FP_STALE_YES,      /* the next gather is from the shards */
    FP_STALE_GATHERED, /* it was stale when this pass began, and was gathered from the shards since */
} fp_staleness;

/* _C.Unit. It owns its flat parameters. Autograd refers to it by ref, which outlives it. */
typedef struct fp_unit {
    PyObject_HEAD
    fp_root *root;               /* owned; NULL before join(), and after the garbage collector has cleared the unit */
    PyObject *name;              /* str: names the unit in messages */
    PyObject *on_param_replaced; /* on_param_replaced(): a user moved or replaced a parameter; Python takes it back */
    PyObject *reason;            /* str: the message of the error when freed data is read */
    PyObject *opaque;            /* str: the message in place of reason, if the last output had no tensor; else NULL */
    /* reduced(index): called when .grad has the reduced gradient of the flat parameter of this index; or None, or NULL. */
    PyObject *reduced;
    fp_flat_param *flat_params; /* [n_flat_params] owned */
    Py_ssize_t n_flat_params;
    struct fp_unit *next_forward;   /* borrowed; the unit whose forward followed when this one ran last: prefetched */
    struct fp_unit *next_refreshed; /* borrowed; the same among the units that were stale */
    fp_unit_ref *ref;               /* hooks and nodes call the unit through it */

    /* Settings, alike on all ranks. */
    int reshard_after_forward;

    /* Staleness: fp_fresh.c. */
    fp_staleness stale;
    int suspect; /* set by Python, say after an interruption: the next pass compares the gathered data with the shard */

    /* The iteration. */
    fp_pass_state pass;  /* changed by fp_iteration_move() alone */
    fp_unit_state state; /* of its unsharded data; changed by fp_unshard_move() alone */
    Py_ssize_t depth;    /* forwards of this unit under way, one inside the other */
    Py_ssize_t pending;  /* forwards with inputs whose gradients are not there yet; frozen data may be freed at 0 */
    int64_t backwards;   /* backwards that have ended; inputs_done() of a forward before the last one is ignored */
    uint64_t began;      /* fp_graph_now() at the start of its outermost forward, the one under way or the last one */
    int64_t gather_pass; /* the last pass that gathered or used the unsharded data; -1: the data is not valid */
    Py_ssize_t entered;  /* root->order.n when its first forward of that pass began */
    /* Number of that first forward, counted by root->entries: units are reduced in reverse of it. -1: none in this pass. */
    Py_ssize_t entry;

    /* Validity of the unsharded data: fp_fresh.c. */
    int64_t data_steps; /* fp_optimizer_steps at the gather, or when no_sync kept the data; -1: no forward may use it */
    int64_t gather_steps; /* root->optimizer_steps at the gather */
    int for_graph;        /* 1: a graph recorded with create_graph=True needs the data, so it is not freed */

    /* Writes to the shard between the start of a forward of the model and this unit's turn, which forbid gathering ahead:
     * fp_fresh.c. */
    unsigned ahead; /* a set of FP_AHEAD_* */
    /* The count of writes at the forward of the unit before this one, with min_unit_bytes at the first forward of the pass;
     * -1: not noted in this pass. */
    int64_t seen_writes;

    int64_t recorded;    /* root->optimizer_steps when for_graph was set last; -1: never */
    int task;            /* autograd's graph task that came to this unit last */
    Py_ssize_t position; /* index in root->order of its last forward in this pass; -1: not in root->order */
} fp_unit;

/* What is known of writes to a unit in a forward, before the unit's turn. */
enum {
    /* This rank has watched a forward that records no gradients, and one that does. */
    FP_AHEAD_OBSERVED_NOT_RECORDING = 1,
    FP_AHEAD_OBSERVED_RECORDING = 2,
    FP_AHEAD_OBSERVED = 3,
    /* All ranks have told each other what they saw in such a forward. */
    FP_AHEAD_LEARNED = FP_AHEAD_OBSERVED << 2,
    FP_AHEAD_SAW_WRITES = 16, /* this rank saw such a write */
    FP_AHEAD_WRITTEN = 32,    /* some rank did; alike on all ranks */
};

/* When the next unit is gathered. */
enum {
    FP_PREFETCH_PRE = 1,     /* before the backward of a unit */
    FP_PREFETCH_POST = 2,    /* after it */
    FP_PREFETCH_FORWARD = 4, /* while a unit's forward computes; on an accelerator that is always done */
};

/* Steps of all optimizers in this process. Ranks may count differently, so it decides nothing before ranks have agreed. */
extern int64_t fp_optimizer_steps;

/* fp_state_next() for a unit. -1 with RuntimeError that names the unit if event is illegal in state. Changes nothing else. */
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

/* 1: a backward with create_graph=True has recorded a graph, and no optimizer has stepped since. A backward through that graph
 * may read the gathered data before any hook of the unit is called. */
static inline int
fp_unit_is_recorded(const fp_unit *unit)
{
    return unit->recorded == unit->root->optimizer_steps;
}

/* 1: a backward of the model is under way, or has raised and nobody has recovered yet. */
static inline int
fp_root_in_backward(const fp_root *root)
{
    return root->phase >= FP_PHASE_FREES;
}

/* 1: a backward reduces the gradients; 0: it accumulates them, as a no_sync() block is open. */
static inline int
fp_root_synchronizes(const fp_root *root)
{
    return root->blocks == 0;
}

/* The flat parameters of a unit have one placement: alike on all ranks. */
static inline int
fp_unit_is_sharded(const fp_unit *unit)
{
    return unit->n_flat_params > 0 && fp_flat_param_plan(&unit->flat_params[0])->primary.group != NULL;
}

/* 1: the flat parameters have a secondary shard, or stay gathered until their shards change. */
static inline int
fp_unit_has_secondary_shard(const fp_unit *unit)
{
    return unit->n_flat_params > 0 && fp_flat_param_has_secondary_shard(&unit->flat_params[0]);
}

/* -1 with RuntimeError if a forward of the unit, or a backward of the model, is under way. what: the refused action, as a verb
 * phrase for the message. */
int fp_unit_check_idle(const fp_unit *unit, const char *what);

/* 1: all flat parameters of the unit are gathered, or their gathers are under way. */
static inline int
fp_unit_is_full(const fp_unit *unit)
{
    return unit->state >= FP_UNIT_GATHERING;
}

PyObject *
fp_unit_collectives(const fp_unit *unit); /* borrowed: the Python object that does collectives; NULL: C does */

/* Call a function for each flat parameter of a unit, or for each unit that the root has at the start. Stop at the first result
 * other than 0 and return it. fp_root_each also returns -1 with MemoryError. */
int fp_unit_each(const fp_unit *unit, int (*call)(fp_flat_param *flat_param));
int fp_root_each(fp_root *root, int (*call)(fp_root *root, fp_unit *unit));

/* fp_flat_buffers_can_join, _begin and _end (tensor/fp_flat_buffer.h) for all flat parameters of a unit. what: FP_JOIN_*.
 * 0 also for a unit with one flat parameter, or if Python does the collectives: then each collective is a call of its own.
 * status: result of the calls between begin and end. If it is < 0 its exception stays set, and -1 is returned. */
int fp_unit_can_join(const fp_unit *unit, int what);
int fp_unit_begin_together(const fp_unit *unit, int what);
int fp_unit_end_together(const fp_unit *unit, int what, int status);
