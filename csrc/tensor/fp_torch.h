/* tensor/fp_torch.h -- the calls of libtorch that C code may make. Plain C: no type of torch is named here.
 *
 * The rules of this header and of all headers that include it:
 *   - A call takes arrays: one call for a unit, never one for a parameter.
 *   - The caller holds the GIL. A call may release it where it waits or works on much memory, and takes it again.
 *   - PyObject arguments are borrowed during the call. Results are new references.
 *   - Sizes are in ELEMENTS unless a name ends in _bytes.
 *   - Failure: -1 or NULL with a Python exception. TypeError: an argument is not a plain tensor. ValueError: it does not fit.
 *     RuntimeError: torch's own. A call checks its arguments before it changes anything; if a later failure leaves changes,
 *     the function's comment says so. No C++ exception leaves a function of a C header. */
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

/* The places of n tensors in one flat tensor: offset, shape and strides of each. It never changes. Autograd nodes and flat
 * buffers share it, so it may be freed here while they live. */
typedef struct fp_geometry fp_geometry;

typedef struct {
    int64_t offset;       /* first element, counted in the flat tensor */
    Py_ssize_t ndim;      /* length of shape and stride */
    const int64_t *shape; /* borrowed; fp_torch_geometry_new copies it */
    /* Borrowed and copied, too. NULL: contiguous. Else a dense layout: the elements fill [offset, offset + numel). */
    const int64_t *stride;
} fp_view;

/* views: sorted by offset, without overlap; gaps are padding. NULL with ValueError if one is negative, not dense, out of
 * order, or ends after total elements. */
fp_geometry *fp_torch_geometry_new(const fp_view *views, Py_ssize_t n, int64_t total);
void fp_torch_geometry_free(fp_geometry *geometry); /* NULL is allowed */

/* 1: object is a plain tensor: an exact torch.Tensor or Parameter (no subclass), strided, with a storage, not meta, no wrapper,
 * no inference tensor. C may read and set it as torch would, unless a mode wants to see the operation. 0. */
int fp_torch_is_plain(PyObject *object) FP_NOEXCEPT;
/* 1: a __torch_function__, __torch_dispatch__ or functorch mode, or forward AD, is on in this thread. */
int fp_torch_modes_active(void) FP_NOEXCEPT;

int64_t fp_torch_geometry_total(const fp_geometry *geometry) FP_NOEXCEPT; /* elements of the flat tensor */

/* 1: all n are plain and no mode is on, so loops in C do what torch's operations would. */
int fp_torch_all_plain(PyObject *const *objects, Py_ssize_t n) FP_NOEXCEPT;

/* Make the views of flat that geometry describes. If flat requires grad, ONE autograd node (FlatParamViewsBackward) is behind
 * all of them: it packs their n gradients into one 1-D gradient of flat, with zeros where there is none. The views share
 * flat's storage and version counter. They are views to autograd, which refuses in-place changes as for torch.split.
 * out[n] receives new references; on failure none.
 *
 * spare: NULL, or the n views of an earlier call for geometry, borrowed. idle[i]: only the caller still refers to spare[i]. If
 * libtorch does not refer to it either, out[i] is that object, behind the new node: a new Python object costs more. */
int fp_torch_make_views(PyObject *flat, const fp_geometry *geometry, PyObject *const *spare, const char *idle,
                        PyObject **out);

/* tensors[i].data = its view of flat, unless it lies there already. This and the setters below check all tensors before they
 * change the first. */
int fp_torch_alias(PyObject *const *tensors, const fp_geometry *geometry, PyObject *flat);

/* tensors[i].data = the 1-D piece of shard of numels[i] elements from starts[i] on. numels[i] < 0: the shard has nothing of
 * tensor i, which becomes empty. */
int fp_torch_alias_pieces(PyObject *const *tensors, Py_ssize_t n, PyObject *shard, const int64_t *starts,
                          const int64_t *numels);

/* 1: flat and the tensors are plain, no mode is on, and each tensor lies at its place in flat. */
int fp_torch_lie_in(PyObject *const *tensors, const fp_geometry *geometry, PyObject *flat) FP_NOEXCEPT;

/* flat.data = the first numel elements of source, a contiguous 1-D tensor; numel < 0: all of it. */
int fp_torch_alias_flat(PyObject *flat, PyObject *source, int64_t numel);

/* tensor.data = source: tensor gets source's shape, strides and memory. */
int fp_torch_alias_like(PyObject *tensor, PyObject *source);

/* Set needed[i] to 1 if params[i] needs a writeback, else to 0. An entry that is 1 already is skipped. owner: the flat
 * parameter; grad: its gradient, NULL: none. params[i] needs a writeback if
 *   - its storage is not owner's, or its gradient's storage is not grad's (compared by identity, then by address); or
 *   - owner (or grad) is whole, and params[i] (or its gradient) does not lie there as geometry says; or
 *   - params[i] has a gradient and grad is NULL, or the reverse.
 * A tensor that lies elsewhere in owner or grad gets a copy of its values as data, so that writing one back does not overwrite
 * another. */
int fp_torch_scan(PyObject *const *params, const fp_geometry *geometry, PyObject *owner, PyObject *grad, char *needed);

/* params[i].grad = its view of grad, the unsharded flat gradient. If shape, dtype or device differ from the parameter's, torch
 * refuses this assignment. Then the data of the present gradient is set, or a gradient is made, as FSDP does. */
int fp_torch_set_grads(PyObject *const *params, const fp_geometry *geometry, PyObject *grad);

/* params[i].grad = its piece of grad, the sharded flat gradient: numels[i] elements from starts[i] on. The piece is 1-D, or has
 * the geometry's shape and strides if the parameter has its full shape (NO_SHARD). .grad becomes None where numels[i] < 0,
 * where none[i] != 0, and where the parameter requires no grad. by_data != 0: set data as above, whatever the shapes.
 * 0: done; 1: some tensor is not plain or a mode is on, and nothing was done; -1. */
int fp_torch_set_grad_pieces(PyObject *const *params, const fp_geometry *geometry, PyObject *grad,
                             const int64_t *starts, const int64_t *numels, const char *none, int by_data);

/* The next two return 1; 0 with nothing done unless fp_torch_all_plain(); -1.
 * *all_none: no parameter has a gradient; *any_requires_grad: some parameter requires one. clear: params[i].grad = None. */
int fp_torch_grad_summary(PyObject *const *params, Py_ssize_t n, int *all_none, int *any_requires_grad);
int fp_torch_clear_grads(PyObject *const *params, Py_ssize_t n);

/* A reduced gradient of a shard before its last division: the gradient is tensor / divisor, rounded to tensor's dtype and then
 * to dtype. The call that writes .grad also divides: one pass over memory, not two. */
typedef struct {
    PyObject *tensor; /* 1-D. As an argument it is borrowed, as a result a new reference */
    double divisor;   /* 1.0: no division */
    int dtype;        /* at::ScalarType as a number; < 0: tensor's dtype */
    int parts;        /* > 1: the tensor is so many gradients of the shard, to be added one after the other */
} fp_reduced;

/* target = source, or target += source if accumulate, converted to target's dtype. Both are 1-D, contiguous, equally long and
 * in separate memory; else ValueError, with nothing done. On the CPU it is one pass over memory. */
int fp_torch_convert(PyObject *target, PyObject *source, int accumulate);

/* For tests: use these kernels, for torch's PrivateUse1 device, in place of CUDA's; NULL: use none. It takes no lock. */
void fp_torch_use_kernels(const fp_kernels *kernels);

int fp_torch_is_leaf(PyObject *object) FP_NOEXCEPT; /* tensor.is_leaf; 1 for an object that is no tensor */

/* Give the freed storage of tensor memory for numel elements, in place: its views are valid again. The values are undefined.
 * 1: done; 0: it has just that much memory already; 2, with nothing done: it has another amount, or tensor is not plain; -1. */
int fp_torch_allocate(PyObject *tensor, int64_t numel);
/* Free the storage of tensor in place. 1: done; 0, with nothing done: tensor is not plain, or does not begin its storage; -1.
 * A storage that cannot be resized: if it was freed here before, its memory is lent (fp_torch_lend). Then tensor moves to a
 * freed storage, and the borrower keeps the old one. Otherwise -1, and the storage is left as it was.
 * reason (UTF-8, copied): the message of the RuntimeError that an access to the data raises until the storage is allocated
 * again; NULL: an access goes to a null pointer.
 * keeps_size, with a reason only: the storage loses its memory and still tells its size. Then views of it can be made, and an
 * access to one raises reason; without the size torch would raise that the view is out of bounds. */
int fp_torch_free(PyObject *tensor, const char *reason, int keeps_size);
/* 1: a plain tensor's storage has less memory than its elements need; 0, also for any other object; -1. */
int fp_torch_lacks_memory(PyObject *object);
int64_t fp_torch_storage_numel(PyObject *tensor);    /* elements for which its storage has memory; -1: error */
int64_t fp_torch_storage_holders(PyObject *tensor);  /* tensors over its storage; -1: error */
int fp_torch_same_storage(PyObject *a, PyObject *b); /* 1, 0, -1 */
int fp_torch_has_freed(void); /* 1: a storage lives that flatparam has freed, perhaps without its model; 0; -1 */

/* *out = fp_digest() (core/fp_digest.h) of the memory of a plain, dense tensor on the host. */
int fp_torch_digest(PyObject *tensor, uint64_t *out);

/* Note that code outside (NumPy, DLPack) has borrowed the memory of tensor: it has the address and a reference. If flatparam
 * frees and fills the storage, it leaves this memory to the borrower from now on, and takes other memory for itself.
 * 1: noted; 0: flatparam does not free this storage, or the object is no tensor; -1. */
int fp_torch_lend(PyObject *tensor);
/* A new capsule for torch.Tensor.__dlpack_c_exchange_api__. It calls fp_torch_lend() for each tensor that is exported through
 * it, and is like capsule otherwise. Returns capsule itself if fp_borrowed.cpp does not know its version, or if it does this
 * already. */
PyObject *fp_torch_lending_exchange(PyObject *capsule);

FP_END_C
