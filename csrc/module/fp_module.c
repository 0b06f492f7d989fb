/* module/fp_module.c -- the module flatparam._C: multi-phase init, types and method tables. */
#include "module/fp_tables.h"
#include "python/fp_attributes.h"
#include "python/fp_overrides.h"
#include "runtime/fp_flat_param.h"
#include "runtime/fp_root.h"
#include "runtime/fp_trace_py.h"
#include "runtime/fp_unit.h"
#include "runtime/fp_unshard.h"

/* Add the table of a new file here, and declare it in fp_tables.h. */
static PyMethodDef *const fp_method_tables[] = {
    fp_core_methods,   fp_exit_methods,           fp_hooks_methods,     fp_process_methods,
    fp_tensor_methods, fp_unit_methods_of_module, fp_overrides_methods,
};

static PyType_Spec *const fp_types[] = {
    &fp_block_type, &fp_board_type, &fp_gather_type, &fp_layout_type,      &fp_module_params_type,
    &fp_root_type,  &fp_unit_type,  &fp_trace_type,  &fp_model_trace_type,
};

/* Numbers that Python passes to C, or gets from it. */
static const struct {
    const char *name;
    long value;
} fp_constants[] = {
    {"EVENT_GATHERS", FP_EVENT_GATHERS},
    {"EVENT_REDUCES", FP_EVENT_REDUCES},
    {"EVENT_GATHERS_OUTSIDE", FP_EVENT_GATHERS_OUTSIDE},
    {"EVENT_REDUCES_ACCUMULATED", FP_EVENT_REDUCES_ACCUMULATED},
    {"EVENT_AGREES", FP_EVENT_AGREES},
    {"EVENT_CLIPS", FP_EVENT_CLIPS},
    {"EVENT_SHOWS_GRADIENTS", FP_EVENT_SHOWS_GRADIENTS},
    {"EVENT_SCALES", FP_EVENT_SCALES},
    {"EVENT_AGREES_ON_GRADIENTS", FP_EVENT_AGREES_ON_GRADIENTS},
    {"EVENT_LEARNS", FP_EVENT_LEARNS},
    {"EVENT_EXCHANGES", FP_EVENT_EXCHANGES},
    {"EVENT_KINDS", FP_EVENT_KINDS},
    {"TRACE_BROKEN", FP_TRACE_BROKEN},
    {"TRACE_LOST", FP_TRACE_LOST},
    {"TRACE_MISSED", (long)FP_TRACE_MISSED},
    {"GROUP_SHARD", FP_GROUP_SHARD},
    {"GROUP_REPLICATE", FP_GROUP_REPLICATE},
    {"GROUP_PARAM", FP_GROUP_PARAM},
    {"GROUP_OUTER", FP_GROUP_OUTER},
    {"GROUPS", FP_GROUPS},
    {"MOST_TOGETHER", FP_MOST_TOGETHER},
};

static int
fp_exec(PyObject *module)
{
    fp_module_state *state = fp_get_state(module); /* zeroed by the interpreter */
    state->ShardError = PyErr_NewExceptionWithDoc(
        "flatparam.ShardError", "A size, world size, rank or element range is out of range or does not fit 64 bits.",
        PyExc_ValueError, NULL);
    FP_TRY(PyModule_AddObjectRef(module, "ShardError", state->ShardError)); /* also when it is NULL */
    PyObject *bases = PyTuple_Pack(3, PyExc_RuntimeError, PyExc_AssertionError, PyExc_ValueError);
    state->StateError = bases == NULL ? NULL
                                      : PyErr_NewExceptionWithDoc("flatparam.fsdp.errors.StateError",
                                                                  "A call at a time or on a unit where it may not be "
                                                                  "made; of all the types that torch's versions raise.",
                                                                  bases, NULL);
    Py_XDECREF(bases);
    FP_TRY(PyModule_AddObjectRef(module, "StateError", state->StateError)); /* also when it is NULL */
    FP_TRY(fp_attributes_exec());
    for (size_t i = 0; i < sizeof fp_types / sizeof fp_types[0]; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, fp_types[i], NULL);
        FP_NEED(type);
        const int status = PyModule_AddType(module, (PyTypeObject *)type);
        Py_DECREF(type);
        FP_TRY(status);
    }
    for (size_t i = 0; i < sizeof fp_constants / sizeof fp_constants[0]; i++) {
        FP_TRY(PyModule_AddIntConstant(module, fp_constants[i].name, fp_constants[i].value));
    }
    for (size_t i = 0; i < sizeof fp_method_tables / sizeof fp_method_tables[0]; i++) {
        FP_TRY(PyModule_AddFunctions(module, fp_method_tables[i]));
    }
    return 0;
}

static int
fp_traverse(PyObject *module, visitproc visit, void *arg)
{
    fp_module_state *state = fp_get_state(module);
    if (state != NULL) { /* not yet made while the module is being created */
        Py_VISIT(state->ShardError);
        Py_VISIT(state->StateError);
        Py_VISIT(state->overrides.own);
    }
    return 0;
}

static int
fp_clear(PyObject *module)
{
    fp_module_state *state = fp_get_state(module);
    if (state != NULL) {
        Py_CLEAR(state->ShardError);
        Py_CLEAR(state->StateError);
        state->overrides.version = 0;
        Py_CLEAR(state->overrides.own);
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
