/* python/fp_step.h -- the heap types _C.Run (one pass over a tree of units) and _C.Step (one unit in it). */
#ifndef FP_STEP_H
#define FP_STEP_H

#include "python/fp_module.h"

/* New references; NULL with an exception set. */
PyObject *fp_run_type_new(PyObject *module);
PyObject *fp_step_type_new(PyObject *module);

extern PyMethodDef fp_step_methods_of_module[];

#endif
