/* python/fp_overrides.h -- a function of the module _C that tells whether a user has replaced a method, on a class or on an
 * object. flatparam/dropin/gathering.py asks it before each fast step: a replaced method must be called. */
#pragma once

#include "python/fp_args.h"

extern PyMethodDef fp_overrides_methods[]; /* is_as_defined(); see its docstring */
