/* runtime/fp_root.h -- the heap type _C.Root: what the units of a model share. */
#ifndef FP_ROOT_H
#define FP_ROOT_H

#include "python/fp_args.h"

/* New reference; NULL with an exception set. */
PyObject *fp_root_type_new(PyObject *module);
int fp_root_check(PyObject *object); /* whether it is one */

#endif
