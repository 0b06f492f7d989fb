/* tensor/fp_flatten.h -- flatten original parameters, and ask before whether they can be flattened without a closer look. Plain
 * C, under the rules of fp_torch.h. The originals are not changed. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

#include "core/fp_layout.h"

/* 1: the n tensors are plain and contiguous (last stride 1), have one floating-point or complex dtype and one device, and
 * no two share memory. numels[n] is their numel, *trained the count of those that require grad. 0: Python must look at
 * each, and numels is undefined. -1. */
int fp_torch_survey(PyObject *const *tensors, Py_ssize_t n, int64_t *numels, Py_ssize_t *trained);

/* A new 1-D tensor with elements [begin, end) of the flat parameter, 0 <= begin <= end: a shard needs no memory for the whole.
 * Each tensor's values are at its place, a dense one's in the order of its memory. Padding between them is fill, padding past
 * the end of the layout 0. ValueError: the tensors do not fit layout, have several dtypes or devices, or one was freed. */
PyObject *fp_torch_flatten(PyObject *const *tensors, const fp_layout *layout, double fill, int64_t begin, int64_t end);

FP_END_C
