/* runtime/fp_flat_param.h -- one flat parameter of a unit: what it owns, and what the modules and .grad show of it. */
#pragma once

#include "core/fp_state.h"
#include "tensor/fp_flat_buffer.h"
#include "tensor/fp_gradients.h"
#include "python/fp_attributes.h"

/* The groups of a flat parameter, in Python _C.GROUP_SHARD and so on: which shares it, replicates it, shares the secondary shard for
 * forward and backward, refreshes that. FP_GROUPS more: the same group's second watcher. */
enum { FP_GROUP_SHARD = 0, FP_GROUP_REPLICATE = 1, FP_GROUP_PARAM = 2, FP_GROUP_OUTER = 3, FP_GROUPS = 4 };

/* Nothing was put yet; the original parameters; views; views as attributes, while modules list the parameters. */
enum { FP_SHOWS_NOTHING = 0, FP_SHOWS_PARAMS = 1, FP_SHOWS_VIEWS = 2, FP_SHOWS_BOTH = 3 };

typedef struct {
    fp_attributes attributes;
    Py_ssize_t n;                /* parameters */
    fp_geometry *geometry;       /* of the parameters */
    fp_geometry *owner_geometry; /* of the owners */
    fp_group *shard_group, *replicate_group, *param_group, *outer_group;
    fp_flat_buffer *flat;
    PyObject *shard;          /* the flat Parameter that holds the shard */
    PyObject *params;         /* tuple of the original Parameters, or NULL: then the modules have views all the time */
    PyObject *views;          /* tuple, or NULL before the first gather */
    PyObject *extension;      /* called with views, gives what modules have in their place; NULL: they have views */
    PyObject *dress;          /* called with new views, makes them objects of their parameters' classes; or NULL */
    PyObject *extended;       /* the tuple that it gave last, for as long as modules have that; or NULL */
    PyObject *owners;         /* tuple of what has .grad: params, or (shard,) */
    int64_t *starts, *numels; /* of the owners, in the shard; numels -1: nothing here. One block */
    PyObject *deferred_reduced; /* the reduced gradient, put aside while the unsharded one is shown; or NULL */
    char *in_deferred_reduced;  /* of the owners: which had one */
    char *
        frozen_share; /* per owner: 1 if it is frozen now, but the accumulated gradient contains a contribution of it */
    char *receives;   /* of the owners: which get a piece of what was reduced */
    char *in_rows;    /* of the owners: whose piece here has the shape of whole rows, not one dimension */
    int is_sharded;
    int untracked;           /* no owner requires grad */
    int full_precision;      /* gradients are reduced and added in the shard's dtype, which is no low one */
    int gathered;            /* or being gathered */
    int shows;               /* what the modules have now: FP_SHOWS_... */
    fp_shown_state shown;    /* what .grad of the owners are; changed by move_shown() alone */
    int deferred;            /* gradients of this pass are kept though they are to be reduced */
    int64_t versions;        /* of the owners and the shard at the last gather */
    int has_secondary_shard; /* what is gathered is good until the shards change, not for one pass */
    int64_t holders;      /* of what is gathered and of its views before a forward: the fewest since they were made */
    int64_t synced;       /* versions at the last gather from the shards; -1: what it gave is out of date */
    int64_t synced_steps; /* optimizer steps then */
    int64_t accumulated_first,
        own;       /* nested: where the accumulated gradient begins in the whole one, and ours in the accumulated one */
    char *cleared; /* nested, of the owners: what other ranks are to clear of what they have kept too */
    fp_reduce_slot_state reduce_slot; /* in the order of reductions; changed by fp_reduce_order_move() alone */
    int wanted, wanted_accumulated; /* this backward gives some rank a gradient of it; some rank has kept one before */
} fp_flat_param;

/* Whether what is gathered keeps its memory. */
static inline int
fp_flat_param_stays_full(const fp_flat_param *flat_param)
{
    return flat_param->has_secondary_shard && flat_param->param_group == NULL;
}

/* Read one from Python into zeroed memory; give it to fp_flat_param_free also after a failure. See the docstring of _C.Unit. */
int fp_flat_param_read(fp_flat_param *flat_param, PyObject *tuple);
void fp_flat_param_free(fp_flat_param *flat_param);
int fp_flat_param_traverse(fp_flat_param *flat_param, visitproc visit, void *arg);

/* Let the modules have the views, or the original parameters, whatever they have now; fp_flat_param_show_views and _params: if
 * they have not. What an extension makes of views has a part in one forward's graph, so that is always made anew. */
int fp_flat_param_show(fp_flat_param *flat_param, int views);
int fp_flat_param_show_views(fp_flat_param *flat_param);
int fp_flat_param_show_params(fp_flat_param *flat_param);
/* Where the modules have views: let them list the parameters, as parameters() and zero_grad() see. */
int fp_flat_param_list_params(fp_flat_param *flat_param);
/* A number that grows with each change of the shard, and of the owners of which this rank has something, that torch counts, and
 * with each storage that the shard gets. */
int64_t fp_flat_param_versions(const fp_flat_param *flat_param);
/* Whether what was gathered last has views for who requires grad now; counts: and, as far as versions tell, the values of now;
 * is: and modules have just these. */
int fp_flat_param_trains_as_gathered(const fp_flat_param *flat_param);
int fp_flat_param_counts_as_gathered(const fp_flat_param *flat_param);
int fp_flat_param_is_as_gathered(fp_flat_param *flat_param);
/* What modules have where they have views, borrowed: those, or what the extension made of them. */
PyObject *fp_flat_param_attributes(const fp_flat_param *flat_param);
/* Let autograd refuse the graphs that need the values that are gathered, those of the extension too. */
int fp_flat_param_refuse_graphs(fp_flat_param *flat_param);
/* The original parameter in whose place modules have view, which has a node; borrowed; NULL: it is none of these. */
PyObject *fp_flat_param_of_view(const fp_flat_param *flat_param, PyObject *view);
/* Where views have no node: what somebody has let require grad is set on its parameter. RuntimeError, naming it in the
 * unit called name, if autograd would give that view a gradient which nobody reduces. */
int fp_flat_param_take_requires_grad(const fp_flat_param *flat_param, PyObject *name);
/* The first parameter whose data are not where they were put, or in place of which a module has something else; n: none;
 * -1 on failure. */
Py_ssize_t fp_flat_param_find_moved(fp_flat_param *flat_param);
/* The first one in place of which, or of whose view, a module has something else; n: none; -1. */
Py_ssize_t fp_flat_param_find_other(fp_flat_param *flat_param);
/* Take what users have written to the views into the shard: 1 if that has changed; 0; -1. ValueError, RuntimeError for what
 * cannot be taken, which is dropped; name: the unit's. */
int fp_flat_param_take_written(fp_flat_param *flat_param, PyObject *name);
/* Let the data of the original parameters, if there are any, be their pieces of the shard. */
int fp_flat_param_alias(fp_flat_param *flat_param);
/* Let another Parameter be the i-th original one. */
int fp_flat_param_adopt(fp_flat_param *flat_param, Py_ssize_t i, PyObject *param);

extern int64_t fp_flat_param_not_steppable; /* of how many .grad is not what an optimizer can step with */

/* Each .grad has the memory that it needs: torch's operations would read and write beyond a storage that a user has freed or
 * resized. */
int fp_flat_param_check_grads(const fp_flat_param *flat_param, const char *name);
/* Show the gradients that were accumulated in no_sync, and put a reduced one aside. */
int fp_flat_param_show_accumulated(fp_flat_param *flat_param, const char *name);
/* What the user has done to the unsharded gradients that were shown counts: a cleared one starts again. The reduced ones
 * are shown again. */
int fp_flat_param_note_user_edits(fp_flat_param *flat_param, const char *name);
/* The same between passes; what is left is shown again. drops_zeros: see fp_gradients_check_accumulated(). */
int fp_flat_param_sync_shown_grads(fp_flat_param *flat_param, const char *name, int drops_zeros);
/* Let the owners have their pieces of reduced, which is borrowed, added to what they have; their hooks see them. */
int fp_flat_param_add_reduced(fp_flat_param *flat_param, const fp_reduced *reduced, const char *name);
/* Nested: of the owners that are cleared on the ranks that have their pieces, nothing is kept here either. 1: there
 * may be something of others; 0; -1. */
int fp_flat_param_clear_accumulated(fp_flat_param *flat_param, const int32_t *cleared);
/* Let accumulated, checked by fp_flat_buffer_check_accumulated(), or None, be the gradient accumulated in no_sync, and owed, bools, say which
 * frozen owners have something in it. It is not shown yet; a reduced gradient that was put aside is shown again. */
int fp_flat_param_set_accumulated(fp_flat_param *flat_param, PyObject *accumulated, PyObject *frozen_share);
/* Drop the gradient accumulated in no_sync, whether it is shown or not; a reduced gradient that was put aside is shown again. */
void fp_flat_param_drop_accumulated(fp_flat_param *flat_param);
