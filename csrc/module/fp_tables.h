/* module/fp_tables.h -- what the files of the module give it: method tables, and specs of types. */
#pragma once

#include "python/fp_args.h"
#include "tensor/fp_channel.h"

extern PyMethodDef fp_core_methods[];
extern PyMethodDef fp_exit_methods[];
extern PyMethodDef fp_tensor_methods[];
extern PyType_Spec fp_block_type;
extern PyType_Spec fp_board_type;
extern PyType_Spec fp_gather_type;
extern PyType_Spec fp_handle_steps_type;
extern PyType_Spec fp_layout_type;
extern PyType_Spec fp_module_params_type;

/* What a _C.Gather has; NULL, without an exception: object is none. */
fp_gather *fp_gather_of(PyObject *object);

/* Methods of a _C.ModuleParams, and whether object is one. */
int fp_is_module_params(PyObject *object);
PyObject *fp_module_params_use_unsharded(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_module_params_use_sharded(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_module_params_scan(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_module_params_set_grads(PyObject *self, PyObject *grad);

/* Once: fill fp_handle_names. */
int fp_handle_exec(void);
