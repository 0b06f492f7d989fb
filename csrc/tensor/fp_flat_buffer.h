/* tensor/fp_flat_buffer.h -- the flat buffer of one flat parameter: the shards are gathered into it, modules compute with
 * views of it, and the gradients of the views are reduced to the gradient of the shard. Plain C, under the rules of
 * fp_torch.h. csrc/runtime decides when each step is due, and owns the shard and the views. The GIL protects the state; a call
 * that waits releases it, so in a backward the lock of the root keeps other threads out.
 *
 *     prepare -> views            once; again when the dtype or device of the shard has changed
 *     gather -> wait              before forward and backward: the shards of all ranks into the flat buffer
 *     release                     after them: the storage has 0 bytes, the views stay
 *     pack -> start_reduce -> advance_reduce -> finish_reduce     the gradient of the shard
 *     accumulate                  instead of these four in no_sync
 *
 * With a secondary shard the first gather after a change of the shards also makes this rank's part of the values the secondary
 * shard. Later gathers are from the secondary shards, over fewer ranks.
 *
 * States: the storage is in one of fp_data_state, the gradient in one of fp_gradient_state; core/fp_state.c has the legal
 * moves. A call in the wrong state raises RuntimeError, which names the states in which it is possible, and changes nothing.
 *
 * Arguments that many calls share:
 *   shard        [shard_numel] this rank's shard, contiguous
 *   views        [n] the objects that fp_flat_buffer_views() gave
 *   collectives  NULL: issue collectives from C++; else the Python object that issues them, and waits for them itself */
#pragma once

#include "tensor/fp_channel.h"
#include "tensor/fp_graph.h"

FP_BEGIN_C

/* The ranks that have one part each of a flat parameter, all equally long. */
typedef struct {
    int n, rank;     /* the number of parts; this rank's, 0 <= rank < n */
    fp_group *group; /* those ranks; NULL if n == 1 */
} fp_sharding;

/* The settings of a flat buffer, which never change. The flat buffer owns the groups. */
typedef struct {
    int64_t shard_numel;
    fp_sharding primary;       /* one shard each */
    fp_sharding secondary;     /* one secondary shard each; n divides primary.n. n == 1: there is no secondary shard */
    fp_group *replicate_group; /* gradients of the shard are added over it after primary.group; NULL: none */
    fp_group *outer_group;     /* nested: the ranks whose shards together are this rank's secondary shard, in order */
    double predivide, postdivide; /* gradients are divided by them before and after the sum over the ranks */
    int stays_full;               /* release() keeps the memory */
    int offloads;                 /* the accumulated gradient lies in host memory between backwards */
    int in_order;                 /* each rank's part of a gradient is added to .grad by itself, in rank order */
} fp_flat_buffer_plan;
typedef struct {
    fp_flat_buffer_plan plan;
    const fp_geometry *geometry;            /* the places of the parameters; total is primary.n * shard_numel. Shared */
    PyObject *compute_dtype, *reduce_dtype; /* torch.dtype; None: the shard's, and for reduce_dtype: compute_dtype */
    int full_precision;                     /* without a reduce_dtype, gradients are reduced in the shard's dtype */
    int keep_reduce_dtype;                  /* the gradient of the shard stays in reduce_dtype */
    PyObject *device;                       /* torch.device to compute on; None: the shard's */
} fp_flat_buffer_options;

typedef struct fp_flat_buffer fp_flat_buffer;
/* Make a flat buffer without memory; it owns the groups of the plan from now on. NULL with ValueError: the numbers or groups
 * of the plan do not fit together; then the caller owns the groups still. */
fp_flat_buffer *fp_flat_buffer_new(const fp_flat_buffer_options *options);
const fp_flat_buffer_plan *fp_flat_buffer_plan_of(const fp_flat_buffer *flat) FP_NOEXCEPT; /* borrowed */
void fp_flat_buffer_free_groups(const fp_flat_buffer_plan *plan);
/* In a build with FP_CHECK: print and abort if an invariant does not hold; see runtime/fp_check.h. */
void fp_flat_buffer_check(const fp_flat_buffer *flat, const char *where) FP_NOEXCEPT;
/* NULL is allowed. A pending collective keeps the memory until it has ended. */
void fp_flat_buffer_free(fp_flat_buffer *flat);

/* ---- the storage ---- */

/* Make the unsharded tensor for a shard of this dtype and device. Its storage is freed: an access raises reason
 * (fp_torch_free). If no values have to be gathered or converted (one shard, same dtype and device), it is the shard itself.
 * 1: it is new, and views must be made anew; 0: the present one fits; -1. */
int fp_flat_buffer_prepare(fp_flat_buffer *flat, PyObject *shard, const char *reason);
/* 1: the gathered flat buffer's storage, or else the shard's, has *present bytes and needs *needed: code outside has freed or
 * resized it. 0: both have enough; -1. */
int fp_flat_buffer_lacks_memory(const fp_flat_buffer *flat, PyObject *shard, int64_t *present, int64_t *needed);
/* Before a gather: if the memory is borrowed (a NumPy array), leave it to the borrower, and make an unsharded tensor with a
 * new storage. Graphs that need the old values are refused by autograd.
 * 1: it is new, and views must be made anew; 0: the memory is not borrowed; -1. */
int fp_flat_buffer_renew(fp_flat_buffer *flat, const char *reason);
/* Let the unsharded tensor's storage have the size 0 while it is freed, as drivers of handles expect. Call it before the first
 * fp_flat_buffer_prepare(). */
void fp_flat_buffer_lose_size(fp_flat_buffer *flat) FP_NOEXCEPT;
/* in_full: compute and reduce in the shard's dtype; else as the options say. It takes effect with the next prepare and
 * views. */
void fp_flat_buffer_compute_in_full(fp_flat_buffer *flat, int in_full) FP_NOEXCEPT;
int fp_flat_buffer_has_full_precision(const fp_flat_buffer *flat) FP_NOEXCEPT; /* full_precision of the options */

/* ---- the views ---- */

/* Make the views of the unsharded tensor behind one autograd node, which calls ref's unit with index, the index of this flat
 * parameter in the unit. untracked: the views are leaves without a node. leaf: NULL, or a leaf whose data is the unsharded
 * tensor: then the node calls no unit, and gives the gradient to leaf. out[n] receives new references; on failure none. */
int fp_flat_buffer_views(fp_flat_buffer *flat, fp_unit_ref *ref, int index, int untracked, PyObject *leaf,
                         PyObject **out);
int fp_flat_buffer_has_hooks(const fp_flat_buffer *flat) FP_NOEXCEPT; /* 1: that node has got hooks */
int fp_flat_buffer_has_node(const fp_flat_buffer *flat) FP_NOEXCEPT;  /* 0: the views are leaves, or there are none */
/* Let the node run only after all nodes that were recorded since began (fp_graph_now). Without this call it runs as soon as it
 * has a gradient of each view that the backward reaches; but a reentrant checkpoint may give more later. */
void fp_flat_buffer_run_after(fp_flat_buffer *flat, uint64_t began) FP_NOEXCEPT;
/* Let the node run on the stream that is current here, in a forward: autograd runs a node on the stream of its forward, and
 * this node serves many forwards. */
int fp_flat_buffer_run_here(fp_flat_buffer *flat, PyObject *const *views);
/* 1: the graph task that runs in this thread will run the node; 0: it will not, or none runs here. */
int fp_flat_buffer_is_reached(const fp_flat_buffer *flat) FP_NOEXCEPT;

/* ---- gather ---- */

/* Convert the shard into its place, and start to gather the shards of the other ranks. It waits for an earlier gather first.
 *   changed   the shard's values differ from those of the last gather: graphs that need those are refused by autograd
 *   refresh   gather from the shards, also where there is a secondary shard
 *   goes_on   an earlier call for the same values was interrupted: keep a secondary shard that it has begun
 *   reason    the message of an access to the unsharded tensor or a view before the wait; NULL: accesses are not refused.
 *             Values that were there before stay readable: they are the same, or their graph is refused
 * 1: it gathers from the shards, or the unsharded tensor is the shard; 0: from the secondary shards; -1: nothing is gathered,
 * though the storage may have memory. */
int fp_flat_buffer_gather(fp_flat_buffer *flat, PyObject *shard, PyObject *const *views, PyObject *collectives,
                          int changed, int refresh, int goes_on, const char *reason);
/* Join the collectives of one kind that n flat parameters begin between fp_flat_buffers_begin() and fp_flat_buffers_end() into
 * one call of the backend.
 *   _begin     1: joined: fp_flat_buffers_end() must follow, after a failure too, and then with no exception set; 0: as
 *              _can_join, and nothing has begun; -1
 *   _can_join  1: they can be joined; 0: n < 2, the CPU, several groups or a secondary shard, reductions in_order, or a
 *              backend that cannot join
 *   _end       issues the joined call. 0; -1 */
enum { FP_JOIN_GATHERS, FP_JOIN_REDUCTIONS, FP_JOIN_REPLICAS };
int fp_flat_buffers_can_join(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what);
int fp_flat_buffers_begin(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what);
int fp_flat_buffers_end(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what);
/* 1: the gathers of two flat parameters, of two units say, can be one collective: both go over one group, on one device, and
 * that is the CPU or its backend can join them; 0; -1. Alike on all ranks. */
int fp_flat_buffers_fit(const fp_flat_buffer *a, const fp_flat_buffer *b);
int64_t fp_flat_buffer_gathered_bytes(const fp_flat_buffer *flat) FP_NOEXCEPT; /* 0 before there are views */
/* On the CPU, pack the gathers that n flat parameters begin between these calls into one: their shards are copied into one
 * tensor, which is gathered once, and each flat parameter takes its values when it waits. All fit each other.
 *   _begin_pack    1: _gather_pack() must follow; 0: they are not on the CPU
 *   _gather_pack   0; -1: no gather has begun, and none of the n is gathered. failed: 1: one of them could not begin: -1 */
int fp_flat_buffers_begin_pack(fp_flat_buffer *const *flats, Py_ssize_t n) FP_NOEXCEPT;
int fp_flat_buffers_gather_pack(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *collectives, int failed);
/* 1: gathers run beside the computation, so that a prefetch saves time; 0: they would delay it. */
int fp_flat_buffer_gathers_ahead(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* Wait until the gather has ended: the host where collectives block it, else the current stream. The GIL is released. -1: the
 * wait was interrupted, and may be repeated; or the gather has failed, fp_flat_buffer_is_gathered() is 0, and the values are
 * undefined. */
int fp_flat_buffer_wait(fp_flat_buffer *flat);
/* Abandon a pending gather, as its pass was interrupted: other ranks may never issue theirs, so it waits 300 ms at most. The
 * memory stays allocated until the gather has ended, and the next gather waits for that. */
int fp_flat_buffer_give_up(fp_flat_buffer *flat);

/* ---- user writes ---- */

/* A user may change a view in place, which torch counts, or give it other data (view.data = ...).
 *   _is_changed  1: an in-place change was not taken yet
 *   _moved_view  the index of the first view with other data; -1: none
 *   _is_written  1: one of both */
int fp_flat_buffer_is_written(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
int fp_flat_buffer_is_changed(const fp_flat_buffer *flat) FP_NOEXCEPT;
Py_ssize_t fp_flat_buffer_moved_view(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
/* The number of references to the storage and the views. If there are more than before a forward, a graph may have saved a
 * view. */
int64_t fp_flat_buffer_holders(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
/* Take user writes: copy this rank's elements into the shard and all elements into the gathered buffer, and let moved views lie
 * at their places again. 1: the shard has changed; 0: it has not; -1. *misfit: the index of a view whose new data were dropped,
 * as they have another shape, dtype or device; n: an in-place change was lost, as nothing is gathered; -1: neither. leaves: 1:
 * if others hold the shard's memory (`kept = weight.data`), it is left to them with its values before data are copied. Then
 * what they hold of other parameters of this flat buffer no longer shares memory with it, either. */
int fp_flat_buffer_take_written(fp_flat_buffer *flat, PyObject *shard, PyObject *const *views, int leaves,
                                Py_ssize_t *misfit);
/* Drop in-place changes. */
void fp_flat_buffer_forget_written(fp_flat_buffer *flat) FP_NOEXCEPT;
/* The values will change: let autograd refuse a backward through graphs that need the present ones. */
void fp_flat_buffer_refuse_graphs(fp_flat_buffer *flat, PyObject *const *views);

/* ---- the values ---- */

/* Let the host wait until the device has read a shard that lies on the host; then the shard may be written. */
int fp_flat_buffer_wait_read(fp_flat_buffer *flat);
/* A counter: increased when shard has another storage than in the last call. */
int64_t fp_flat_buffer_sources(fp_flat_buffer *flat, PyObject *shard);
int fp_flat_buffer_is_gathered(const fp_flat_buffer *flat) FP_NOEXCEPT; /* 1: gathered, or being gathered */
/* 1: the gather belongs to another capture of a CUDA graph than the present one, so the values are not in the memory; 0. */
int fp_flat_buffer_is_void(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* 1: work on the current stream of its device is captured into a CUDA graph; 0. */
int fp_flat_buffer_is_captured(const fp_flat_buffer *flat) FP_NOEXCEPT;
int fp_flat_buffer_has_values(const fp_flat_buffer *flat) FP_NOEXCEPT; /* 1: gathered, or there is a secondary shard */
/* 1: the gathered buffer, or else the secondary shard, has the values of shard at this rank's elements, bit for bit; 0: it has
 * other values, or there are none; -1. It waits for a pending gather. */
int fp_flat_buffer_has_values_of(fp_flat_buffer *flat, PyObject *shard);
/* Wait for a pending gather, and free the memory; an access raises reason (fp_torch_free) from then on. If there is to be a
 * secondary shard and is none, it is cut first. Borrowed memory is left to the borrower, and the views in it move to a freed
 * storage. Nothing is freed with stays_full, if the unsharded tensor is the shard, or if the gather may never end. */
int fp_flat_buffer_release(fp_flat_buffer *flat, PyObject *const *views, const char *reason);
/* Copy this rank's part of the gathered values into the secondary shard, if there is to be one and is none. Call it after
 * fp_flat_buffer_wait(). The memory stays. */
int fp_flat_buffer_cut_secondary_shard(fp_flat_buffer *flat);
/* Let an access to the memory raise reason until the next gather or wait. The memory stays. While a gather is pending this does
 * nothing. */
int fp_flat_buffer_hide(fp_flat_buffer *flat, const char *reason);
/* Wait for a pending gather, and count the values as invalid: they do not become the secondary shard. The memory stays. If the
 * gather may never end this does nothing. _forget_values: drop the secondary shard, too. */
int fp_flat_buffer_forget_gathered(fp_flat_buffer *flat);
int fp_flat_buffer_forget_values(fp_flat_buffer *flat);
PyObject *fp_flat_buffer_secondary_shard(fp_flat_buffer *flat); /* [total / secondary.n], new reference; None: none */
PyObject *
fp_flat_buffer_unsharded(fp_flat_buffer *flat); /* [total], new reference; None before fp_flat_buffer_prepare() */

/* ---- gradients ---- */

/* Sum gradients from now on, and do not average them: the caller does. */
void fp_flat_buffer_average_elsewhere(fp_flat_buffer *flat);
/* Add the gradients of the views to the accumulated gradient: [total] in the shard's dtype, in fp32 if the shard is bf16 or
 * fp16. With offloads it goes to host memory. Nested: to the unreduced gradient of this backward, on the device. */
int fp_flat_buffer_accumulate(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard);
/* Pack the sum of the accumulated gradient and gradients into the input of the reduction. There is no accumulated gradient
 * afterwards. A second call before fp_flat_buffer_start_reduce() adds to the input. */
int fp_flat_buffer_pack(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard);
/* Start to reduce. If nothing is packed, pack the accumulated gradient and gradients (NULL: none) first; zeros if there is
 * neither, as the other ranks reduce theirs. how_far, for nested strategies only:
 *   FP_REDUCE_INNER   over secondary.group; the result is added to those of earlier backwards, and stays
 *   FP_REDUCE_OUTER   that sum over outer_group, to the shard
 *   FP_REDUCE_ALL     both */
enum { FP_REDUCE_INNER = 1, FP_REDUCE_OUTER = 2, FP_REDUCE_ALL = 3 };
int fp_flat_buffer_start_reduce(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard,
                                PyObject *collectives, int how_far);
/* Put a hash of which owners require grad into the events of the next reductions: ranks that differ in it raise. */
void fp_flat_buffer_note_trained(fp_flat_buffer *flat, PyObject *const *owners, Py_ssize_t n) FP_NOEXCEPT;
int fp_flat_buffer_is_packed(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* 1: the reduction over primary.group was started, and the one over replicate_group was not. */
int fp_flat_buffer_awaits_replicas(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* Wait for the collective under way, and start the next one, or the copy to a shard on the host. 1: only
 * fp_flat_buffer_finish_reduce() is left; 0: another step was started or is under way, or nothing was being reduced; -1. */
int fp_flat_buffer_advance_reduce(fp_flat_buffer *flat, PyObject *shard, PyObject *collectives);
/* Do all steps that are left, and wait. 1: *reduced is the gradient of the shard, on the shard's device, and its tensor a new
 * reference; 0: nothing was being reduced, or only FP_REDUCE_INNER; -1. */
int fp_flat_buffer_finish_reduce(fp_flat_buffer *flat, PyObject *shard, PyObject *collectives, fp_reduced *reduced);

int fp_flat_buffer_has_accumulated(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* 1: nested: gradients of this backward await their reduction, as more graph tasks come to the views. */
int fp_flat_buffer_has_unreduced(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* The accumulated gradient, [total], a new reference; nested: this rank's part of it, [total / secondary.n], summed over
 * secondary.group. None: there is none. If it lies in host memory, the host waits for its copy there, and the result is the
 * memory. */
PyObject *fp_flat_buffer_accumulated_grad(fp_flat_buffer *flat);
/* Check that accumulated can be the accumulated gradient: plain, of its shape, dtype and device. -1: ValueError or TypeError
 * that begins with name. */
int fp_flat_buffer_check_accumulated(const fp_flat_buffer *flat, PyObject *shard, PyObject *accumulated,
                                     const char *name);
/* Make accumulated, which was checked, the accumulated gradient. It is not copied; with offloads its values go to host memory.
 * -1: there is no accumulated gradient any more. */
int fp_flat_buffer_set_accumulated(fp_flat_buffer *flat, PyObject *accumulated);
/* Drop pending reductions, and if accumulated_too the accumulated gradient. */
void fp_flat_buffer_drop_grads(fp_flat_buffer *flat, int accumulated_too);
/* Start to copy the accumulated gradient from host memory to the device, ahead of its use. _drop_reload: free that copy if
 * nothing was added to it; host memory still has the values. */
int fp_flat_buffer_start_reload(fp_flat_buffer *flat);
int fp_flat_buffer_drop_reload(fp_flat_buffer *flat);
/* Let the current stream wait for copies of gradients to host memory, and free their sources. */
int fp_flat_buffer_wait_copies(fp_flat_buffer *flat);
/* The bytes of the accumulated gradient on the device that computes, and of its buffer in host memory. */
void fp_flat_buffer_accumulated_bytes(const fp_flat_buffer *flat, int64_t *device, int64_t *host) FP_NOEXCEPT;

FP_END_C
