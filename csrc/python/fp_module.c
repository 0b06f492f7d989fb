/* python/fp_module.c -- the module flatparam._C: multi-phase init, state, method tables, argument and error helpers. */
#include "python/fp_module.h"

#include "core/fp_alloc.h"
#include "python/fp_layout_py.h"
#include "python/fp_follower.h"
#include "python/fp_order_py.h"
#include "python/fp_attributes.h"
#include "python/fp_run.h"
#include "python/fp_step.h"
#include "python/fp_unit.h"

/* Add the table of a new *_py.c file here, and declare it in fp_module.h. */
static PyMethodDef *const fp_method_tables[] = {
    fp_core_methods, fp_pack_methods, fp_bridge_methods, fp_step_methods_of_module, fp_replaced_methods,
};

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
fp_as_int64(PyObject *object, int64_t *out)
{
    PyObject *index = PyNumber_Index(object); /* owned; the object itself when it is an int */
    if (index == NULL) {
        return -1;
    }
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
        PyErr_Format(PyExc_TypeError, "expected True or False, got %.200s", Py_TYPE(object)->tp_name);
        return -1;
    }
    *out = object == Py_True;
    return 0;
}

int
fp_as_int64_array(PyObject *object, int64_t **out, Py_ssize_t *n)
{
    int64_t *values = NULL;
    PyObject *items = PySequence_Tuple(object); /* ours, so nobody else can shrink it */
    if (items == NULL) {
        return -1;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(items);
    values = fp_calloc((size_t)count, sizeof *values);
    if (values == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (fp_as_int64(PyTuple_GET_ITEM(items, i), &values[i]) < 0) { /* borrowed item */
            goto fail;
        }
    }
    Py_DECREF(items);
    *out = values;
    *n = count;
    return 0;
fail:
    fp_free(values);
    Py_DECREF(items);
    return -1;
}

PyObject *
fp_int64_tuple(const int64_t *values, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);
    if (tuple == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyLong_FromLongLong(values[i]);
        if (item == NULL) {
            Py_DECREF(tuple);
            return NULL;
        }
        PyTuple_SET_ITEM(tuple, i, item); /* steals item */
    }
    return tuple;
}

/* The exception class of a status that is not FP_OK; borrowed. */
static PyObject *
exception_of(PyObject *module, fp_status status)
{
    switch (status) {
        case FP_ENOMEM:
            return PyExc_MemoryError;
        case FP_ESTATE:
            return PyExc_RuntimeError;
        case FP_OK:
        case FP_EINVAL:
        case FP_EOVERFLOW:
            break;
    }
    PyObject *shard_error = fp_get_state(module)->ShardError;
    return shard_error != NULL ? shard_error : PyExc_ValueError; /* gone while the interpreter ends */
}

int
fp_check(PyObject *module, fp_status status)
{
    return fp_fail(module, status, "%s", fp_status_message(status));
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
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(exception_of(module, status), format, arguments);
    va_end(arguments);
    return -1;
}

static int
fp_exec(PyObject *module)
{
    fp_module_state *state = fp_get_state(module); /* zeroed by the interpreter */
    state->ShardError = PyErr_NewExceptionWithDoc(
        "flatparam.ShardError", "A size, world size, rank or element range is out of range or does not fit 64 bits.",
        PyExc_ValueError, NULL);
    if (PyModule_AddObjectRef(module, "ShardError", state->ShardError) < 0) { /* also when it is NULL */
        return -1;
    }
    state->Layout = fp_layout_type_new(module);
    if (PyModule_AddObjectRef(module, "Layout", state->Layout) < 0) {
        return -1;
    }
    if (fp_attributes_exec() < 0) {
        return -1;
    }
    state->Unit = fp_unit_type_new(module);
    if (PyModule_AddObjectRef(module, "Unit", state->Unit) < 0) {
        return -1;
    }
    state->Run = fp_run_type_new(module);
    if (PyModule_AddObjectRef(module, "Run", state->Run) < 0) {
        return -1;
    }
    state->Step = fp_step_type_new(module);
    if (PyModule_AddObjectRef(module, "Step", state->Step) < 0) {
        return -1;
    }
    state->Order = fp_order_type_new(module);
    if (PyModule_AddObjectRef(module, "Order", state->Order) < 0) {
        return -1;
    }
    state->Follower = fp_follower_type_new(module);
    if (PyModule_AddObjectRef(module, "Follower", state->Follower) < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof fp_method_tables / sizeof fp_method_tables[0]; i++) {
        if (PyModule_AddFunctions(module, fp_method_tables[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
fp_traverse(PyObject *module, visitproc visit, void *arg)
{
    fp_module_state *state = fp_get_state(module);
    if (state != NULL) { /* not yet made while the module is being created */
        Py_VISIT(state->ShardError);
        Py_VISIT(state->Layout);
        Py_VISIT(state->Unit);
        Py_VISIT(state->Run);
        Py_VISIT(state->Step);
        Py_VISIT(state->Order);
        Py_VISIT(state->Follower);
    }
    return 0;
}

static int
fp_clear(PyObject *module)
{
    fp_module_state *state = fp_get_state(module);
    if (state != NULL) {
        Py_CLEAR(state->ShardError);
        Py_CLEAR(state->Layout);
        Py_CLEAR(state->Unit);
        Py_CLEAR(state->Run);
        Py_CLEAR(state->Step);
        Py_CLEAR(state->Order);
        Py_CLEAR(state->Follower);
    }
    return 0;
}

static void
fp_module_free(void *module)
{
    (void)fp_clear((PyObject *)module);
}

static PyModuleDef_Slot fp_slots[] = {
    {Py_mod_exec, fp_exec},
#if PY_VERSION_HEX >= 0x030C0000 /* libtorch_python keeps process-wide globals */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000 /* NOT_USED once a threaded test passes on a free-threaded build */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static PyModuleDef fp_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "flatparam._C",
    .m_doc = "The C core of flatparam; use it by way of the package flatparam.",
    .m_size = sizeof(fp_module_state),
    .m_slots = fp_slots,
    .m_traverse = fp_traverse,
    .m_clear = fp_clear,
    .m_free = fp_module_free,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&fp_module);
}
