/* python/fp_overrides.c -- whether a user replaced methods of a class or of one of its objects. */
#include "python/fp_overrides.h"

/* 1 if the class has every attribute of own as own has it, 0 if not, -1 on failure. The answer is kept for one class: its
 * version tag changes with every change of the class or a base, and no other class ever has it. */
static int
class_as_defined(fp_module_state *state, PyTypeObject *type, PyObject *own)
{
    if (type == state->overrides.type && own == state->overrides.own && state->overrides.version != 0 &&
        state->overrides.version == type->tp_version_tag) {
        return state->overrides.as_defined;
    }
    int same = 1;
    const unsigned int version = type->tp_version_tag;
    PyObject *names = PyDict_Keys(own); /* ours: looking an attribute up may run code that changes own */
    FP_NEED(names);
    for (Py_ssize_t i = 0; same > 0 && i < PyList_GET_SIZE(names); i++) {
        PyObject *name = PyList_GET_ITEM(names, i);
        PyObject *value = PyObject_GetAttr((PyObject *)type, name);
        if (value != NULL) {
            const PyObject *defined = PyDict_GetItemWithError(own, name);
            same = defined == NULL && PyErr_Occurred() ? -1 : value == defined;
            Py_DECREF(value);
        }
        else {
            same = PyErr_ExceptionMatches(PyExc_AttributeError) ? 0 : -1;
            if (same == 0) {
                PyErr_Clear();
            }
        }
    }
    Py_DECREF(names);
    if (same >= 0 && version == type->tp_version_tag) { /* else it changed, or got its first tag, just now */
        state->overrides.type = type;
        state->overrides.version = version;
        state->overrides.as_defined = same;
        Py_XSETREF(state->overrides.own, Py_NewRef(own));
    }
    return same;
}

static PyObject *
is_as_defined(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("is_as_defined", nargs, 3));
    if (!PyDict_CheckExact(args[1]) || !PyTuple_CheckExact(args[2])) {
        return PyErr_Format(PyExc_TypeError,
                            "expected a dict of attributes and a tuple of names, got %.200s and %.200s",
                            Py_TYPE(args[1])->tp_name, Py_TYPE(args[2])->tp_name);
    }
    int same = class_as_defined(fp_get_state(module), Py_TYPE(args[0]), args[1]);
    PyObject *dict = same > 0 ? PyObject_GenericGetDict(args[0], NULL) : NULL;
    if (same > 0 && dict == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; same > 0 && i < PyTuple_GET_SIZE(args[2]); i++) {
        const int found = PyDict_Contains(dict, PyTuple_GET_ITEM(args[2], i));
        same = found < 0 ? -1 : !found;
    }
    Py_XDECREF(dict);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

PyMethodDef fp_overrides_methods[] = {
    {"is_as_defined", FP_METHOD(is_as_defined), METH_FASTCALL,
     "is_as_defined($module, object, own, names, /)\n--\n\n"
     "Return whether object's class has each attribute of the dict own with own's value, and the dict of object none "
     "of names.\n\n"
     "own: {name: value as the class was defined}. The answer about the class is cached until the class changes."},
    {NULL, NULL, 0, NULL},
};
