/* runtime/fp_types.c -- see fp_types.h. */
#include "runtime/fp_types.h"

int64_t fp_optimizer_steps;

PyObject *
fp_unit_collectives(const fp_unit *step)
{
    return step->run->through_python ? step->run->collectives : NULL;
}

PyObject *
fp_root_units(const fp_root *run)
{
    PyObject *units = PyTuple_New(run->n_steps);
    for (Py_ssize_t s = 0; units != NULL && s < run->n_steps; s++) {
        PyTuple_SET_ITEM(units, s, Py_NewRef(run->steps[s]));
    }
    return units;
}
