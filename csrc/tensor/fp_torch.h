/* tensor/fp_torch.h -- what the C glue may ask of libtorch. Plain C: no torch type is named here.
 *
 * Every call takes arrays: one call a unit, never one a parameter. The caller holds the GIL. PyObject arguments are
 * borrowed; results are new references. Sizes are in ELEMENTS unless a name ends in _bytes.
 * Failure: -1 (or NULL) with a Python exception set (TypeError: not a plain tensor; RuntimeError: torch's own). No C++
 * exception passes this header. What a failure leaves behind stands at each function. */
#pragma once

#include <Python.h>
#include <stdint.h>

#include "cuda/fp_kernels.h"

#ifdef __cplusplus
#define FP_NOEXCEPT noexcept
#define FP_BEGIN_C extern "C" {
#define FP_END_C }
#else
#define FP_NOEXCEPT
#define FP_BEGIN_C
#define FP_END_C
#endif

FP_BEGIN_C

/* The place of n tensors inside one flat tensor: offset, shape and stride of each. Immutable, counted: a live autograd
 * node keeps its own share, so freeing it here never leaves a node without it. */
typedef struct fp_geometry fp_geometry;

typedef struct {
    int64_t offset;       /* first element, counted in the flat tensor */
    Py_ssize_t ndim;      /* length of shape and stride */
    const int64_t *shape; /* borrowed, copied by fp_torch_geometry_new */
    const int64_t
        *stride; /* borrowed; NULL: contiguous. Else a dense layout: the n elements fill [offset, offset + n) */
} fp_view;

/* Returns NULL with ValueError if a view is negative, not dense, unsorted or does not fit in total elements. */
fp_geometry *fp_torch_geometry_new(const fp_view *views, Py_ssize_t n, int64_t total);
void fp_torch_geometry_free(fp_geometry *geometry); /* NULL is allowed */

/* Tensors. None of these can fail. */
int fp_torch_is_plain(PyObject *object)
    FP_NOEXCEPT; /* 1: an exact Tensor or Parameter, dense, strided, not meta, no wrapper */
int fp_torch_modes_active(void)
    FP_NOEXCEPT; /* 1: a __torch_function__, __torch_dispatch__ or functorch mode, or forward AD, is on */

int64_t fp_torch_geometry_total(const fp_geometry *geometry) FP_NOEXCEPT; /* elements of the flat tensor */

int fp_torch_all_plain(PyObject *const *objects, Py_ssize_t n)
    FP_NOEXCEPT; /* 1: all n are plain and no mode is active: the loops in C do what torch's operations would */

/* Make the views of flat that geometry describes, tracked by ONE autograd node (FlatParamViewsBackward) when flat
 * requires grad: the node packs the n gradients into one 1-D gradient of flat, zeros where there is none. The views
 * share flat's storage and version counter, and are views to autograd (in-place changes are refused as for
 * torch.split). out[n] receives new references; on failure none.
 *
 * spare: NULL, or n views that this made for geometry before, borrowed. Where idle[i] says that Python has no further use
 * for spare[i], and libtorch has none, out[i] is that object once more, with a history of now: as good as a new one. */
int fp_torch_make_views(PyObject *flat, const fp_geometry *geometry, PyObject *const *spare, const char *idle,
                        PyObject **out);

/* Set tensors[i].data to its place in flat, unless it is there already. All are checked before the first is moved; the
 * same holds for every setter below. */
int fp_torch_alias(PyObject *const *tensors, const fp_geometry *geometry, PyObject *flat);

/* The same for 1-D pieces of a shard: starts[i], numels[i]; numels[i] < 0: nothing here, an empty tensor. */
int fp_torch_alias_pieces(PyObject *const *tensors, Py_ssize_t n, PyObject *shard, const int64_t *starts,
                          const int64_t *numels);

/* Whether each of tensors is a plain one at its place in flat, which is plain. No mode is on then. */
int fp_torch_lie_in(PyObject *const *tensors, const fp_geometry *geometry, PyObject *flat) FP_NOEXCEPT;

/* flat.data = the first numel elements of source, which is 1-D; numel < 0: all of source. */
int fp_torch_alias_flat(PyObject *flat, PyObject *source, int64_t numel);

/* Set tensor.data to the place of source. */
int fp_torch_alias_like(PyObject *tensor, PyObject *source);

/* needed[i] = 1 where params[i] needs a writeback: its storage is not owner's, or its gradient's is not grad's, or, where
 * those are whole, it lies there otherwise than geometry says; or only one of it and the flat parameter has a gradient
 * (grad NULL: the flat parameter has none). Storages are compared by identity, then by data pointer. What lies otherwise
 * gets data of its own, with the same values: writing one back does not change the next. Where needed[i] is 1 already,
 * params[i] is not looked at. */
int fp_torch_scan(PyObject *const *params, const fp_geometry *geometry, PyObject *owner, PyObject *grad, char *needed);

/* params[i].grad = its view of the unsharded flat gradient. Where shape, dtype or device differ from the parameter's,
 * the existing gradient's data is set instead (made first if there is none), as FSDP does past torch's checks. */
int fp_torch_set_grads(PyObject *const *params, const fp_geometry *geometry, PyObject *grad);

/* The same with pieces of the sharded gradient: 1-D ones, or where a parameter has its full shape (NO_SHARD), in that
 * shape and the geometry's strides. numels[i] < 0, none[i] != 0 or a parameter that requires no grad get None. by_data != 0
 * always takes the data path. 1: some tensor is not plain, nothing was done. */
int fp_torch_set_grad_pieces(PyObject *const *params, const fp_geometry *geometry, PyObject *grad,
                             const int64_t *starts, const int64_t *numels, const char *none, int by_data);

/* These three return 1; 0 with nothing done unless fp_torch_all_plain(); -1.
 * *all_none: no parameter has a gradient; *any_requires_grad: some parameter requires one. */
int fp_torch_grad_summary(PyObject *const *params, Py_ssize_t n, int *all_none, int *any_requires_grad);
int fp_torch_clear_grads(PyObject *const *params, Py_ssize_t n);

/* The gradient of a shard, as it was reduced: tensor / divisor, rounded to tensor's dtype, and then to dtype: torch's number
 * of one; < 0: tensor's. */
typedef struct {
    PyObject *tensor; /* borrowed or owned, as it is said there */
    double divisor;
    int dtype;
} fp_reduced;

/* What in-place changes of tensors, and of their gradients if with_grads, show in; added to *versions. */
typedef struct {
    int64_t values;      /* sum of the tensors' versions */
    int64_t grads;       /* how many have a gradient */
    int64_t grad_values; /* sum of the gradients' versions */
} fp_versions;
int fp_torch_versions(PyObject *const *tensors, Py_ssize_t n, int with_grads, fp_versions *versions);

/* target = source, or target += source if accumulate: 1-D, equally long, contiguous, in separate memory, of any dtypes; in
 * one pass over memory on the CPU. ValueError, with nothing done, for other tensors. */
int fp_torch_convert(PyObject *target, PyObject *source, int accumulate);

/* Give the device from outside of torch (PrivateUse1) kernels, or NULL to take them back. For tests: it is not locked. */
void fp_torch_use_kernels(const fp_kernels *kernels);

int fp_torch_is_leaf(PyObject *object) FP_NOEXCEPT; /* as tensor.is_leaf; 1 too of what is no tensor */
/* Give the freed storage of tensor room for numel elements, in place: views made before are valid again. Contents are not
 * kept. 1; 0: it has just that room already; 2, with nothing done: it has other room, or tensor is not plain; -1. */
int fp_torch_allocate(PyObject *tensor, int64_t numel);
/* Free the storage of tensor in place. 1; 0, with nothing done: tensor is not plain, or does not begin its storage; -1.
 * A storage that cannot be resized is left as it was: an error; but if it was freed here before, its memory is lent since,
 * and freeing it leaves it to others: tensor then lies in another storage, which is freed.
 * reason (UTF-8, copied; may be NULL): what a RuntimeError says when the data of a freed storage is read or written, until
 * it is allocated again; without it, such an access is a null pointer's. With a reason and keeps_size a freed storage only
 * loses its memory and still says its size: views can then be made of it, and reading one says the reason where torch would
 * say that it is out of bounds. */
int fp_torch_free(PyObject *tensor, const char *reason, int keeps_size);
int64_t fp_torch_numel(PyObject *tensor); /* its elements; -1: error */
/* 1 if a plain tensor's storage is too small for it, as it was freed or resized; 0, also for any other object; -1: error. */
int fp_torch_lacks_memory(PyObject *object);
int64_t fp_torch_storage_numel(PyObject *tensor);    /* elements of tensor's dtype its memory can hold; -1: error */
int fp_torch_same_storage(PyObject *a, PyObject *b); /* 1, 0, -1 */

/* fp_digest of a plain tensor on the host that is dense, in the order of its memory. */
int fp_torch_digest(PyObject *tensor, uint64_t *out);

/* Memory that others use by its address, which may not be freed or written to then.
 * Somebody outside has got the address of tensor, and a reference to it: if flatparam frees and fills its storage, it
 * leaves that to them. 1; 0: it is another's, or no tensor; -1: error. */
int fp_torch_lend(PyObject *tensor);
/* The capsule of torch.Tensor.__dlpack_c_exchange_api__ such that what is exported through it is lent. New reference; the
 * same one if its version is another than this file knows. */
PyObject *fp_torch_lending_exchange(PyObject *capsule);

FP_END_C
