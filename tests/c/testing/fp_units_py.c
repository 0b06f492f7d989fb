/* fp_units_py.c -- what tests see of a unit and of its root, and the package does not ask for. */
#include <string.h>

#include "runtime/fp_types.h"
#include "fp_testing.h"

/* Returns 0 if object is of this type of flatparam._C, else -1 with TypeError. */
static int
check_type(PyObject *object, const char *type)
{
    if (strcmp(Py_TYPE(object)->tp_name, type) == 0) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "expected a %s, got %.200s", type, Py_TYPE(object)->tp_name);
    return -1;
}

PyObject *
fp_py_counts(PyObject *module, PyObject *object)
{
    const fp_root *root = (const fp_root *)object;
    return check_type(object, "flatparam._C.Root") < 0
               ? NULL
               : Py_BuildValue("{sLsLsL}", "gathers", (long long)root->counts[FP_COUNT_GATHERS], "refreshes",
                               (long long)root->counts[FP_COUNT_REFRESHES], "reductions",
                               (long long)root->counts[FP_COUNT_REDUCTIONS]);
}

PyObject *
fp_py_accumulated_bytes(PyObject *module, PyObject *object)
{
    const fp_unit *unit = (const fp_unit *)object;
    int64_t device = 0, host = 0;
    if (check_type(object, "flatparam._C.Unit") < 0) {
        return NULL;
    }
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        int64_t on_device, on_host;
        fp_flat_buffer_accumulated_bytes(unit->flat_params[k].flat, &on_device, &on_host);
        device += on_device;
        host += on_host;
    }
    return Py_BuildValue("LL", (long long)device, (long long)host);
}

PyObject *
fp_py_secondary_shards(PyObject *module, PyObject *object)
{
    const fp_unit *unit = (const fp_unit *)object;
    PyObject *list = check_type(object, "flatparam._C.Unit") < 0 ? NULL : PyList_New(unit->n_flat_params);
    for (Py_ssize_t k = 0; list != NULL && k < unit->n_flat_params; k++) {
        PyObject *shard = fp_flat_buffer_secondary_shard(unit->flat_params[k].flat);
        if (shard == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, k, shard); /* steals shard */
        }
    }
    return list;
}
