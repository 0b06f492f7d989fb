/* python/fp_fields.c -- see fp_fields.h. */
#include "python/fp_fields.h"

#include <limits.h>

static const char *const kinds[] = {
    [FP_FIELD_OBJECT] = "an object",
    [FP_FIELD_TUPLE] = "a tuple",
    [FP_FIELD_TUPLE_OR_NONE] = "a tuple or None",
    [FP_FIELD_CALLABLE_OR_NONE] = "a function or None",
    [FP_FIELD_INT] = "an int of 32 bits",
    [FP_FIELD_INT64] = "an int of 64 bits",
    [FP_FIELD_DOUBLE] = "a float",
    [FP_FIELD_BOOL] = "True or False",
};

static int
store_object(fp_field_kind kind, PyObject *value, PyObject **place)
{
    if (value == Py_None && (kind == FP_FIELD_TUPLE_OR_NONE || kind == FP_FIELD_CALLABLE_OR_NONE)) {
        return 0;
    }
    const int fits =
        kind == FP_FIELD_OBJECT || (kind == FP_FIELD_CALLABLE_OR_NONE ? PyCallable_Check(value) : PyTuple_Check(value));
    if (fits) {
        *place = Py_NewRef(value);
    }
    return fits ? 0 : -1;
}

/* -1, with an exception or without one: the value is not of the field's kind. */
static int
store(const fp_field *field, PyObject *value, void *place)
{
    int64_t number;
    switch (field->kind) {
        case FP_FIELD_INT:
            if (fp_as_int64(value, &number) < 0 || number < INT_MIN || number > INT_MAX) {
                return -1;
            }
            *(int *)place = (int)number;
            return 0;
        case FP_FIELD_INT64:
            return fp_as_int64(value, place);
        case FP_FIELD_DOUBLE:
            return fp_as_double(value, place);
        case FP_FIELD_BOOL:
            return fp_as_bool(value, place);
        default:
            return store_object(field->kind, value, place);
    }
}

int
fp_fields_read(PyObject *object, const fp_field *table, void *into)
{
    for (const fp_field *field = table; field->name != NULL; field++) {
        PyObject *value = PyObject_GetAttrString(object, field->name);
        if (value == NULL) {
            return fp_raise(PyExc_TypeError, "expected an object with the attribute `%s`, got %.200s", field->name,
                            Py_TYPE(object)->tp_name);
        }
        const int status = store(field, value, (char *)into + field->offset);
        if (status < 0) {
            PyErr_Format(PyExc_TypeError, "expected `%s` to be %s, got %.200s", field->name, kinds[field->kind],
                         Py_TYPE(value)->tp_name);
        }
        Py_DECREF(value);
        FP_TRY(status);
    }
    return 0;
}

void
fp_fields_clear(const fp_field *table, void *into)
{
    for (const fp_field *field = table; field->name != NULL; field++) {
        if (field->kind < FP_FIELD_INT) {
            Py_CLEAR(*(PyObject **)((char *)into + field->offset));
        }
    }
}
