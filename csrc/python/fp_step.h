/* python/fp_step.h -- the heap type _C.Step: one unit of a model. */
#ifndef FP_STEP_H
#define FP_STEP_H

#include "python/fp_module.h"

/* New reference; NULL with an exception set. */
PyObject *fp_step_type_new(PyObject *module);

extern PyMethodDef fp_step_methods_of_module[];

#endif
