/* runtime/fp_forward.h -- methods of _C.Unit: around a module's forward. */
#pragma once

#include "runtime/fp_types.h"

PyObject *fp_forward_pre(fp_unit *unit, PyObject *ignored);
PyObject *fp_forward_post(fp_unit *unit, PyObject *output);
PyObject *fp_forward_abort(fp_unit *unit, PyObject *ignored);
PyObject *fp_forward_expect_inputs(fp_unit *unit, PyObject *tensors);
