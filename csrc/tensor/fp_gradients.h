/* tensor/fp_gradients.h -- .grad of parameters: show the reduced or the accumulated gradient there, and read the edits of users
 * back. The runtime, LayerZero's handle and the drop-in use it. Plain C, under the rules of fp_torch.h. */
#pragma once

#include "tensor/fp_graph.h"

FP_BEGIN_C

/* n parameters, their places in the flat parameter (geometry), and their pieces of this rank's shard: numels[i] elements from
 * element starts[i] of the shard on; numels[i] < 0: the shard has nothing of parameter i. in_rows[i]: 1: the piece has the
 * shape of whole rows of the parameter; 0: it is 1-D. All is borrowed. */
typedef struct {
    PyObject *const *params;
    Py_ssize_t n;
    const fp_geometry *geometry;
    const int64_t *starts, *numels;
    const char *in_rows;
} fp_param_pieces;

/* Drop the gradients of those params that do not require grad: they become undefined. */
int fp_gradients_drop_frozen(fp_gradients *gradients, PyObject *const *params, Py_ssize_t n);
/* tensor.grad = grad, without torch's checks of shape, dtype and device; NULL or None: no gradient. */
int fp_gradients_set(PyObject *tensor, PyObject *grad);
/* The index of the first parameter whose gradient's storage a user has freed or resized; of->n: there is none. */
Py_ssize_t fp_gradients_find_freed(const fp_param_pieces *of) FP_NOEXCEPT;
/* params[i].grad += its piece of grad, where which[i]; the piece has the shape of params[i]. grad is the gradient of the shard,
 * and its memory may be changed. If all these .grad are pieces of one tensor, grad is added to that in one pass; else they
 * become pieces of grad's memory. With grad->parts > 1 the same for each part, in order, and .grad keeps no part's memory.
 * name: of the unit, in errors. As autograd does, hooks of register_hook() are called with the piece before, for each part; an
 * exception of theirs leaves each .grad as it was. Hooks of register_post_accumulate_grad_hook() are called once in the end,
 * when each .grad is complete. NULL: no hook is called. */
int fp_gradients_add_pieces(const fp_param_pieces *of, const char *which, const fp_reduced *grad, const char *name);
/* The gradient of the shard, made of all params[i].grad, with zeros where a parameter has none. A new reference: the tensor in
 * which all of them lie as pieces, or else a new tensor. None: no parameter has a gradient. has[i] = 1 if parameter i has
 * one. */
PyObject *fp_gradients_collect(const fp_param_pieces *of, PyObject *shard, char *has);
/* Set the piece of parameter i in grad, a gradient of the shard, to 0. */
int fp_gradients_clear_piece(const fp_param_pieces *of, Py_ssize_t i, PyObject *grad);
/* params[i].grad = a view of accumulated, where which[i]. own < 0: accumulated is the unsharded gradient, and the view is the
 * parameter's place in it. own >= 0: this rank's shard begins at element own of accumulated, and the view is the 1-D piece. */
int fp_gradients_show_accumulated(const fp_param_pieces *of, const char *which, PyObject *accumulated, int64_t own);
/* The effect of users' edits of .grad between backwards, while it shows the gradient that was accumulated in no_sync. The rule
 * is the same for the runtime, LayerZero's handle and the drop-in:
 *
 *   .grad               nothing is put aside           a reduced gradient of a backward before is put aside
 *   left as it is       the accumulated one counts     both count
 *   None                nothing counts                 nothing counts: a user has one gradient, and has cleared it
 *   set to zeros        the zeros count                the zeros count, and nothing else: the same
 *   changed in place    counts as changed (*)          refused, naming it: the one put aside is not changed with it (**)
 *   replaced            NO_SHARD: counts as given; else it is the reduced gradient, and the accumulated one is given up
 *
 * (*) nested LayerZero refuses it: there .grad is a piece of a gradient that several ranks have. (**) the drop-in changes the
 * accumulated gradient alone, as torch does. Each row is about one parameter; with use_orig_params=False about one flat
 * parameter.
 *
 * Why zeros in place count: the gradients of a micro-batch may be zeros on one rank. If zeros were dropped, a rank that scales
 * its zeros would not come to the reduction that the others come to.
 * How row three is told from row four: where something is put aside, the accumulated gradient is shown with -0.0 in place
 * of 0.0, which sums and comparisons treat alike. zero_(), fill_(0) and copy_() of zeros leave no sign; scaling leaves it.
 * Adding 0.0 to zeros, or scaling them by a negative number, therefore counts as zeroing. */
/* Mark accumulated, which is shown next: replace its zeros by -0.0. */
int fp_gradients_mark_zeros(PyObject *accumulated);
/* Whether a marked gradient that was changed in place since was set to zeros. 1; 0; -1. */
int fp_gradients_is_zeroed(PyObject *grad);

/* The deferred reduced gradient of a flat parameter, put aside while .grad shows the accumulated one. The caller owns it; the
 * functions below update it.
 *   deferred_reduced  [shard_numel], an owned reference; NULL: there is none
 *   has[n]            1: parameter i has a part in it
 *   frozen_share[n]   1: parameter i does not require grad any more, and has a part in the accumulated gradient
 *   cleared[n]        nested: 1: the user has cleared the gradient of parameter i, so that other ranks must clear theirs */
typedef struct {
    PyObject *deferred_reduced;
    char *has, *frozen_share, *cleared;
} fp_put_aside;
/* Reconcile accumulated, the unsharded gradient that .grad of params shows, with what users have done to .grad, by the table
 * above:
 *
 *   .grad aliases its place in accumulated   nothing changes
 *   .grad is None                            the place is set to 0, and the reduced gradient that was put aside is dropped
 *   .grad was set to zeros in place          it counts as zeros. drops_zeros: as None; only for a call that all ranks make and
 *                                            that refuses an accumulated gradient
 *   .grad is another tensor                  the place is set to 0, and the tensor is put aside as the reduced gradient;
 *                                            NO_SHARD: it is copied into accumulated instead
 *
 * Returns how many params count in accumulated; 0: nothing is left of it. -2 - i: parameter i was changed in place while a
 * reduced gradient is put aside. -1: an exception. After a negative result parameters before i may be reconciled already. */
Py_ssize_t fp_gradients_check_accumulated(const fp_param_pieces *of, PyObject *accumulated, PyObject *shard,
                                          fp_put_aside *aside, int drops_zeros);
/* fp_gradients_check_accumulated() for nested strategies: accumulated is elements [first, first + its numel) of the unsharded
 * gradient, added over some of the ranks. .grad shows the piece of the shard, which begins at element own of accumulated. A
 * gradient may be cleared, on all ranks alike, but not edited: ValueError, which begins with name. aside->cleared[i] becomes 1
 * where parameter i was cleared and its piece has elements: the other ranks that hold a part of it clear theirs by it. */
Py_ssize_t fp_gradients_check_pieces(const fp_param_pieces *of, PyObject *accumulated, PyObject *shard,
                                     fp_put_aside *aside, int64_t first, int64_t own, const char *name);
/* Set the elements of parameter i in accumulated to 0. accumulated begins at element first of the unsharded gradient. */
int fp_gradients_clear_accumulated(const fp_geometry *geometry, Py_ssize_t i, PyObject *accumulated, int64_t first);

/* The norm of order `order` of all gradients of params, to the power of order, so that ranks can add theirs; for infinity the
 * maximum. A new 0-dim tensor on device, in fp64 or fp32; 0 if there is no gradient. */
PyObject *fp_gradients_norm(PyObject *const *params, Py_ssize_t n, double order, int in_fp64, PyObject *device);
/* Scale the gradients of params by max_norm / (norm + 1e-6), where that is less than 1; norm = sum to the power of
 * root, which is 1 / order, or 1. Returns the norm in the widest real dtype of the gradients, a new reference. */
PyObject *fp_gradients_clip(PyObject *const *params, Py_ssize_t n, PyObject *sum, double root, double max_norm);

/* Find out whether a user has let view, a leaf without a node, require grad. If so, owner (NULL: none) requires grad from now
 * on and view does not, as the gradient of view would not be reduced. 0: it did not require grad; 1: it did, and no graph has
 * used view; 2: it did, and a graph has used view; its gradient is dropped; -1. */
int fp_param_take_requires_grad(PyObject *view, PyObject *owner);

/* The sum of the tensors' version counters, each of which grows with each in-place change. numels: leave out the tensors with
 * numels[i] <= 0; NULL: take all. */
int64_t fp_param_versions(PyObject *const *tensors, const int64_t *numels, Py_ssize_t n) FP_NOEXCEPT;
/* The index of the first parameter whose data are not its piece of shard: 1-D, in rows or in the geometry's layout. -1: there
 * is none. */
Py_ssize_t fp_param_moved(const fp_param_pieces *of, PyObject *shard) FP_NOEXCEPT;
int fp_param_requires_grad(PyObject *tensor) FP_NOEXCEPT;
int fp_param_is_tensor(PyObject *object) FP_NOEXCEPT; /* 1: a torch.Tensor, or of a subclass */
int fp_param_is_low(PyObject *tensor) FP_NOEXCEPT;    /* 1: bf16 or fp16, too coarse to add many gradients in */

FP_END_C
