/* module/fp_tables.h -- the method tables and type specs of this folder, which fp_module.c puts into the module _C. Each
 * table is in the file of its name, fp_core_methods in fp_core_py.c; the docstrings in it say what each function does. */
#pragma once

#include "python/fp_args.h"
#include "tensor/fp_channel.h"

extern PyMethodDef fp_core_methods[];
extern PyMethodDef fp_exit_methods[];
extern PyMethodDef fp_hooks_methods[];
extern PyMethodDef fp_process_methods[];
extern PyMethodDef fp_tensor_methods[];
extern PyType_Spec fp_block_type;
extern PyType_Spec fp_board_type;
extern PyType_Spec fp_gather_type;
extern PyType_Spec fp_layout_type;
extern PyType_Spec fp_module_params_type;
