/* module/fp_tables.h -- what the files of the module give it: method tables, and specs of types. */
#ifndef FP_TABLES_H
#define FP_TABLES_H

#include "python/fp_args.h"

extern PyMethodDef fp_core_methods[];
extern PyMethodDef fp_tensor_methods[];
extern PyType_Spec fp_gather_type;
extern PyType_Spec fp_layout_type;
extern PyType_Spec fp_module_params_type;

#endif
