/* runtime/fp_root.h -- the heap type _C.Root: what the units of a model share. */
#ifndef FP_ROOT_H
#define FP_ROOT_H

#include "python/fp_args.h"

extern PyType_Spec fp_root_type;
int fp_root_check(PyObject *object); /* whether it is one */

#endif
