/* runtime/fp_unit.h -- the heap type _C.Unit: one unit of a model (struct fp_unit in fp_types.h). flatparam/fsdp/unit/unit.py
 * owns one as Unit.core. */
#pragma once

#include "python/fp_args.h"

extern PyType_Spec fp_unit_type;

/* Functions of the module _C about all units of the process. */
extern PyMethodDef fp_unit_methods_of_module[];
