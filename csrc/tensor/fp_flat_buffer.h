/* tensor/fp_flat_buffer.h -- one flat parameter of a unit, from shard to unsharded data to views to reduced gradient.
 * Plain C, under the rules of fp_torch.h.
 *
 * One flat at work:
 *     prepare -> views        (once; again when dtype or device of the shard have changed)
 *     gather -> wait          before forward and backward: the shard of every rank into one buffer. Where forward and
 *                             backward share it over other ranks than the optimizer does (param_group), the first gather
 *                             after a change of the shards leaves a secondary shard, from which the others gather
 *     free                    when nobody needs it: its storage has 0 bytes, the views stay
 *     keep -> reduce -> take  the gradients of the views, packed, reduced over the ranks, as the gradient of the shard */
#pragma once

#include "tensor/fp_channel.h"
#include "tensor/fp_graph.h"

FP_BEGIN_C

/* What does not change of it. */
typedef struct {
    int64_t shard_numel;
    int rank, shards;             /* which shard is ours, and how many there are */
    fp_group *shard_group;        /* NULL if shards == 1; borrowed, outlives the flat, as the other groups */
    fp_group *replicate_group;    /* gradients of the shard are added over it too; NULL: none */
    int param_rank, param_shards; /* the same of the secondary shard for forward and backward */
    fp_group *param_group;        /* the ranks that share the secondary shard; NULL: there is none */
    fp_group *outer_group;        /* nested: the ranks whose shards make up our secondary shard, in their order */
    double predivide, postdivide;
    int full_precision;    /* without a reduce_dtype, gradients are reduced in the shard's */
    int keep_reduce_dtype; /* the gradient stays in reduce_dtype */
    int stays_full;        /* free() keeps the memory */
    int offloads;          /* the accumulated gradient lies in host memory between backwards */
} fp_flat_buffer_plan;
typedef struct {
    fp_flat_buffer_plan plan;
    const fp_geometry *geometry;            /* its total is shards * shard_numel */
    PyObject *compute_dtype, *reduce_dtype; /* torch.dtype, or None: the shard's; reduce: compute_dtype */
    PyObject *device;                       /* torch.device to compute on; None: where the shard is */
} fp_flat_buffer_options;

typedef struct fp_flat_buffer fp_flat_buffer;
fp_flat_buffer *fp_flat_buffer_new(const fp_flat_buffer_options *options);
void fp_flat_buffer_free(fp_flat_buffer *flat); /* NULL is allowed */

/* Make the unsharded tensor for a shard of this dtype and device, freed: see fp_flat_buffer_release. 1: it is a new one, views
 * must be made anew; 0: there already; -1. */
int fp_flat_buffer_prepare(fp_flat_buffer *flat, PyObject *shard, const char *reason);
/* Whether the storage of the shard, or that of the unsharded tensor where that should be whole, has less memory than it
 * needs, in bytes: somebody outside has freed or resized it. -1: error. */
int fp_flat_buffer_lacks_memory(const fp_flat_buffer *flat, PyObject *shard, int64_t *present, int64_t *needed);
/* Before a gather: leave the memory to whoever outside has it (a NumPy array), where somebody has, and make an unsharded
 * tensor in memory of its own. 1: it is a new one, views must be made anew; 0: nobody has; -1. */
int fp_flat_buffer_renew(fp_flat_buffer *flat, const char *reason);
/* From now on compute and reduce in the shard's dtype, or again as the options say: prepare and make views anew. */
void fp_flat_buffer_compute_in_full(fp_flat_buffer *flat, int in_full) FP_NOEXCEPT;
/* Views of the unsharded tensor behind one node, which calls ref's unit. untracked: without a node. */
int fp_flat_buffer_views(fp_flat_buffer *flat, fp_unit_ref *ref, int index, int untracked, PyObject **out);
/* That node runs after all that was recorded since began (see fp_graph_now) and is ready when it is. Until it is told so,
 * it runs as soon as its gradients are there. */
void fp_flat_buffer_run_after(fp_flat_buffer *flat, uint64_t began) FP_NOEXCEPT;
/* That node runs on the stream that is current here, in a forward. */
int fp_flat_buffer_run_here(fp_flat_buffer *flat, PyObject *const *views);
/* Whether the graph task that runs in this thread comes to that node. */
int fp_flat_buffer_is_reached(const fp_flat_buffer *flat) FP_NOEXCEPT;

/* Write the shard to its place and start gathering. collectives: NULL, or the Python object that does it. changed: the
 * shard's values are not those of the gather before, so a graph that still needs those shall be refused by autograd.
 * refresh: from the shards, also where there is a secondary shard. goes_on: as was begun by a call that was broken off.
 * reason: what reading unsharded or a view says until _wait, if it had no values; NULL: nothing.
 * Returns 1: from the shards; 0: from the secondary shard; -1. */
int fp_flat_buffer_gather(fp_flat_buffer *flat, PyObject *shard, PyObject *const *views, PyObject *collectives,
                          int changed, int refresh, int goes_on, const char *reason);
/* What these begin between the two over one of their groups, gathers or reductions, is one call of its backend, where that
 * knows how: 1; else 0, and there is nothing to end. -1. What has begun is ended after a failure too, with no error set.
 * _can_join only tells: it begins nothing. */
enum { FP_JOIN_GATHERS, FP_JOIN_REDUCTIONS, FP_JOIN_REPLICAS };
int fp_flat_buffers_can_join(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what);
int fp_flat_buffers_begin(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what);
int fp_flat_buffers_end(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what);
/* Whether gathers run beside what is computed, so that it is worth while to begin the next one before. */
int fp_flat_buffer_gathers_ahead(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* Until the gather has ended. -1: the wait was broken off, and can be made again; or the gather has failed: then
 * fp_flat_buffer_is_gathered() is 0, and what is there shall not be used. */
int fp_flat_buffer_wait(fp_flat_buffer *flat);
/* Its pass is forgotten: a gather that other ranks do not come to is waited for no longer than a moment. What it writes to
 * stays until it has ended, and the next gather waits for that. */
int fp_flat_buffer_give_up(fp_flat_buffer *flat);

/* What users have written to the views. fp_flat_buffer_is_written: 1 if one was changed in place, as far as torch counts that, or
 * was given other data; _is_changed: if the former. fp_flat_buffer_moved_view: the first one that was given other data; -1: none.
 * fp_flat_buffer_take_written takes it: our part goes into the shard, all of it into what is gathered, and the views are where
 * they were. 1: the shard has changed; 0: it has not; -1. *misfit: the view whose new data have another shape, dtype or
 * device, so that they were dropped; n: one was changed in place where nobody reads that; else -1.
 * fp_flat_buffer_forget_written: what was changed in place is of no interest. */
int fp_flat_buffer_is_written(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
int fp_flat_buffer_is_changed(const fp_flat_buffer *flat) FP_NOEXCEPT;
Py_ssize_t fp_flat_buffer_moved_view(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
/* How many hold what is gathered, or views of it: more than before a forward: a graph may have saved some. */
int64_t fp_flat_buffer_holders(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
int fp_flat_buffer_take_written(fp_flat_buffer *flat, PyObject *shard, PyObject *const *views, Py_ssize_t *misfit);
void fp_flat_buffer_forget_written(fp_flat_buffer *flat) FP_NOEXCEPT;
/* Let autograd refuse the graphs that need the values that are gathered. */
void fp_flat_buffer_refuse_graphs(fp_flat_buffer *flat, PyObject *const *views);
/* The same for what the device reads of a shard on the host: it may be written to again. */
int fp_flat_buffer_wait_read(fp_flat_buffer *flat);
/* How often the shard was seen to have another storage than before. */
int64_t fp_flat_buffer_sources(fp_flat_buffer *flat, PyObject *shard);
int fp_flat_buffer_is_gathered(const fp_flat_buffer *flat) FP_NOEXCEPT; /* what was gathered is still there */
/* Whether that, or its gather, is void: of another capture of a CUDA graph than the current one, or of none. */
int fp_flat_buffer_is_void(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* Whether what is put to the current stream of its device goes into a CUDA graph. */
int fp_flat_buffer_is_captured(const fp_flat_buffer *flat) FP_NOEXCEPT;
int fp_flat_buffer_has_values(const fp_flat_buffer *flat) FP_NOEXCEPT; /* the same, or a secondary shard is */
/* 1 if what was gathered, or the secondary shard, has the values of shard for our part; 0: it has others, or is not
 * there; -1. */
int fp_flat_buffer_has_values_of(fp_flat_buffer *flat, PyObject *shard);
/* Free the memory, unless somebody outside has it; reading it raises reason, see fp_torch_resize_storage. Our part of what
 * was gathered becomes the secondary shard. */
int fp_flat_buffer_release(fp_flat_buffer *flat, PyObject *const *views, const char *reason);
/* From now on, until it is gathered anew or waited for, reading what is gathered raises reason. */
int fp_flat_buffer_hide(fp_flat_buffer *flat, const char *reason);
int fp_flat_buffer_forget_gathered(fp_flat_buffer *flat); /* what was gathered shall not become the secondary shard */
int fp_flat_buffer_forget_values(fp_flat_buffer *flat);   /* the same, and there is no secondary shard any more */
PyObject *fp_flat_buffer_secondary_shard(fp_flat_buffer *flat); /* new reference; Py_None */
PyObject *
fp_flat_buffer_unsharded(fp_flat_buffer *flat); /* the tensor, new reference; None before fp_flat_buffer_prepare() */
void fp_flat_buffer_average_elsewhere(fp_flat_buffer *flat); /* from now on gradients are summed, not averaged */

/* Add the gradients of the views to the unsharded gradient that is kept here, in the shard's dtype; in fp32 if that is a low
 * one. */
int fp_flat_buffer_accumulate(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard);
/* Put gradients, and the accumulated gradient, together as they are reduced; fp_flat_buffer_start_reduce sends that. Until then more may
 * join it. */
int fp_flat_buffer_pack(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard);
/* Start reducing what was packed, or the accumulated gradient and gradients (NULL: none). Nothing at all to reduce counts as zeros.
 * How far, nested only: over param_group, added to what earlier calls have left; from there to the shard; or both. */
enum { FP_REDUCE_INNER = 1, FP_REDUCE_OUTER = 2, FP_REDUCE_ALL = 3 };
int fp_flat_buffer_start_reduce(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard,
                                PyObject *collectives, int how_far);
/* Tell of the next reductions' events who requires grad now of these. */
void fp_flat_buffer_note_trained(fp_flat_buffer *flat, PyObject *const *owners, Py_ssize_t n) FP_NOEXCEPT;
int fp_flat_buffer_is_packed(const fp_flat_buffer *flat) FP_NOEXCEPT;
int fp_flat_buffer_awaits_replicas(const fp_flat_buffer *flat) FP_NOEXCEPT; /* that is the second one */
/* Wait for the collective that was started, start the second if there is one. 1: there is no further one; 0: there is, or
 * nothing was being reduced; -1. */
int fp_flat_buffer_advance_reduce(fp_flat_buffer *flat, PyObject *shard, PyObject *collectives);
/* Wait for all. 1: *reduced is the gradient of the shard, where the shard is, a new reference; 0: there is none; -1. */
int fp_flat_buffer_finish_reduce(fp_flat_buffer *flat, PyObject *shard, PyObject *collectives, fp_reduced *reduced);
int fp_flat_buffer_has_accumulated(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* The unsharded gradient, new reference; nested: our part of it, [param_shards * ...], added over param_group; Py_None. */
PyObject *fp_flat_buffer_accumulated_grad(fp_flat_buffer *flat);
/* Whether kept could be that: of its length, dtype and device, plain. -1: ValueError or TypeError that says it of name. */
int fp_flat_buffer_check_accumulated(const fp_flat_buffer *flat, PyObject *shard, PyObject *accumulated,
                                     const char *name);
/* Let accumulated, which was checked, be that; on the host where that is kept there. Where there is one, it is dropped first. */
int fp_flat_buffer_set_accumulated(fp_flat_buffer *flat, PyObject *accumulated);
void fp_flat_buffer_drop_grads(fp_flat_buffer *flat,
                               int accumulated_too); /* drop reductions under way; and the accumulated gradient */
/* Start the copy of what lies in host memory back to the device; and drop such a copy that nobody has added to. */
int fp_flat_buffer_start_reload(fp_flat_buffer *flat);
int fp_flat_buffer_drop_reload(fp_flat_buffer *flat);
/* No gradient is on its way to host memory any more that what comes next on the device could overtake. */
int fp_flat_buffer_wait_copies(fp_flat_buffer *flat);
/* Bytes of the accumulated gradient: on the device that the shard is on, and of the buffer for it in host memory. */
void fp_flat_buffer_accumulated_bytes(const fp_flat_buffer *flat, int64_t *device, int64_t *host) FP_NOEXCEPT;

FP_END_C
