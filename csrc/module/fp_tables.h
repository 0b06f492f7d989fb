/* module/fp_tables.h -- what the files of the module give it: method tables, and types (new references; NULL with
 * an exception). */
#ifndef FP_TABLES_H
#define FP_TABLES_H

#include "python/fp_args.h"

extern PyMethodDef fp_core_methods[];
extern PyMethodDef fp_tensor_methods[];
PyObject *fp_layout_type_new(PyObject *module);
PyObject *fp_module_params_type_new(PyObject *module);

#endif
