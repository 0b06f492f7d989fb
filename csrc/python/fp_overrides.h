/* python/fp_overrides.h -- functions of the module _C that tell whether a user has replaced a method, on a class or on an
 * object. The drop-in asks before each fast step: a replaced method must be called. */
#pragma once

#include "python/fp_args.h"

extern PyMethodDef fp_overrides_methods[]; /* the docstrings say what each does */
