/* module/fp_module_params.h -- the heap type flatparam._C.ModuleParams. */
#ifndef FP_MODULE_PARAMS_H
#define FP_MODULE_PARAMS_H

#include "python/fp_args.h"

/* A new reference to the type; NULL with an exception set. */
PyObject *fp_module_params_type_new(PyObject *module);

#endif
