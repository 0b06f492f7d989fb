/* python/fp_unit.h -- the heap type flatparam._C.Unit. */
#ifndef FP_UNIT_H
#define FP_UNIT_H

#include "python/fp_module.h"

/* A new reference to the type; NULL with an exception set. */
PyObject *fp_unit_type_new(PyObject *module);

#endif
