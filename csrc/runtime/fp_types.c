/* runtime/fp_types.c -- see fp_types.h. */
#include "runtime/fp_types.h"

int64_t fp_optimizer_steps;

PyObject *
fp_unit_collectives(const fp_unit *unit)
{
    return unit->root->through_python ? unit->root->collectives : NULL;
}

PyObject *
fp_root_units(const fp_root *root)
{
    PyObject *units = PyTuple_New(root->n_units);
    for (Py_ssize_t s = 0; units != NULL && s < root->n_units; s++) {
        PyTuple_SET_ITEM(units, s, Py_NewRef(root->units[s]));
    }
    return units;
}

void
fp_unit_refuse_move(const fp_unit *unit, const fp_state_table *table, int state, int event)
{
    char text[FP_STATE_MESSAGE_BYTES];
    fp_state_message(table, state, event, text, sizeof text);
    PyErr_Format(PyExc_RuntimeError, "%U: %s", unit->name, text);
}
