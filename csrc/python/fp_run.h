/* python/fp_run.h -- the heap type _C.Run: what the units of a model share. */
#ifndef FP_RUN_H
#define FP_RUN_H

#include "python/fp_module.h"

/* New reference; NULL with an exception set. */
PyObject *fp_run_type_new(PyObject *module);
int fp_run_check(PyObject *object); /* whether it is one */

#endif
