/* module/fp_core_py.c -- wrappers of core/fp_boxes and core/fp_report, and the columns of the parameters in a shard. */
#include "module/fp_tables.h"

#include "core/fp_alloc.h"
#include "core/fp_boxes.h"
#include "core/fp_report.h"

/* Append item i of each of the n fields to its column, and (first, last) of the shard info to the column after them. */
static int
add_held(PyObject *const *columns, PyObject *info, PyObject *const *fields, Py_ssize_t n, Py_ssize_t i)
{
    int status = 0;
    for (Py_ssize_t f = 0; status == 0 && f <= n; f++) {
        PyObject *value = f < n ? PySequence_GetItem(fields[f], i) : PyTuple_GetSlice(info, 3, 5);
        status = value == NULL ? -1 : PyList_Append(columns[f], value);
        Py_XDECREF(value);
    }
    return status;
}

static PyObject *
held(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *infos = NULL, *columns = NULL, *result = NULL; /* owned */
    FP_TRY_NULL(fp_check_nargs_between("held", nargs, 1, PY_SSIZE_T_MAX));
    infos = PySequence_Tuple(args[0]);
    columns = infos == NULL ? NULL : PyTuple_New(nargs);
    for (Py_ssize_t f = 0; columns != NULL && f < nargs; f++) {
        PyTuple_SET_ITEM(columns, f, PyList_New(0));
        if (PyTuple_GET_ITEM(columns, f) == NULL) {
            goto done;
        }
    }
    for (Py_ssize_t i = 0; columns != NULL && i < PyTuple_GET_SIZE(infos); i++) {
        PyObject *info = PyTuple_GET_ITEM(infos, i);
        if (!PyTuple_Check(info) || PyTuple_GET_SIZE(info) < 5) {
            PyErr_Format(PyExc_TypeError, "expected a shard info, got %.200s", Py_TYPE(info)->tp_name);
            goto done;
        }
        const int in_shard = PyObject_IsTrue(PyTuple_GET_ITEM(info, 0));
        if (in_shard < 0) {
            goto done;
        }
        if (in_shard && add_held(fp_items(columns), info, args + 1, nargs - 1, i) < 0) {
            goto done;
        }
    }
    result = columns == NULL ? NULL : PyTuple_New(nargs);
    for (Py_ssize_t f = 0; result != NULL && f < nargs; f++) {
        PyTuple_SET_ITEM(result, f, PyList_AsTuple(PyTuple_GET_ITEM(columns, f)));
        if (PyTuple_GET_ITEM(result, f) == NULL) {
            Py_CLEAR(result);
        }
    }
done:
    Py_XDECREF(infos);
    Py_XDECREF(columns);
    return result;
}

/* A list of (offsets, sizes) from count boxes of ndim dimensions; NULL with an exception set. */
static PyObject *
boxes_as_list(const int64_t *offsets, const int64_t *sizes, size_t count, Py_ssize_t ndim)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t b = 0; list != NULL && b < count; b++) {
        PyObject *offset = fp_int64_tuple(offsets + b * (size_t)ndim, ndim);
        PyObject *size = offset == NULL ? NULL : fp_int64_tuple(sizes + b * (size_t)ndim, ndim);
        PyObject *box = size == NULL ? NULL : PyTuple_Pack(2, offset, size);
        Py_XDECREF(offset);
        Py_XDECREF(size);
        PyList_SET_ITEM(list, (Py_ssize_t)b, box); /* steals box */
        if (box == NULL) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
fp_py_boxes_of_range(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *result = NULL;
    int64_t *shape = NULL, *boxes = NULL; /* owned */
    Py_ssize_t ndim;
    int64_t begin, end;
    size_t count;

    FP_TRY_NULL(fp_read_args("boxes_of_range", args, nargs, "Oii", &begin, &end));
    FP_TRY_NULL(fp_as_int64_array(args[0], &shape, &ndim));
    if (ndim > FP_MAX_DIMS) {
        fp_fail(module, FP_EINVAL, "expected a shape of at most %d dimensions, got %zd", FP_MAX_DIMS, ndim);
        goto done;
    }
    const size_t half = fp_boxes_most((size_t)ndim) * (size_t)ndim;
    boxes = fp_new_array((Py_ssize_t)(2 * half), sizeof *boxes);
    if (boxes != NULL &&
        fp_fail(
            module, fp_boxes_of_range(shape, (size_t)ndim, begin, end, boxes, boxes + half, &count),
            "expected 0 <= begin <= end <= the shape's elements, which fit 64 bits; got begin %lld, end %lld of %zd "
            "dimensions",
            (long long)begin, (long long)end, ndim) == 0) {
        result = boxes_as_list(boxes, boxes + half, count, ndim);
    }
done:
    fp_free(shape);
    fp_free(boxes);
    return result;
}

static PyObject *
write_report(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t rank, step, event;
    FP_TRY_NULL(fp_read_args("write_report", args, nargs, "iiiO", &rank, &step, &event));
    if (rank < 0 || step < 0 || event < 0) {
        return PyErr_Format(PyExc_ValueError, "expected rank, step and event of at least 0");
    }
    PyObject *text = fp_as_text(args[3]);
    FP_NEED_NULL(text);
    PyObject *report =
        PyUnicode_FromFormat("%lld %lld %lld %U", (long long)rank, (long long)step, (long long)event, text);
    Py_DECREF(text);
    return report;
}

static PyObject *
read_report(PyObject *module, PyObject *said)
{
    fp_report report;
    Py_ssize_t size;
    const char *utf8 = PyUnicode_AsUTF8AndSize(said, &size);
    FP_NEED_NULL(utf8);
    if (!fp_report_read(utf8, &report)) {
        return PyErr_Format(PyExc_ValueError, "expected a text of write_report(), got %R", said);
    }
    return Py_BuildValue("LLKs#", (long long)report.rank, (long long)report.step, (unsigned long long)report.event,
                         report.text, size - (report.text - utf8));
}

PyMethodDef fp_core_methods[] = {
    {"held", FP_METHOD(held), METH_FASTCALL,
     "held($module, infos, /, *fields)\n--\n\n"
     "Return a tuple of columns about the parameters of which the shard has elements. "
     "There is a column for each of fields, with its values for these parameters, and then one of (first, last) "
     "element, counted in the parameter and inclusive.\n\ninfos: torch's shard infos, one a parameter."},
    {"boxes_of_range", FP_METHOD(fp_py_boxes_of_range), METH_FASTCALL,
     "boxes_of_range(shape, begin, end, /)\n--\n\n"
     "Cut elements [begin, end) of a row-major shape into boxes of consecutive elements. "
     "Return a list of (offsets, sizes), in the order of their first elements."},
    {"write_report", FP_METHOD(write_report), METH_FASTCALL,
     "write_report($module, rank, step, event, text, /)\n--\n\n"
     "Return the text in which a rank reports a collective, or an exception, in the store. "
     "read_report() gives the four back; lone surrogates in text are escaped. ValueError: a number is negative."},
    {"read_report", read_report, METH_O,
     "read_report($module, report, /)\n--\n\n"
     "Return (rank, step, event, text) of a text that write_report() has returned. ValueError: it is no such text."},
    {NULL, NULL, 0, NULL},
};
