/* module/fp_tables.h -- method tables and type specs that fp_module.c puts into the module _C, and the few functions that
 * its files call of each other. */
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

/* Borrowed: the fp_gather in a _C.Gather. NULL, without an exception: object is no Gather. */
fp_gather *fp_gather_of(PyObject *object);

/* 1: object is a _C.ModuleParams; 0. Then its methods, which C calls without a lookup; self must be one. */
int fp_is_module_params(PyObject *object);
PyObject *fp_module_params_use_unsharded(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_module_params_use_sharded(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_module_params_scan(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *fp_module_params_set_grads(PyObject *self, PyObject *grad);

/* Fill fp_handle_names, when the module is executed. 0, or -1 with an exception. */
int fp_handle_exec(void);
