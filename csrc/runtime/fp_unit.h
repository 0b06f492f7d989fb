/* runtime/fp_unit.h -- the heap type _C.Unit: one unit of a model. */
#pragma once

#include "python/fp_args.h"

extern PyType_Spec fp_unit_type;

extern PyMethodDef fp_unit_methods_of_module[];
