/* runtime/fp_unit.h -- the heap type _C.Unit: one unit of a model. */
#ifndef FP_UNIT_H
#define FP_UNIT_H

#include "python/fp_args.h"

/* New reference; NULL with an exception set. */
PyObject *fp_unit_type_new(PyObject *module);

extern PyMethodDef fp_unit_methods_of_module[];

#endif
