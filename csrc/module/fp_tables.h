/* module/fp_tables.h -- method tables and type specs that fp_module.c puts into the module _C, and the few functions that
 * its files call of each other. */
#pragma once

#include "python/fp_args.h"
#include "tensor/fp_channel.h"

extern PyMethodDef fp_core_methods[];
extern PyMethodDef fp_exit_methods[];
extern PyMethodDef fp_hooks_methods[];
extern PyMethodDef fp_tensor_methods[];
extern PyType_Spec fp_block_type;
extern PyType_Spec fp_board_type;
extern PyType_Spec fp_gather_type;
extern PyType_Spec fp_layout_type;
extern PyType_Spec fp_module_params_type;
