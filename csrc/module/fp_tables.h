/* module/fp_tables.h -- the method tables of the module, one of each file that has functions. */
#ifndef FP_TABLES_H
#define FP_TABLES_H

#include "python/fp_args.h"

extern PyMethodDef fp_core_methods[];
extern PyMethodDef fp_tensor_methods[];

#endif
