/* tensor/fp_gradients.h -- gradients as attributes of parameters: what .grad shows of a shard's or a unit's gradient. Plain
 * C, under the rules of fp_torch.h. */
#pragma once

#include "tensor/fp_graph.h"

FP_BEGIN_C

/* Parameters, their places in the whole, and what a shard has of each: numels[i] elements from starts[i] on; < 0: nothing.
 * All is borrowed. */
typedef struct {
    PyObject *const *params;
    Py_ssize_t n;
    const fp_geometry *geometry;
    const int64_t *starts, *numels;
} fp_param_pieces;

/* Those of params that do not require grad count as none. */
int fp_gradients_drop_frozen(fp_gradients *gradients, PyObject *const *params, Py_ssize_t n);
/* tensor.grad = grad whatever the shape and dtype; NULL: None. */
int fp_gradients_set(PyObject *tensor, PyObject *grad);
/* The first parameter whose gradient has no memory, as a user has freed or resized its storage; of->n: none has. */
Py_ssize_t fp_gradients_find_freed(const fp_param_pieces *of) FP_NOEXCEPT;
/* Add grad, the gradient of the shard, which may be changed, to params[i].grad where which[i], its pieces, in the shape that
 * params[i] has. Pieces that lie together in one gradient are added to in place. name, of the unit: as autograd does, call the hooks
 * of params[i] with its piece before, and those for after that; NULL: call none. */
int fp_gradients_add_pieces(const fp_param_pieces *of, const char *which, const fp_reduced *grad, const char *name);
/* The gradient of the shard that params[i].grad make up, new reference: Py_None if no parameter has one; has[i]: which. */
PyObject *fp_gradients_collect(const fp_param_pieces *of, PyObject *shard, char *has);
/* Make params[i].grad its place in accumulated where which[i]: in the unsharded gradient if own < 0; else its piece of the shard,
 * which begins at own in accumulated (numels < 0: nothing). */
int fp_gradients_show_accumulated(const fp_param_pieces *of, const char *which, PyObject *accumulated, int64_t own);
/* What users do to .grad between backwards, while it shows the gradient accumulated in no_sync. One rule for the runtime,
 * LayerZero's handle and the drop-in:
 *
 *   .grad               nothing is put aside           a reduced gradient of a backward before is put aside
 *   left as it is       the accumulated one counts     both count
 *   None                nothing counts                 nothing counts: a user has one gradient, and has cleared it
 *   set to zeros        the zeros count                the zeros count, and nothing else: the same
 *   changed in place    counts as changed (*)          refused, naming it: what is put aside is not changed with it (**)
 *   replaced            NO_SHARD: counts as given; else it is the reduced gradient, and the accumulated one is given up
 *
 * (*) nested LayerZero refuses it: there .grad is a piece of the accumulated gradient on several ranks. (**) the drop-in
 * changes the accumulated gradient alone, as torch does. In each row a parameter, with flat parameters a unit, is seen by itself.
 *
 * One rank's gradients of a micro-batch may be zeros. So zeros in place count: else a rank that has scaled its zeros would
 * drop them, and not come to the reduction that the others come to. Nor do zeros tell row three from row four. Where
 * something is put aside, the accumulated gradient is therefore shown with -0.0 for 0.0, which every sum and comparison takes
 * for the same: zero_(), fill_(0) and copy_() of zeros leave no sign, scaling leaves it. Adding 0.0 to zeros, or scaling them by a
 * negative number, counts as zeroing. */
/* Make the zeros of accumulated, which is shown next, -0.0. */
int fp_gradients_mark_zeros(PyObject *accumulated);
/* Whether a gradient, which was changed in place since it was marked and shown, was set to zeros; -1: error. */
int fp_gradients_is_zeroed(PyObject *grad);

/* The reduced gradient that was put aside: *tensor, or NULL; which parameters have one in it; and which
 * do not require grad any more and have something in the accumulated gradient. The functions below keep it up to date. */
typedef struct {
    PyObject **tensor, *like; /* like: the shard */
    char *has, *frozen_share;
} fp_put_aside;
/* Reconcile .grad of params with the accumulated gradient, by the table above.
 *
 *   .grad aliases its place in accumulated   nothing changes
 *   .grad is None                            the place is set to 0, the reduced gradient that was put aside is dropped
 *   .grad is zeros in place                  counts as zeros; drops_zeros: as None, as all ranks are at a call that refuses the
 *                                            accumulated gradient
 *   .grad is another tensor                  the place is set to 0; the given tensor is the reduced gradient from now on (where
 *                                            the shard is the whole parameter, it is copied into accumulated)
 *
 * Returns the number of params of the first kind. -2 - i: the i-th was changed in place while a reduced gradient is put aside.
 * -1: error. */
Py_ssize_t fp_gradients_check_accumulated(const fp_param_pieces *of, PyObject *accumulated, fp_put_aside aside,
                                          int drops_zeros);
/* The same where accumulated is elements [first, first + its length) of the unsharded gradient, added over some of the ranks:
 * each parameter shows its piece of the shard. A parameter's gradient
 * can be cleared, on all ranks alike, but not edited: ValueError, which says it of name. Where the piece of a cleared one has
 * elements, so that others can count on its being cleared, cleared[i] becomes 1. */
Py_ssize_t fp_gradients_check_pieces(const fp_param_pieces *of, PyObject *accumulated, fp_put_aside aside,
                                     int64_t first, int64_t own, const char *name, char *cleared);
/* Set what accumulated, elements [first, ...), has of the i-th parameter to 0. */
int fp_gradients_clear_accumulated(const fp_geometry *geometry, Py_ssize_t i, PyObject *accumulated, int64_t first);

/* The norm of this order of the gradients of params, to the power of order unless that is infinite: a scalar on device,
 * computed in fp64 or fp32, new reference. No gradient: 0. */
PyObject *fp_gradients_norm(PyObject *const *params, Py_ssize_t n, double order, int in_fp64, PyObject *device);
/* Scale the gradients of params by max_norm / norm, where that is less than 1. The norm, sum to the power of root, in the
 * widest real dtype of the gradients, new reference. */
PyObject *fp_gradients_clip(PyObject *const *params, Py_ssize_t n, PyObject *sum, double root, double max_norm);

/* Whether somebody has let a view, one without a node, require grad: if so it does not any more, and owner (NULL: none)
 * does instead. 0: nobody has; 1: and it was not used since; 2: it was, so autograd has a gradient for it. */
int fp_param_take_requires_grad(PyObject *view, PyObject *owner);

/* Sum of the versions of tensors: it changes when one of them is changed in place. numels: not of those that have none, or NULL. */
int64_t fp_param_versions(PyObject *const *tensors, const int64_t *numels, Py_ssize_t n) FP_NOEXCEPT;
/* The first parameter whose data are not its piece of shard, in one of the layouts that pieces have. -1: none. */
Py_ssize_t fp_param_moved(const fp_param_pieces *of, PyObject *shard) FP_NOEXCEPT;
int fp_param_requires_grad(PyObject *tensor) FP_NOEXCEPT;
int fp_param_is_tensor(PyObject *object) FP_NOEXCEPT;
int fp_param_is_low(PyObject *tensor) FP_NOEXCEPT; /* of a dtype that many gradients cannot be added in */

FP_END_C
