/* tensor/fp_flatten.h -- original parameters before they are flattened, and flattening them; see fp_torch.h. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

#include "core/fp_layout.h"

/* 1: the n tensors are plain and contiguous (last stride 1), of one dtype and device, a floating-point or complex one, and
 * each has memory of its own: numels[n] are their elements, *trained counts those that require grad. 0: they need a
 * closer look, and numels is unspecified. -1: error. */
int fp_torch_survey(PyObject *const *tensors, Py_ssize_t n, int64_t *numels, Py_ssize_t *trained);

/* A new 1-D tensor of elements [begin, end), 0 <= begin <= end, of the flat parameter: the tensors' values at their places,
 * in the order of memory where they are dense, fill between them, zeros past the end of the layout. ValueError for tensors
 * that are not the layout's, of several dtypes or devices, or freed. */
PyObject *fp_torch_flatten(PyObject *const *tensors, const fp_layout *layout, double fill, int64_t begin, int64_t end);

FP_END_C
