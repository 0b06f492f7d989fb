/* runtime/fp_forward.h -- methods of _C.Unit: around a module's forward. */
#pragma once

#include "runtime/fp_types.h"

PyObject *fp_forward_pre(PyObject *self, PyObject *ignored);
PyObject *fp_forward_post(PyObject *self, PyObject *output);
PyObject *fp_forward_abort(PyObject *self, PyObject *ignored);
PyObject *fp_forward_expect_inputs(PyObject *self, PyObject *ignored);
PyObject *fp_forward_inputs_done(PyObject *self, PyObject *ignored);
