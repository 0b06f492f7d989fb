/* python/fp_entries.h -- read Python's description of the parameters of one flat parameter: their modules and names, and
 * their places in the flat parameter. The runtime (fp_flat_param_spec.c) and _C.ModuleParams read it. */
#pragma once

#include "tensor/fp_torch.h"
#include "python/fp_attributes.h"

/* Read two tuples: the caller has checked that they are tuples. Sizes are in ELEMENTS.
 *   parameters  (module, name, shape, stride or None if contiguous, offset) for each parameter, sorted by offset
 *   shared      (module, name, index of the parameter) for each further name of a parameter
 *   numel       elements of the flat tensor in which the parameters lie
 *   attributes  zeroed; filled with the modules and names
 *   *geometry   NULL; set to the places of the parameters
 * 0, or -1 with TypeError, ValueError, OverflowError or MemoryError. The caller frees attributes and *geometry, after a
 * failure too. */
int fp_entries_read(PyObject *parameters, PyObject *shared, int64_t numel, fp_attributes *attributes,
                    fp_geometry **geometry);
