/* runtime/fp_backward.h -- what autograd calls of a unit and of a model. */
#pragma once

#include "runtime/fp_types.h"

extern const fp_module_params_calls fp_backward_unit_calls, fp_backward_root_calls;
