/* runtime/fp_unit_kept.c -- see fp_unit_kept.h. */
#include "runtime/fp_unit_kept.h"

#include "core/fp_alloc.h"
#include "runtime/fp_types.h"

/* A list of what read gives of each flat parameter. */
static PyObject *
list_of(const fp_unit *unit, PyObject *(*read)(fp_flat_buffer *))
{
    PyObject *list = PyList_New(unit->n_flat_params);
    for (Py_ssize_t k = 0; list != NULL && k < unit->n_flat_params; k++) {
        PyObject *item = read(unit->flat_params[k].flat);
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
fp_unit_kept(PyObject *self, PyObject *ignored)
{
    return list_of((fp_unit *)self, fp_flat_buffer_accumulated_grad);
}

/* show_kept(shown): let .grad be what no_sync has kept, or what was reduced beside it. */
PyObject *
fp_unit_show_kept(PyObject *self, PyObject *argument)
{
    fp_unit *unit = (fp_unit *)self;
    const char *name = PyUnicode_AsUTF8(unit->name);
    int shown;
    if (name == NULL || fp_as_bool(argument, &shown) < 0) {
        return NULL;
    }
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        if (!shown ? fp_flat_param_read_kept(flat_param, name) < 0
                   : flat_param->shown == FP_SHOWN_REDUCED && fp_flat_buffer_has_accumulated(flat_param->flat) &&
                         fp_flat_param_show_kept(flat_param, name) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* set_kept(kept, owed): let that be what no_sync has kept, without showing it. */
PyObject *
fp_unit_set_kept(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_unit *unit = (fp_unit *)self;
    const char *name = PyUnicode_AsUTF8(unit->name);
    PyObject *kept = NULL, *owed = NULL; /* owned tuples, one item a part */
    char *flags = NULL;                  /* owned: owed, of all parts */
    Py_ssize_t n = 0;
    if (name == NULL || fp_check_nargs("set_kept", nargs, 2) < 0 ||
        (kept = fp_as_tuple(args[0], unit->n_flat_params, "kept gradients")) == NULL ||
        (owed = fp_as_tuple(args[1], unit->n_flat_params, "owed")) == NULL) {
        goto fail;
    }
    if (fp_unit_is_in_forward(unit) || (unit->root != NULL && unit->root->in_backward)) {
        PyErr_Format(PyExc_RuntimeError, "%U cannot be given gradients in the middle of a pass", unit->name);
        goto fail;
    }
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        n += PyTuple_GET_SIZE(unit->flat_params[k].owners);
    }
    flags = fp_new_array(n, sizeof *flags);
    if (flags == NULL) {
        goto fail;
    }
    n = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        PyObject *given = PyTuple_GET_ITEM(kept, k), *which = PyTuple_GET_ITEM(owed, k);
        if (!PyTuple_Check(which) || PyTuple_GET_SIZE(which) != PyTuple_GET_SIZE(flat_param->owners)) {
            PyErr_Format(PyExc_ValueError, "%U: expected a tuple of %zd for each part, of which parameters are owed",
                         unit->name, PyTuple_GET_SIZE(flat_param->owners));
            goto fail;
        }
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(which); i++) {
            int is_owed;
            if (fp_as_bool(PyTuple_GET_ITEM(which, i), &is_owed) < 0) {
                goto fail;
            }
            flags[n++] = (char)is_owed;
        }
        if (given != Py_None &&
            fp_flat_buffer_check_accumulated(flat_param->flat, flat_param->master, given, name) < 0) {
            goto fail;
        }
    }
    n = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        PyObject *given = PyTuple_GET_ITEM(kept, k);
        if (fp_flat_param_set_kept(&unit->flat_params[k], given == Py_None ? NULL : given, flags + n) < 0) {
            goto fail;
        }
        n += PyTuple_GET_SIZE(unit->flat_params[k].owners);
    }
    fp_free(flags);
    Py_DECREF(kept);
    Py_DECREF(owed);
    Py_RETURN_NONE;
fail:
    fp_free(flags);
    Py_XDECREF(kept);
    Py_XDECREF(owed);
    return NULL;
}

PyObject *
fp_unit_kept_bytes(PyObject *self, PyObject *ignored)
{
    const fp_unit *unit = (fp_unit *)self;
    int64_t device = 0, host = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        int64_t on_device, on_host;
        fp_flat_buffer_accumulated_bytes(unit->flat_params[k].flat, &on_device, &on_host);
        device += on_device;
        host += on_host;
    }
    return Py_BuildValue("LL", (long long)device, (long long)host);
}

PyObject *
fp_unit_copies(PyObject *self, PyObject *ignored)
{
    return list_of((fp_unit *)self, fp_flat_buffer_secondary_shard);
}
