/* runtime/fp_root.h -- the heap type _C.Root, which the units of a model share (struct fp_root in fp_types.h). Python makes
 * one for each outermost wrapper; units join it by Unit.join() and own it. */
#pragma once

#include "python/fp_args.h"

extern PyType_Spec fp_root_type;
int fp_root_check(PyObject *object); /* 1: object is a Root; 0 */
