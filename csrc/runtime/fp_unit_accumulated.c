/* runtime/fp_unit_accumulated.c -- accumulated gradients for Python; see fp_unit_accumulated.h. */
#include "runtime/fp_unit_accumulated.h"

PyObject *
fp_unit_accumulated(const fp_unit *unit, PyObject *ignored)
{
    PyObject *list = PyList_New(unit->n_flat_params);
    for (Py_ssize_t k = 0; list != NULL && k < unit->n_flat_params; k++) {
        PyObject *item = fp_flat_buffer_accumulated_grad(unit->flat_params[k].flat);
        if (item == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, k, item);
        }
    }
    return list;
}

PyObject *
fp_unit_show_accumulated(fp_unit *unit, PyObject *argument)
{
    const char *name = PyUnicode_AsUTF8(unit->name);
    int shown, any = 0;
    FP_NEED_NULL(name);
    FP_TRY_NULL(fp_as_bool(argument, &shown));
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        int status = 0;
        if (!shown) {
            status = fp_flat_param_note_user_edits(flat_param, name, 0);
        }
        else if (flat_param->shown == FP_SHOWN_REDUCED && fp_flat_buffer_has_accumulated(flat_param->flat)) {
            status = fp_flat_param_show_accumulated(flat_param, name);
        }
        FP_TRY_NULL(status);
        any = any || fp_flat_buffer_has_accumulated(flat_param->flat);
    }
    return PyBool_FromLong(any);
}

/* Check the arguments of set_accumulated() for one flat parameter: a tuple of bools, one per owner; a tensor that fits, or
 * None. -1 with ValueError or TypeError. */
static int
check_accumulated(const fp_unit *unit, const fp_flat_param *flat_param, PyObject *accumulated, PyObject *frozen_share)
{
    if (!PyTuple_Check(frozen_share) || PyTuple_GET_SIZE(frozen_share) != flat_param->owners.n) {
        return fp_raise(PyExc_ValueError,
                        "%U: expected frozen_share to have a tuple of %zd bools for each flat parameter", unit->name,
                        flat_param->owners.n);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(frozen_share); i++) {
        int is_share;
        FP_TRY(fp_as_bool(PyTuple_GET_ITEM(frozen_share, i), &is_share));
    }
    const char *name = PyUnicode_AsUTF8(unit->name);
    FP_NEED(name);
    return accumulated == Py_None
               ? 0
               : fp_flat_buffer_check_accumulated(flat_param->flat, flat_param->shard, accumulated, name);
}

/* All flat parameters are checked before the first one is set: a refused call changes nothing. */
PyObject *
fp_unit_set_accumulated(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("set_accumulated", nargs, 2));
    PyObject *accumulated =
        fp_as_tuple(args[0], unit->n_flat_params, "accumulated gradients"); /* owned, as frozen_share */
    PyObject *frozen_share = accumulated == NULL ? NULL : fp_as_tuple(args[1], unit->n_flat_params, "frozen_share");
    int status = frozen_share == NULL ? -1 : fp_unit_check_idle(unit, "be given gradients");
    for (Py_ssize_t k = 0; status == 0 && k < unit->n_flat_params; k++) {
        status = check_accumulated(unit, &unit->flat_params[k], PyTuple_GET_ITEM(accumulated, k),
                                   PyTuple_GET_ITEM(frozen_share, k));
    }
    for (Py_ssize_t k = 0; status == 0 && k < unit->n_flat_params; k++) {
        status = fp_flat_param_set_accumulated(&unit->flat_params[k], PyTuple_GET_ITEM(accumulated, k),
                                               PyTuple_GET_ITEM(frozen_share, k));
    }
    Py_XDECREF(accumulated);
    Py_XDECREF(frozen_share);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}
