/* fp_testing.h -- shared by the files of flatparam._C_testing. */
#ifndef FP_TESTING_H
#define FP_TESTING_H

#include "core/fp_dtype.h"
#include "python/fp_args.h"

/* "float64", "float32", "bfloat16" or "float16" as fp_dtype. */
int fp_testing_dtype(PyObject *object, fp_dtype *out);

/* Borrow the memory of object until PyBuffer_Release: contiguous, and writable if asked for. Else TypeError. */
int fp_testing_buffer(PyObject *object, int writable, Py_buffer *out);

/* fp_kernels_py.c */
PyObject *fp_py_kernel_pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_py_kernel_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_py_kernel_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_py_use_kernels(PyObject *module, PyObject *address);
PyObject *fp_py_host_kernels(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_py_is_relaxed(PyObject *module, PyObject *ignored);

/* fp_units_py.c */
PyObject *fp_py_counts(PyObject *module, PyObject *root);
PyObject *fp_py_accumulated_bytes(PyObject *module, PyObject *unit);
PyObject *fp_py_secondary_shards(PyObject *module, PyObject *unit);

#endif
