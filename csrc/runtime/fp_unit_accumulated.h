/* runtime/fp_unit_accumulated.h -- methods of _C.Unit for the accumulated gradients of a unit. A list has one item a flat
 * parameter; None: it has no accumulated gradient. Called between passes. The docstrings are in fp_unit.c. */
#pragma once

#include "runtime/fp_types.h"

PyObject *fp_unit_accumulated(const fp_unit *unit, PyObject *ignored);
PyObject *fp_unit_show_accumulated(fp_unit *unit, PyObject *shown);
PyObject *fp_unit_set_accumulated(fp_unit *unit, PyObject *const *args,
                                  Py_ssize_t nargs); /* accumulated, frozen_share */
