/* runtime/fp_unit_accumulated.h -- methods of _C.Unit: what a unit keeps from one pass to the next, read, shown and set. */
#pragma once

#include "runtime/fp_types.h"

PyObject *fp_unit_accumulated(const fp_unit *unit, PyObject *ignored);
PyObject *fp_unit_show_accumulated(fp_unit *unit, PyObject *shown);
PyObject *fp_unit_set_accumulated(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs); /* kept, owed */
PyObject *fp_unit_accumulated_bytes(const fp_unit *unit, PyObject *ignored);
PyObject *fp_unit_copies(const fp_unit *unit, PyObject *ignored);
