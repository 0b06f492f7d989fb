/* tensor/fp_engine.h -- what the runtime's C glue may ask of libtorch: one flat parameter of a unit, from shard to
 * unsharded data to views to reduced gradient. Plain C, under the rules of fp_torch.h.
 *
 * One flat at work:
 *     prepare -> views        (once; again when dtype or device of the shard have changed)
 *     gather -> wait          before forward and backward: the shard of every rank into one buffer. Where forward and
 *                             backward share it over other ranks than the optimizer does (param_group), the first gather
 *                             after a change of the shards leaves a copy, from which the others gather
 *     free                    when nobody needs it: its storage has 0 bytes, the views stay
 *     keep -> reduce -> take  the gradients of the views, packed, reduced over the ranks, as the gradient of the shard */
#ifndef FP_ENGINE_H
#define FP_ENGINE_H

#include "tensor/fp_torch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ranks that share something. Counted by nobody: whoever made it frees it. */
typedef struct fp_group fp_group;

/* The process group that torch registered as name; NULL: every collective goes through Python. group is the Python
 * object, kept. */
fp_group *fp_group_new(PyObject *group, const char *name);
void fp_group_free(fp_group *group); /* NULL is allowed */

/* What is told of a group's collectives: before each, which it is (see fp_event), and a few times a second while one is
 * waited for, if sliced. Both are called with the GIL held and give 0, or -1 with an exception: then the collective does
 * not begin, or the wait ends. failed: one has, with this message; -1 with an exception to raise instead. is_broken: 1 if
 * those under way may never end. watcher is kept; number: in the events.
 * A group has a first watcher, and may have another one, which is told before it. */
typedef struct {
    int (*before)(PyObject *watcher, uint64_t event);
    int (*waiting)(PyObject *watcher);
    int (*failed)(PyObject *watcher, const char *message);
    int (*is_broken)(PyObject *watcher);
} fp_group_calls;
enum { FP_WATCHERS = 2 };
void fp_group_watch(fp_group *group, int which, PyObject *watcher, const fp_group_calls *calls, uint32_t number,
                    int sliced);

enum { FP_EVENT_GATHERS = 0, FP_EVENT_REDUCES = 1, FP_EVENT_AGREES = 4, FP_EVENT_KINDS = 8 }; /* others are Python's */
enum { FP_EVENT_TRAINED_BITS = 27 };
/* trained: of a reduction, a hash of who requires grad; else 0. An event has 62 bits. */
static inline uint64_t
fp_event(uint32_t number, unsigned kind, uint32_t trained)
{
    return ((uint64_t)trained << 32 | number) * FP_EVENT_KINDS + kind;
}

/* What runs when autograd comes to a unit. All are called with the GIL held and give 0, or -1 with an exception. began:
 * what fp_engine_hook was given. */
typedef struct fp_gradients fp_gradients; /* those of the views of one flat, during the call */
typedef struct {
    int (*before_backward)(void *unit, uint64_t began);
    int (*gradients_ready)(void *unit, int flat, fp_gradients *gradients);
    int (*before_accumulation)(void *unit, int flat); /* see fp_engine_watch */
} fp_module_params_calls;

/* A weak reference to a unit that nodes and hooks of a graph hold: they may outlive it. Counted. */
typedef struct fp_params_ref fp_params_ref;
fp_params_ref *fp_params_ref_new(void *unit, const char *name, const fp_module_params_calls *calls);
/* Nobody else holds unit any more: 1 if a graph waits for its backward and keeps it now, with a new reference; else 0. */
int fp_params_ref_keep(fp_params_ref *ref, PyObject *unit);
void fp_params_ref_drop(fp_params_ref *ref); /* the unit is gone; NULL is allowed */

typedef struct {
    const fp_geometry *geometry; /* its total is shards * shard_numel */
    int64_t shard_numel;
    int rank, shards;             /* which shard is ours, and how many there are */
    fp_group *shard_group;        /* NULL if shards == 1; borrowed, outlives the flat, as the other groups */
    fp_group *replicate_group;    /* gradients of the shard are added over it too; NULL: none */
    int param_rank, param_shards; /* the same of the copy for forward and backward */
    fp_group *param_group;        /* the ranks that share the copy; NULL: there is none */
    fp_group *refresh_group;      /* nested: the ranks whose shards make up our part of the copy, in their order */
    double predivide, postdivide;
    PyObject *compute_dtype, *reduce_dtype; /* torch.dtype, or NULL: the shard's; reduce: compute_dtype */
    int full_precision;                     /* reduce_dtype NULL: the shard's */
    int keep_reduce_dtype;                  /* the gradient stays in reduce_dtype */
    int stays_full;                         /* free() keeps the memory */
    int offloads;                           /* what is kept lies in host memory between backwards */
    PyObject *device;                       /* torch.device to compute on; NULL: where the shard is */
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
int fp_flat_buffer_views(fp_flat_buffer *flat, fp_params_ref *ref, int index, int untracked, PyObject **out);
/* That node runs after all that was recorded since began (see fp_engine_now) and is ready when it is. Until it is told so,
 * it runs as soon as its gradients are there. */
void fp_flat_buffer_run_after(fp_flat_buffer *flat, uint64_t began) FP_NOEXCEPT;
/* Whether the graph task that runs in this thread comes to that node. */
int fp_flat_buffer_is_reached(const fp_flat_buffer *flat) FP_NOEXCEPT;

/* Write the shard to its place and start gathering. collectives: NULL, or the Python object that does it. changed: the
 * shard's values are not those of the gather before, so a graph that still needs those shall be refused by autograd.
 * refresh: from the shards, also where there is a copy. goes_on: as was begun by a call that was broken off. Returns
 * 1: from the shards; 0: from the copy; -1. */
int fp_flat_buffer_gather(fp_flat_buffer *flat, PyObject *shard, PyObject *const *views, PyObject *collectives,
                          int changed, int refresh, int goes_on);
/* Until the gather has ended. -1: the wait was broken off, and can be made again; or the gather has failed: then
 * fp_flat_buffer_is_whole() is 0, and what is there shall not be used. */
int fp_flat_buffer_wait(fp_flat_buffer *flat);
/* Its pass is forgotten: a gather that other ranks do not come to is waited for no longer than a moment. What it writes to
 * stays until it has ended, and the next gather waits for that. */
int fp_flat_buffer_give_up(fp_flat_buffer *flat);

/* What users have written to the views. fp_flat_buffer_is_written: 1 if one was changed in place, as far as torch counts that, or
 * was given other data. fp_flat_buffer_moved_view: the first one that was given other data; -1: none.
 * fp_flat_buffer_take_written takes it: our part goes into the shard, all of it into what is gathered, and the views are where
 * they were. 1: the shard has changed; 0: it has not; -1. *misfit: the view whose new data have another shape, dtype or
 * device, so that they were dropped; n: one was changed in place where nobody reads that; else -1.
 * fp_flat_buffer_forget_written: what was changed in place is of no interest. */
int fp_flat_buffer_is_written(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
Py_ssize_t fp_flat_buffer_moved_view(const fp_flat_buffer *flat, PyObject *const *views) FP_NOEXCEPT;
int fp_flat_buffer_take_written(fp_flat_buffer *flat, PyObject *shard, PyObject *const *views, Py_ssize_t *misfit);
void fp_flat_buffer_forget_written(fp_flat_buffer *flat) FP_NOEXCEPT;
/* Let autograd refuse the graphs that need the values that are gathered. */
void fp_flat_buffer_refuse_graphs(fp_flat_buffer *flat, PyObject *const *views);
/* The same for what the device reads of a shard on the host: it may be written to again. */
int fp_flat_buffer_wait_read(fp_flat_buffer *flat);
/* How often the shard was seen to have another storage than before. */
int64_t fp_flat_buffer_sources(fp_flat_buffer *flat, PyObject *shard);
int fp_flat_buffer_is_allocated(const fp_flat_buffer *flat) FP_NOEXCEPT;
int fp_flat_buffer_is_whole(const fp_flat_buffer *flat) FP_NOEXCEPT;   /* what was gathered is still there */
int fp_flat_buffer_has_values(const fp_flat_buffer *flat) FP_NOEXCEPT; /* the same, or a copy is */
/* 1 if what was gathered, or the copy, has the values of shard for our part; 0: it has others, or is not there; -1. */
int fp_flat_buffer_has_values_of(fp_flat_buffer *flat, PyObject *shard);
/* Free the memory, unless somebody outside has it; reading it raises reason, see fp_torch_resize_storage. Our part of what
 * was gathered becomes the copy. */
int fp_flat_buffer_release(fp_flat_buffer *flat, PyObject *const *views, const char *reason);
int fp_flat_buffer_forget_whole(fp_flat_buffer *flat);  /* what was gathered shall not become the copy */
int fp_flat_buffer_forget_values(fp_flat_buffer *flat); /* the same, and there is no copy any more */
PyObject *fp_flat_buffer_copy(fp_flat_buffer *flat);    /* the copy, new reference; Py_None */
PyObject *
fp_flat_buffer_unsharded(fp_flat_buffer *flat); /* the tensor, new reference; None before fp_flat_buffer_prepare() */
void fp_flat_buffer_average_elsewhere(fp_flat_buffer *flat); /* from now on gradients are summed, not averaged */

/* Add the gradients of the views to the unsharded gradient that is kept here, in the shard's dtype; in fp32 if that is a low
 * one. */
int fp_flat_buffer_keep(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard);
/* Put gradients, and what is kept, together as they are reduced; fp_flat_buffer_reduce sends that. */
int fp_flat_buffer_pack(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard);
/* Start reducing what was packed, or what is kept and gradients (NULL: none). Nothing at all to reduce counts as zeros.
 * How far, nested only: over param_group, added to what earlier calls have left; from there to the shard; or both. */
enum { FP_REDUCE_INNER = 1, FP_REDUCE_OUTER = 2, FP_REDUCE_ALL = 3 };
int fp_flat_buffer_reduce(fp_flat_buffer *flat, const fp_gradients *gradients, PyObject *shard, PyObject *collectives,
                          int how_far);
/* Tell of the next reductions' events who requires grad now of these. */
void fp_flat_buffer_note_trained(fp_flat_buffer *flat, PyObject *const *owners, Py_ssize_t n) FP_NOEXCEPT;
/* Wait for the collective that was started, start the second if there is one. 1: there is no further one; 0: there is, or
 * nothing was being reduced; -1. */
int fp_flat_buffer_advance(fp_flat_buffer *flat, PyObject *shard, PyObject *collectives);
/* Wait for all; the reduced gradient of the shard, where the shard is, new reference; Py_None if there is none. */
PyObject *fp_flat_buffer_take(fp_flat_buffer *flat, PyObject *shard, PyObject *collectives);
int fp_flat_buffer_has_kept(const fp_flat_buffer *flat) FP_NOEXCEPT;
/* The unsharded gradient, new reference; nested: our part of it, [param_shards * ...], added over param_group; Py_None. */
PyObject *fp_flat_buffer_kept(fp_flat_buffer *flat);
void fp_flat_buffer_forget(fp_flat_buffer *flat, int kept_too); /* drop reductions under way; and what is kept */
/* Start the copy of what lies in host memory back to the device; and drop such a copy that nobody has added to. */
int fp_flat_buffer_bring_back(fp_flat_buffer *flat);
int fp_flat_buffer_leave_there(fp_flat_buffer *flat);
/* No gradient is on its way to host memory any more that what comes next on the device could overtake. */
int fp_flat_buffer_settle_copies(fp_flat_buffer *flat);
/* Bytes of what is kept: on the device that the shard is on, and of the buffer for it in host memory. */
void fp_flat_buffer_kept_bytes(const fp_flat_buffer *flat, int64_t *device, int64_t *host) FP_NOEXCEPT;

/* ---- gradients as attributes ---- */

/* Those of params that do not require grad count as none. */
int fp_engine_drop_frozen(fp_gradients *gradients, PyObject *const *params, Py_ssize_t n);
/* tensor.grad = grad whatever the shape and dtype; NULL: None. */
int fp_engine_set_grad(PyObject *tensor, PyObject *grad);
/* Add grad, the gradient of the shard, to params[i].grad where which[i], its pieces, in the shape that params[i] has:
 * numels[i] < 0: none here. Pieces that lie together in one gradient are added to in place. hooks: as autograd does, call
 * the hooks of params[i] with its piece before, and those for after that. */
int fp_engine_add_grads(PyObject *const *params, Py_ssize_t n, const fp_geometry *geometry, const int64_t *starts,
                        const int64_t *numels, const char *which, PyObject *grad, int hooks);
/* The gradient of the shard that params[i].grad make up, new reference: Py_None if no parameter has one; has[i]: which. */
PyObject *fp_engine_collect(PyObject *const *params, Py_ssize_t n, const fp_geometry *geometry, const int64_t *starts,
                            const int64_t *numels, PyObject *shard, char *has);
int fp_engine_add(PyObject *target, PyObject *source); /* target += source, both 1-D */
/* Make params[i].grad its place in the unsharded gradient where which[i]. */
int fp_engine_show_kept(PyObject *const *params, Py_ssize_t n, const fp_geometry *geometry, const char *which,
                        PyObject *kept);
/* The reduced gradient that was put aside: *tensor, or NULL; which parameters have one in it; and which
 * do not require grad any more and have something in what is kept. The functions below keep it up to date. */
typedef struct {
    PyObject **tensor, *like; /* like: the shard */
    char *has, *owed;
} fp_put_aside;
/* How many of params still show kept. Where one does not, its place in kept is set to 0, and what was put aside becomes the
 * gradient that it was given instead, which is one of the shard; or nothing. A shard that is the whole has no other: what
 * was given goes into kept. One that was set to 0 in place counts as cleared. -2 - i: the i-th was written to otherwise
 * while something is put aside, which would not have been. -1: error. */
Py_ssize_t fp_engine_check_kept(PyObject *const *params, Py_ssize_t n, const fp_geometry *geometry,
                                const int64_t *starts, const int64_t *numels, PyObject *kept, fp_put_aside aside);
/* The same where kept is elements [first, first + its length) of the unsharded gradient, added over some of the ranks:
 * each parameter shows its piece of the shard, which begins at own in kept (numels < 0: nothing). A parameter's gradient
 * can be cleared, on all ranks alike, but not edited: ValueError, which says it of name. Where the piece of a cleared one has
 * elements, so that others can count on its being cleared, cleared[i] becomes 1. */
int fp_engine_show_pieces(PyObject *const *params, Py_ssize_t n, const int64_t *starts, const int64_t *numels,
                          const char *which, PyObject *kept, int64_t own);
Py_ssize_t fp_engine_check_pieces(PyObject *const *params, Py_ssize_t n, const fp_geometry *geometry,
                                  const int64_t *starts, const int64_t *numels, PyObject *kept, fp_put_aside aside,
                                  int64_t first, int64_t own, const char *name, char *cleared);
/* Set what kept, elements [first, ...), has of the i-th parameter to 0. */
int fp_engine_clear_kept(const fp_geometry *geometry, Py_ssize_t i, PyObject *kept, int64_t first);

/* Whether somebody has let a view, one without a node, require grad: if so it does not any more, and owner (NULL: none)
 * does instead. 0: nobody has; 1: and it was not used since; 2: it was, so autograd has a gradient for it. */
int fp_engine_take_requires_grad(PyObject *view, PyObject *owner);

/* ---- graph ---- */

/* A moment of this thread: what is recorded for a backward later has a higher number, what was before a lower one. */
uint64_t fp_engine_now(void) FP_NOEXCEPT;
/* Call ref's unit's before_backward, with began, when the first gradient of tensor is there. 1: done; 0: tensor has no
 * history. */
int fp_engine_hook(PyObject *tensor, fp_params_ref *ref, uint64_t began);
/* From now on call ref's unit before autograd adds to .grad of one of the params, those of flat index. It may be called
 * again: torch drops such hooks when the user registers one. */
int fp_engine_watch(PyObject *const *params, Py_ssize_t n, fp_params_ref *ref, int index);
/* The graph task that runs in this thread, task -1: none. A backward is made of the task that the user has started and
 * of those that it starts itself (reentrant checkpoints), each deeper than the one it is in. Tasks that a backward starts
 * on the CPU share its queue; of one that a device's thread starts it is not known in which backward. */
typedef struct {
    int task, depth, device; /* device: of the thread that has started it; < 0: none */
    const void *queue;
} fp_backward;
fp_backward fp_engine_backward(void) FP_NOEXCEPT;
static inline int
fp_engine_is_within(fp_backward inner, fp_backward outer)
{
    return inner.task == outer.task ||
           (inner.task >= 0 && inner.depth > outer.depth && (inner.queue == outer.queue || inner.device >= 0));
}
/* The graph task that runs in this thread, -1: none. */
int fp_engine_task(void) FP_NOEXCEPT;
/* Call ref's unit's before_backward when the running graph task ends. */
int fp_engine_at_end(fp_params_ref *ref);
/* Whether the graph task of the last fp_engine_at_end(ref) is under way, in whichever thread. */
int fp_engine_is_running(const fp_params_ref *ref) FP_NOEXCEPT;
int fp_engine_grad_enabled(void) FP_NOEXCEPT;

/* A range of time for profilers, from here to fp_range_end in the same thread; NULL when nobody measures. */
typedef struct fp_range fp_range;
fp_range *fp_range_begin(const char *what, PyObject *name) FP_NOEXCEPT; /* name: str */
void fp_range_end(fp_range *range);                                     /* NULL is allowed */
/* Sum of the versions of tensors: it changes when one of them is changed in place. */
int64_t fp_engine_versions(PyObject *const *tensors, Py_ssize_t n) FP_NOEXCEPT;
/* The first parameter whose data are not the piece of shard that starts and numels say, in one of the layouts that pieces
 * have; geometry: of the whole parameters. -1: none. */
Py_ssize_t fp_engine_moved(PyObject *const *params, Py_ssize_t n, const fp_geometry *geometry, PyObject *shard,
                           const int64_t *starts, const int64_t *numels) FP_NOEXCEPT;
int fp_engine_requires_grad(PyObject *tensor) FP_NOEXCEPT;
int fp_engine_is_tensor(PyObject *object);          /* -1 on failure */
int fp_engine_is_low(PyObject *tensor) FP_NOEXCEPT; /* of a dtype that many gradients cannot be added in */
int fp_group_is_same(const fp_group *a, const fp_group *b) FP_NOEXCEPT; /* of one process group */
int fp_group_place(const fp_group *group, int *rank, int *size);        /* ours in it; -1 on failure */
int fp_group_world_rank(const fp_group *group, int rank);               /* of one of it in the world; -1 on failure */
/* The sum of flags over the ranks of a group, on the device of like: started, and waited for when it is read. */
typedef struct fp_sum fp_sum;
fp_sum *fp_sum_start(fp_group *group, PyObject *like, const int32_t *flags, Py_ssize_t n, PyObject *collectives);
int fp_sum_read(fp_sum *sum, int32_t *flags); /* all n of them */
void fp_sum_free(fp_sum *sum);                /* NULL is allowed */
PyObject *fp_engine_grad(PyObject *tensor);   /* .grad, new reference */

#ifdef __cplusplus
}
#endif
#endif
