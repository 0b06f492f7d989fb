/* runtime/fp_unit_kept.h -- methods of _C.Unit: what a unit keeps from one pass to the next, read, shown and set. */
#pragma once

#include "python/fp_args.h"

PyObject *fp_unit_kept(PyObject *unit, PyObject *ignored);
PyObject *fp_unit_show_kept(PyObject *unit, PyObject *shown);
PyObject *fp_unit_set_kept(PyObject *unit, PyObject *const *args, Py_ssize_t nargs); /* kept, owed */
PyObject *fp_unit_kept_bytes(PyObject *unit, PyObject *ignored);
PyObject *fp_unit_copies(PyObject *unit, PyObject *ignored);
