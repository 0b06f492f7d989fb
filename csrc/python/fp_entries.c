/* python/fp_entries.c -- see fp_entries.h. */
#include "python/fp_entries.h"

#include "core/fp_alloc.h"

/* One view from (module, name, shape, stride or None, offset); the arrays are the caller's to free, also on failure. */
static int
read_view(PyObject *entry, fp_view *view)
{
    int64_t *shape = NULL, *stride = NULL;
    Py_ssize_t ndim = 0, stride_ndim = 0;
    const int has_stride = PyTuple_GET_ITEM(entry, 3) != Py_None;
    FP_TRY(fp_as_int64_array(PyTuple_GET_ITEM(entry, 2), &shape, &ndim));
    view->shape = shape;
    view->ndim = ndim;
    if (has_stride && fp_as_int64_array(PyTuple_GET_ITEM(entry, 3), &stride, &stride_ndim) < 0) {
        return -1;
    }
    view->stride = stride;
    if (has_stride && stride_ndim != ndim) {
        return fp_raise(PyExc_ValueError, "%U has %zd sizes and %zd strides", PyTuple_GET_ITEM(entry, 1), ndim,
                        stride_ndim);
    }
    return fp_as_int64(PyTuple_GET_ITEM(entry, 4), &view->offset);
}

static int
check_entry(PyObject *entry, Py_ssize_t size, const char *expected)
{
    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != size) {
        return fp_raise(PyExc_TypeError, "expected tuples %s, got %.200s", expected, Py_TYPE(entry)->tp_name);
    }
    if (!PyUnicode_Check(PyTuple_GET_ITEM(entry, 1))) { /* no repr in the message: that of a freed tensor would crash */
        return fp_raise(PyExc_TypeError, "expected tuples %s, got a name that is %.200s", expected,
                        Py_TYPE(PyTuple_GET_ITEM(entry, 1))->tp_name);
    }
    return 0;
}

static int
read_parameters(PyObject *parameters, fp_attributes *attributes, fp_view *views)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parameters); i++) {
        PyObject *entry = PyTuple_GET_ITEM(parameters, i);
        FP_TRY(check_entry(entry, 5, "(module, name, shape, stride or None, offset)"));
        FP_TRY(fp_attributes_set(attributes, i, PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1)));
        FP_TRY(read_view(entry, &views[i]));
    }
    return 0;
}

static int
read_shared(PyObject *shared, fp_attributes *attributes)
{
    const Py_ssize_t n = attributes->n;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shared); i++) {
        PyObject *entry = PyTuple_GET_ITEM(shared, i);
        int64_t index;
        FP_TRY(check_entry(entry, 3, "(module, name, index of the parameter)"));
        FP_TRY(fp_attributes_set(attributes, n + i, PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1)));
        FP_TRY(fp_as_int64(PyTuple_GET_ITEM(entry, 2), &index));
        if (index < 0 || index >= n) {
            return fp_raise(PyExc_ValueError, "%U shares parameter %lld, expected 0 to %zd", PyTuple_GET_ITEM(entry, 1),
                            (long long)index, n - 1);
        }
        attributes->primary[i] = (Py_ssize_t)index;
    }
    return 0;
}

static int
read_all(PyObject *parameters, PyObject *shared, fp_attributes *attributes, fp_view *views)
{
    FP_TRY(fp_attributes_init(attributes, PyTuple_GET_SIZE(parameters), PyTuple_GET_SIZE(shared)));
    FP_TRY(read_parameters(parameters, attributes, views));
    return read_shared(shared, attributes);
}

int
fp_entries_read(PyObject *parameters, PyObject *shared, int64_t numel, fp_attributes *attributes,
                fp_geometry **geometry)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(parameters);
    fp_view *views = fp_new_array(n, sizeof *views);
    FP_NEED(views);
    int status = read_all(parameters, shared, attributes, views);
    if (status == 0) {
        *geometry = fp_torch_geometry_new(views, n, numel);
        status = *geometry == NULL ? -1 : 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        fp_free((void *)views[i].shape);
        fp_free((void *)views[i].stride);
    }
    fp_free(views);
    return status;
}
