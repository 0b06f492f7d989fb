/* python/fp_entries.h -- reading what a unit is told of its parameters: where they live, and where they lie. */
#pragma once

#include "tensor/fp_torch.h"
#include "python/fp_attributes.h"

/* Read a tuple of (module, name, shape, stride or None if contiguous, offset), one a parameter, and one of (module, name,
 * index of the parameter) for further names. attributes: of all these; *geometry: the parameters' places in a flat tensor of
 * numel elements. TypeError, ValueError or OverflowError for what does not fit. Both are the caller's to give back, after
 * a failure too: what was not made by then is as it was. */
int fp_entries_read(PyObject *parameters, PyObject *shared, int64_t numel, fp_attributes *attributes,
                    fp_geometry **geometry);
