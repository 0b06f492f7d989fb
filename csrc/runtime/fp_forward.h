/* runtime/fp_forward.h -- methods of _C.Unit that the wrapper calls: pre before a module's forward, post after it. The
 * docstrings are in fp_unit.c. A second thread is refused with RuntimeError while the first is in a forward or backward of
 * the model. After an exception the wrapper calls fp_forward_abort(), which recovers the model when the outermost forward is
 * left. */
#pragma once

#include "runtime/fp_types.h"

PyObject *fp_forward_pre(fp_unit *unit, PyObject *ignored);
PyObject *fp_forward_post(fp_unit *unit, PyObject *output); /* gives output, a new reference */
PyObject *fp_forward_abort(fp_unit *unit, PyObject *ignored);
PyObject *fp_forward_expect_inputs(fp_unit *unit, PyObject *tensors); /* before pre, for units with frozen parameters */
