/* python/fp_args.c -- module state, and the helpers for arguments and errors. */
#include "python/fp_args.h"

#include "core/fp_alloc.h"

#include <stdarg.h>
#include <string.h>

fp_module_state *
fp_get_state(PyObject *module)
{
    return (fp_module_state *)PyModule_GetState(module);
}

int
fp_check_nargs_between(const char *name, Py_ssize_t nargs, Py_ssize_t min, Py_ssize_t max)
{
    if (nargs >= min && nargs <= max) {
        return 0;
    }
    if (min == max) {
        PyErr_Format(PyExc_TypeError, "%s() takes exactly %zd arguments (%zd given)", name, min, nargs);
    }
    else {
        PyErr_Format(PyExc_TypeError, "%s() takes from %zd to %zd arguments (%zd given)", name, min, max, nargs);
    }
    return -1;
}

int
fp_check_nargs(const char *name, Py_ssize_t nargs, Py_ssize_t expected)
{
    return fp_check_nargs_between(name, nargs, expected, expected);
}

int
fp_read_args(const char *name, PyObject *const *args, Py_ssize_t nargs, const char *kinds, ...)
{
    va_list out;
    int status = fp_check_nargs(name, nargs, (Py_ssize_t)strlen(kinds));
    va_start(out, kinds);
    for (Py_ssize_t k = 0; status == 0 && k < nargs; k++) {
        switch (kinds[k]) {
            case 'i':
                status = fp_as_int64(args[k], va_arg(out, int64_t *));
                break;
            case 'd':
                status = fp_as_double(args[k], va_arg(out, double *));
                break;
            case 'b':
                status = fp_as_bool(args[k], va_arg(out, int *));
                break;
            default: /* 'O' */
                break;
        }
    }
    va_end(out);
    return status;
}

PyObject *
fp_as_text(PyObject *text)
{
    if (!PyUnicode_Check(text)) {
        return PyErr_Format(PyExc_TypeError, "expected a str, got %.200s", Py_TYPE(text)->tp_name);
    }
    if (PyUnicode_AsUTF8(text) != NULL) { /* which text keeps */
        return Py_NewRef(text);
    }
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        return NULL;
    }
    PyErr_Clear();
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace");
    PyObject *shown = bytes == NULL ? NULL : PyUnicode_FromEncodedObject(bytes, "utf-8", "strict");
    Py_XDECREF(bytes);
    if (shown != NULL && PyUnicode_AsUTF8(shown) == NULL) {
        Py_CLEAR(shown);
    }
    return shown;
}

int
fp_as_int64(PyObject *object, int64_t *out)
{
    PyObject *index = PyNumber_Index(object); /* owned; the object itself when it is an int */
    FP_NEED(index);
    const long long value = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    *out = (int64_t)value;
    return 0;
}

int
fp_as_double(PyObject *object, double *out)
{
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    *out = value;
    return 0;
}

int
fp_as_bool(PyObject *object, int *out)
{
    if (!PyBool_Check(object)) {
        return fp_raise(PyExc_TypeError, "expected True or False, got %.200s", Py_TYPE(object)->tp_name);
    }
    *out = object == Py_True;
    return 0;
}

int
fp_as_int64_array(PyObject *object, int64_t **out, Py_ssize_t *n)
{
    PyObject *items = PySequence_Tuple(object); /* ours, so nobody else can shrink it */
    FP_NEED(items);
    const Py_ssize_t count = PyTuple_GET_SIZE(items);
    int64_t *values = fp_new_array(count, sizeof *values);
    int status = values == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < count; i++) {
        status = fp_as_int64(PyTuple_GET_ITEM(items, i), &values[i]); /* borrowed item */
    }
    Py_DECREF(items);
    if (status < 0) {
        fp_free(values);
        return -1;
    }
    *out = values;
    *n = count;
    return 0;
}

void *
fp_new_array(Py_ssize_t count, size_t item_bytes)
{
    void *array = fp_calloc((size_t)count, item_bytes);
    return array == NULL ? PyErr_NoMemory() : array;
}

PyObject *
fp_as_tuple(PyObject *sequence, Py_ssize_t expected, const char *what)
{
    PyObject *items = PySequence_Tuple(sequence);
    if (items != NULL && PyTuple_GET_SIZE(items) != expected) {
        PyErr_Format(PyExc_ValueError, "expected %zd %s, got %zd", expected, what, PyTuple_GET_SIZE(items));
        Py_CLEAR(items);
    }
    return items;
}

PyObject *
fp_int64_tuple(const int64_t *values, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(values[i]);
        PyTuple_SET_ITEM(tuple, i, item); /* steals item */
        if (item == NULL) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

int
fp_raise(PyObject *type, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    return -1;
}

int
fp_fail(PyObject *module, fp_status status, const char *format, ...)
{
    if (status == FP_OK) {
        return 0;
    }
    if (status == FP_ENOMEM) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *shard_error = fp_get_state(module)->ShardError;
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(shard_error != NULL ? shard_error : PyExc_ValueError, format, arguments); /* gone at the end */
    va_end(arguments);
    return -1;
}
