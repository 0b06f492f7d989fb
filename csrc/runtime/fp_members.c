/* runtime/fp_members.c -- the walk over the modules of a model that finds its units; see fp_members.h. It reads the
 * dictionaries of objects, so it runs no code of the user. */
#include "runtime/fp_members.h"

/* A new reference to object.__dict__[name]. NULL: it has none, or an exception is set. */
static PyObject *
get(PyObject *object, const char *name)
{
    PyObject *key = PyUnicode_InternFromString(name);
    PyObject *dict = key == NULL ? NULL : PyObject_GenericGetDict(object, NULL);
    PyObject *value = dict == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(dict, key));
    Py_XDECREF(dict);
    Py_XDECREF(key);
    if (value == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* the object has no __dict__: a user's class may have an attribute _unit that is no Unit */
    }
    return value;
}

/* Put the address of object into found. 1: it was not there; 0; -1. */
static int
note(PyObject *found, const void *object)
{
    const Py_ssize_t before = PySet_GET_SIZE(found);
    PyObject *address = PyLong_FromVoidPtr((void *)(uintptr_t)object);
    const int status = address == NULL ? -1 : PySet_Add(found, address);
    Py_XDECREF(address);
    return status < 0 ? -1 : PySet_GET_SIZE(found) > before;
}

/* Note the unit that module wraps. 1: it is one of the root that was not found before; 0; -1. */
static int
note_unit(const fp_root *root, PyObject *found, PyObject *module)
{
    PyObject *wrapped = get(module, "_unit");
    PyObject *core = wrapped == NULL ? NULL : get(wrapped, "core");
    const int is_unit = core != NULL && fp_is_of(core, Py_TYPE(root->units.items[0])->tp_dealloc);
    const int is_new = is_unit && ((fp_unit *)core)->root == root ? note(found, core) : 0;
    Py_XDECREF(core);
    Py_XDECREF(wrapped);
    return PyErr_Occurred() ? -1 : is_new;
}

/* Append the children of module that were not found before to modules. */
static int
append_children(PyObject *modules, PyObject *found, PyObject *module)
{
    PyObject *children = get(module, "_modules"), *name, *child;
    const int is_dict = children != NULL && PyDict_Check(children);
    for (Py_ssize_t at = 0; is_dict && PyDict_Next(children, &at, &name, &child);) {
        const int is_new = child == Py_None ? 0 : note(found, child);
        if (is_new != 0 && (is_new < 0 || PyList_Append(modules, child) < 0)) {
            break;
        }
    }
    Py_XDECREF(children);
    return PyErr_Occurred() ? -1 : 0;
}

/* Put the modules and the units below a module into found, layer by layer, until all units are there. So it looks into units
 * only if they have others below them, or if a unit was removed. */
static int
walk(const fp_root *root, PyObject *found, PyObject *module)
{
    PyObject *modules = PyList_New(0);
    int status = modules == NULL ? -1 : PyList_Append(modules, module);
    Py_ssize_t left = root->units.n;
    for (Py_ssize_t i = 0; status == 0 && left > 0 && i < PyList_GET_SIZE(modules); i++) {
        const int is_new = note_unit(root, found, PyList_GET_ITEM(modules, i));
        left -= is_new > 0;
        status = is_new < 0 ? -1 : append_children(modules, found, PyList_GET_ITEM(modules, i));
    }
    Py_XDECREF(modules);
    return status;
}

static int
look(fp_root *root)
{
    PyObject *module = PyObject_CallNoArgs(root->members.model);
    PyObject *found = module == NULL ? NULL : PySet_New(NULL);
    int status = found == NULL ? -1 : 0;
    if (module == Py_None) {
        Py_CLEAR(root->members.model); /* it is freed; units that live on count as in the model */
    }
    else if (status == 0) {
        status = walk(root, found, module);
    }
    Py_XSETREF(root->members.found, status < 0 ? NULL : Py_NewRef(found));
    Py_XDECREF(found);
    Py_XDECREF(module);
    return status;
}

void
fp_members_forget(fp_root *root)
{
    Py_CLEAR(root->members.found);
}

int
fp_members_has(const fp_unit *unit)
{
    fp_members *members = &unit->root->members;
    if (members->model != NULL && members->found == NULL && look(unit->root) < 0) {
        return -1;
    }
    PyObject *address = members->model == NULL ? NULL : PyLong_FromVoidPtr((void *)(uintptr_t)unit);
    const int has = address == NULL ? 1 : PySet_Contains(members->found, address);
    Py_XDECREF(address);
    return PyErr_Occurred() ? -1 : has;
}

int
fp_members_takes_part(const fp_unit *unit)
{
    return unit->entry >= 0 ? 1 : fp_members_has(unit);
}

/* 1: other ranks take part in the reductions of its gradients. */
static int
is_reduced(const fp_unit *unit)
{
    return unit->n_flat_params > 0 && (fp_flat_param_plan(&unit->flat_params[0])->primary.group != NULL ||
                                       fp_flat_param_plan(&unit->flat_params[0])->replicate_group != NULL);
}

int
fp_members_drop_removed(fp_unit *unit)
{
    const int takes_part = is_reduced(unit) ? fp_members_takes_part(unit) : 1;
    for (Py_ssize_t k = 0; takes_part == 0 && k < unit->n_flat_params; k++) {
        fp_flat_param_drop_accumulated(&unit->flat_params[k]);
    }
    return takes_part < 0 ? -1 : !takes_part;
}
