/* runtime/fp_flat_param.h -- one flat parameter of a unit: the tensors that it owns, and the tensors that modules and .grad
 * show in its place.
 *
 * A unit embeds its flat parameters (fp_unit.flat_params); only files of the runtime use them. The caller holds the GIL,
 * and in a backward the lock of the root. Numels and starts are in ELEMENTS. Functions that return int give 0, or -1 with
 * an exception set, unless they say more. name: the unit's name for messages.
 *
 * "Owners" are the Parameters that have a .grad: the original parameters (use_orig_params=True), else the shard alone.
 * "Nested" is a flat parameter with an outer group: its gradient is reduced over the secondary group in each micro-batch, and
 * from there over outer_group when gradients are synchronized. */
#pragma once

#include "core/fp_state.h"
#include "tensor/fp_flat_buffer.h"
#include "tensor/fp_gradients.h"
#include "python/fp_attributes.h"

/* The groups of a flat parameter, in Python _C.GROUP_SHARD and so on. FP_GROUPS + one of them: the second watcher of that
 * group. */
enum {
    FP_GROUP_SHARD = 0,     /* its ranks hold one shard each */
    FP_GROUP_REPLICATE = 1, /* its ranks hold the same shard */
    FP_GROUP_PARAM = 2,     /* its ranks hold one secondary shard each; forward and backward gather over it */
    FP_GROUP_OUTER = 3,     /* over it a rank gathers its secondary shard from the shards (nested) */
    FP_GROUPS = 4
};

/* The attributes of the modules, and the tensors that they list in parameters(). */
enum {
    FP_SHOWS_NOTHING = 0, /* the flat parameter has set no attribute yet */
    FP_SHOWS_PARAMS = 1,  /* original parameters, listed */
    FP_SHOWS_VIEWS = 2,   /* views; listed too if there are original parameters, as torch does in forward */
    FP_SHOWS_BOTH = 3     /* views; the original parameters are listed, so that zero_grad() finds them */
};

enum {
    FP_WANTED_GRADIENT = 1,    /* some rank gets a gradient in this backward */
    FP_WANTED_ACCUMULATED = 2, /* some rank has an accumulated gradient from earlier backwards */
};

typedef struct {
    /* Owned. fp_flat_param_read() sets all of them but views, extended and leaf. */
    fp_attributes attributes; /* the modules and names of the n original parameters */
    fp_geometry *geometry;    /* their places in the unsharded flat parameter */
    /* The owners: their places (geometry, if they are the original parameters), and their pieces of the shard. The arrays are
     * one block that begins at starts. */
    fp_param_pieces owners;
    fp_flat_buffer *flat;
    PyObject *shard;  /* the flat Parameter: 1-D, this rank's shard */
    PyObject *params; /* tuple [n]: the original Parameters; NULL: use_orig_params=False, modules always have views */
    PyObject *views;  /* tuple [n] over the flat buffer; NULL before fp_unshard_make_views() */
    /* extension(views): a tuple [n] of tensors that modules have in place of the views (DTensors, say); NULL: none. */
    PyObject *extension;
    PyObject *leaf;  /* autograd gives the gradient of the views to leaf; NULL: the node behind them calls the unit */
    PyObject *dress; /* dress(views): gives new views the classes of their parameters, in place; NULL: not needed */
    PyObject *extended; /* the tuple that extension gave last; NULL while modules have the original parameters */

    fp_put_aside aside; /* its arrays are one block that begins at has */

    int gathered;         /* 1: the flat buffer is gathered, or its gather is under way */
    int shows;            /* FP_SHOWS_*; set by fp_flat_param_show() and fp_flat_param_list_params() */
    fp_shown_state shown; /* the gradient that .grad of the owners shows; changed by move_shown() alone */
    int64_t versions;     /* fp_flat_param_versions() at the last gather; -1: not valid */

    /* The least fp_flat_buffer_holders() before a forward since the views were made. If there are more before a backward,
     * a graph has saved some of them. */
    int64_t holders;
    int64_t synced;       /* fp_flat_param_versions() at the last gather from the shards; -1: out of date since */
    int64_t synced_steps; /* fp_optimizer_steps at that gather */

    /* The backward under way. fp_consensus_read() sets wanted. */
    fp_reduce_slot_state reduce_slot; /* changed by fp_reduce_order_move(), reset by fp_reduce_order_forget() */
    unsigned wanted;                  /* a set of FP_WANTED_*, alike on all ranks of the group */
} fp_flat_param;

/* Its settings; borrowed. */
static inline const fp_flat_buffer_plan *
fp_flat_param_plan(const fp_flat_param *flat_param)
{
    return fp_flat_buffer_plan_of(flat_param->flat);
}

/* 1: the gathered data, or a secondary shard, is used again until the shards change. */
static inline int
fp_flat_param_has_secondary_shard(const fp_flat_param *flat_param)
{
    return fp_flat_param_plan(flat_param)->primary.n > 1 &&
           (fp_flat_param_plan(flat_param)->stays_full || fp_flat_param_plan(flat_param)->secondary.group != NULL);
}

/* 1: the gathered data keeps its memory after a forward and a backward, as there is no secondary group to gather it over
 * again. */
static inline int
fp_flat_param_stays_full(const fp_flat_param *flat_param)
{
    return fp_flat_param_plan(flat_param)->primary.n > 1 && fp_flat_param_plan(flat_param)->stays_full &&
           fp_flat_param_plan(flat_param)->secondary.group == NULL;
}

/* 1: when the views were made, no owner required grad, so they have no autograd node. */
static inline int
fp_flat_param_is_untracked(const fp_flat_param *flat_param)
{
    return flat_param->views != NULL && !fp_flat_buffer_has_node(flat_param->flat);
}

/* 1: a backward reduces its gradients in each micro-batch, over the secondary group, also where no_sync accumulates them. */
static inline int
fp_flat_param_is_nested(const fp_flat_param *flat_param)
{
    return fp_flat_param_plan(flat_param)->outer_group != NULL;
}

/* ---- life ---- */

/* Fill zeroed memory from an object with the attributes of FlatParamSpec (flatparam/fsdp/sharding/flat_param.py). TypeError or
 * ValueError for one that does not fit. The caller calls fp_flat_param_free() also after a failure. */
int fp_flat_param_read(fp_flat_param *flat_param, PyObject *spec);
void fp_flat_param_free(fp_flat_param *flat_param);
int fp_flat_param_traverse(fp_flat_param *flat_param, visitproc visit, void *arg);

/* ---- the attributes of modules ---- */

/* Give the modules the views (1) or the original parameters (0), even if they have them already. An extension makes its tensors
 * anew each time, as they belong to the graph of one forward. Setting an attribute may run code of the user. */
int fp_flat_param_show(fp_flat_param *flat_param, int views);
/* fp_flat_param_show() with 1 and 0, unless the modules have them already. _show_views() sets tensors of an extension each
 * time. _show_params() does nothing if there are no original parameters. */
int fp_flat_param_show_views(fp_flat_param *flat_param);
int fp_flat_param_show_params(fp_flat_param *flat_param);
/* While modules have views: let parameters() and zero_grad() find the original parameters. */
int fp_flat_param_list_params(fp_flat_param *flat_param);

/* ---- the changes of users ---- */

/* A number that grows with each write that torch counts to the shard, or to an owner that has elements here, and each time that
 * the shard gets another storage. It says nothing about writes of other ranks. */
int64_t fp_flat_param_versions(const fp_flat_param *flat_param);
/* 1 if the gathered data can be used as it is. Each function asks for more than the one before:
 *   trains   views have a node if, and only if, an owner requires grad now
 *   counts   and versions has not changed since the gather
 *   is       and no view was written, and the modules have what they were given; -1 with an exception of a module */
int fp_flat_param_trains_as_gathered(const fp_flat_param *flat_param);
int fp_flat_param_counts_as_gathered(const fp_flat_param *flat_param);
int fp_flat_param_is_as_gathered(fp_flat_param *flat_param);
/* Borrowed: a tuple [n] of the attributes of modules that show views: the views, or the tensors of the extension. NULL: there
 * are none yet. */
PyObject *fp_flat_param_attributes(const fp_flat_param *flat_param);
/* The values change: let autograd refuse a backward through graphs that have saved the views, or tensors of the extension. */
int fp_flat_param_refuse_graphs(fp_flat_param *flat_param);
/* Borrowed: the original parameter in whose place modules have view, if views have a node; NULL, without an exception: none. */
PyObject *fp_flat_param_of_view(const fp_flat_param *flat_param, PyObject *view);
/* For views without a node: if the user let one require grad, its parameter requires grad instead. RuntimeError, naming the
 * parameter, if a graph has used that view already: nobody would reduce its gradient. */
int fp_flat_param_take_requires_grad(const fp_flat_param *flat_param, PyObject *name);
/* The index of the first parameter that the user has replaced: its data is not its piece of the shard, or a module has another
 * object. n: none; -1: error. _find_other looks at the modules alone. */
Py_ssize_t fp_flat_param_find_moved(fp_flat_param *flat_param);
Py_ssize_t fp_flat_param_find_other(fp_flat_param *flat_param);
/* Copy what users wrote to the views into the shard. 1: the shard has changed; 0: nobody wrote to a view; -1: ValueError
 * for data of another shape, dtype or device, RuntimeError for a write while the views were out of date. Such writes are
 * dropped. leaves: as in fp_flat_buffer_take_written(). */
int fp_flat_param_take_written(fp_flat_param *flat_param, PyObject *name, int leaves);
/* Set the data of the original parameters to their pieces of the shard. Does nothing without original parameters. */
int fp_flat_param_alias(fp_flat_param *flat_param);
/* Replace the i-th original parameter by param. IndexError, TypeError. The gathered data counts as out of date afterwards. */
int fp_flat_param_adopt(fp_flat_param *flat_param, Py_ssize_t i, PyObject *param);

/* ---- .grad ---- */

/* The flat parameters in this process whose .grad an optimizer must not step with: it is accumulated and not reduced, or of
 * another dtype. */
extern int64_t fp_flat_param_not_steppable;

/* ValueError if a user has freed or resized the storage of a .grad: torch's operations would read and write beyond it. */
int fp_flat_param_check_grads(const fp_flat_param *flat_param, const char *name);
/* Show the accumulated gradient in .grad. A reduced gradient that .grad showed is put aside (deferred_reduced). Where neither a
 * group nor a driver reduces, it is added to the accumulated gradient instead. */
int fp_flat_param_show_accumulated(fp_flat_param *flat_param, const char *name);
/* Read the user's edits of .grad while it showed the accumulated gradient, by the table in tensor/fp_gradients.h. Then show the
 * reduced gradient, or none. drops_zeros: see fp_gradients_check_accumulated(). -1: ValueError for an edit that cannot count;
 * the accumulated gradient is dropped. */
int fp_flat_param_note_user_edits(fp_flat_param *flat_param, const char *name, int drops_zeros);
/* Between passes: the same as fp_flat_param_note_user_edits(), and then show the rest of the accumulated gradient again. */
int fp_flat_param_sync_shown_grads(fp_flat_param *flat_param, const char *name, int drops_zeros);
/* Add each owner's piece of reduced, which is borrowed, to its .grad, and call the owner's hooks. Owners that are frozen get a
 * piece only if they have a frozen share, which ends here. */
int fp_flat_param_add_reduced(fp_flat_param *flat_param, const fp_reduced *reduced, const char *name);
/* The reduced gradient that .grad of the owners shows, with zeros where an owner has none. A new reference: the tensor in which
 * all of them lie as pieces, or else a new one. None: no owner has one. */
PyObject *fp_flat_param_reduced(fp_flat_param *flat_param);
/* Nested: cleared[owners.n] are sums of aside.cleared over the ranks. Clear the accumulated gradient of the owners whose sum
 * is not 0. 1: an owner that trains, or has a frozen share, is not cleared; 0: all are cleared, and the accumulated
 * gradient is dropped; -1. */
int fp_flat_param_clear_accumulated(fp_flat_param *flat_param, const int32_t *cleared);
/* Replace the accumulated gradient, without showing it. accumulated: None, or a tensor that
 * fp_flat_buffer_check_accumulated() has checked. frozen_share: a tuple of bools, one per owner. A reduced gradient that
 * was put aside is shown again. */
int fp_flat_param_set_accumulated(fp_flat_param *flat_param, PyObject *accumulated, PyObject *frozen_share);
/* Drop the accumulated gradient, shown or not. A reduced gradient that was put aside is shown again. Errors are ignored. */
void fp_flat_param_drop_accumulated(fp_flat_param *flat_param);
