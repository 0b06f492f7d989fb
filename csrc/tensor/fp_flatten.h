/* tensor/fp_flatten.h -- flatten original parameters when a unit is built, and find out before whether Python must look at each
 * of them. Plain C, under the rules of fp_torch.h. The originals are not changed. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

#include "core/fp_layout.h"

/* 1: the n tensors are plain and contiguous (last stride 1), have memory, one floating-point or complex dtype and one device,
 * and no two share memory. numels[i] is the numel of each, *trained the number of those that require grad. 0: Python must
 * look at each, and numels is undefined. -1. */
int fp_torch_survey(PyObject *const *tensors, Py_ssize_t n, int64_t *numels, Py_ssize_t *trained);

/* A new 1-D tensor with elements [begin, end) of the flat parameter, 0 <= begin <= end: to make a shard, no memory for the
 * whole is needed. Each tensor's values lie at its place, in the order of its memory if it is dense, else row-major. Padding
 * between tensors is fill, padding past the end of the layout is 0. ValueError: the tensors do not fit layout, have several
 * dtypes or devices, or one was freed. */
PyObject *fp_torch_flatten(PyObject *const *tensors, const fp_layout *layout, double fill, int64_t begin, int64_t end);

FP_END_C
