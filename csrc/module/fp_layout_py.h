/* module/fp_layout_py.h -- the heap type flatparam._C.Layout. */
#ifndef FP_LAYOUT_PY_H
#define FP_LAYOUT_PY_H

#include "python/fp_args.h"

/* A new reference to the type; NULL with an exception set. */
PyObject *fp_layout_type_new(PyObject *module);

#endif
