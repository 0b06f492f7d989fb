/* runtime/fp_root.h -- the heap type _C.Root: what the units of a model share. */
#pragma once

#include "python/fp_args.h"

extern PyType_Spec fp_root_type;
int fp_root_check(PyObject *object); /* whether it is one */
