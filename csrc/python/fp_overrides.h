/* python/fp_overrides.h -- whether a user replaced methods, on a class or on an object. */
#pragma once

#include "python/fp_args.h"

extern PyMethodDef fp_overrides_methods[]; /* of the module; the functions' docstrings say what they do */
