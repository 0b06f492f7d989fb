/* python/fp_entries.h -- reading Python's description of a unit's parameters: their modules and names, and their places in
 * the flat parameter. */
#pragma once

#include "tensor/fp_torch.h"
#include "python/fp_attributes.h"

/* Read two tuples.
 *   parameters  (module, name, shape, stride or None if contiguous, offset) for each parameter; in elements
 *   shared      (module, name, index of the parameter) for each further name of a parameter
 *   numel       elements of the flat tensor in which the parameters lie
 *   attributes  zeroed; filled with the modules and names
 *   *geometry   NULL; set to the places of the parameters
 * 0, or -1 with TypeError, ValueError or OverflowError. The caller frees attributes and *geometry, after a failure too. */
int fp_entries_read(PyObject *parameters, PyObject *shared, int64_t numel, fp_attributes *attributes,
                    fp_geometry **geometry);
