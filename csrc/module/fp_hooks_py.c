/* module/fp_hooks_py.c -- find the names of a function of torch; remove a hook of torch, or a finder of modules, at a moment
 * when no thread reads the container.
 *
 * Python raises an error, or skips an entry, where a dictionary or list loses an entry while a loop goes over it. A finalizer
 * runs at any moment, so also inside of such a loop. The loop is found by its function: by its code, or by a global name in
 * the code. The search and the removal run no Python code and keep the GIL, so no loop can begin between them. */
#include "module/fp_tables.h"

/* 1: frame, or a frame that waits for it, runs the code `reader`, or code with the name `reader`; 0; -1 with an
 * exception. */
static int
is_read_in(PyFrameObject *frame, PyObject *reader)
{
    int found = 0;
    Py_INCREF(frame);
    while (frame != NULL && found == 0) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        if (PyUnicode_Check(reader)) {
            PyObject *names = PyObject_GetAttrString((PyObject *)code, "co_names");
            found = names == NULL ? -1 : PySequence_Contains(names, reader);
            Py_XDECREF(names);
        }
        else {
            found = (PyObject *)code == reader;
        }
        Py_DECREF(code);
        PyFrameObject *caller = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = caller;
    }
    Py_XDECREF(frame);
    return found;
}

/* The same for the frames of all threads. */
static int
is_read_in_a_thread(PyObject *reader)
{
    PyObject *current_frames = PySys_GetObject("_current_frames"); /* borrowed */
    PyObject *frames = current_frames == NULL ? NULL : PyObject_CallNoArgs(current_frames);
    if (frames == NULL) {
        return PyErr_Occurred() ? -1 : 1; /* a Python that does not say: perhaps it is */
    }
    PyObject *frame;
    Py_ssize_t at = 0;
    int found = 0;
    while (found == 0 && PyDict_Next(frames, &at, NULL, &frame)) {
        found = is_read_in((PyFrameObject *)frame, reader);
    }
    Py_DECREF(frames);
    return found;
}

/* Remove entry, a key of a dictionary or an item of a list. An entry that is gone already is no error. */
static int
remove_entry(PyObject *container, PyObject *entry)
{
    if (!PyList_Check(container)) {
        const int has_entry = PySequence_Contains(container, entry);
        return has_entry == 1 ? PyObject_DelItem(container, entry) : has_entry;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container); i++) {
        if (PyList_GET_ITEM(container, i) == entry) {
            return PySequence_DelItem(container, i);
        }
    }
    return 0;
}

static PyObject *
remove_unless_read(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("remove_unless_read", nargs, 3));
    if (!PyDict_Check(args[0]) && !PyList_Check(args[0])) {
        return PyErr_Format(PyExc_TypeError, "expected a dictionary or a list, got %.200s", Py_TYPE(args[0])->tp_name);
    }
    const int had_collector = PyGC_Disable(); /* frame objects are made, and a collection would run Python code */
    const int is_read = is_read_in_a_thread(args[2]);
    const int status = is_read != 0 ? is_read : remove_entry(args[0], args[1]);
    if (had_collector) {
        PyGC_Enable();
    }
    return status < 0 ? NULL : PyBool_FromLong(is_read == 0);
}

/* Add (module, name) to found for each global name of module that refers to thing. Returns -1 with an exception. */
static int
add_names(PyObject *found, PyObject *module, PyObject *thing)
{
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(PyModule_GetDict(module), &at, &name, &value);) {
        if (value == thing) {
            PyObject *place = PyTuple_Pack(2, module, name);
            const int status = place == NULL ? -1 : PyList_Append(found, place);
            Py_XDECREF(place);
            FP_TRY(status);
        }
    }
    return 0;
}

/* A loop in Python over the 100,000 names of all modules takes 20 times as long. It also writes to the reference counts of all
 * their values, so a forked process copies the memory of all. */
static PyObject *
names_of(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("names_of", nargs, 2));
    if (!PyDict_Check(args[0])) {
        return PyErr_Format(PyExc_TypeError, "expected a dictionary of modules, got %.200s", Py_TYPE(args[0])->tp_name);
    }
    const int had_collector = PyGC_Disable(); /* a collection would run Python code, which may delete a module */
    PyObject *found = PyList_New(0), *each;
    for (Py_ssize_t at = 0; found != NULL && PyDict_Next(args[0], &at, NULL, &each);) {
        if (PyModule_Check(each) && add_names(found, each, args[1]) < 0) {
            Py_CLEAR(found);
        }
    }
    if (had_collector) {
        PyGC_Enable();
    }
    return found;
}

PyMethodDef fp_hooks_methods[] = {
    {"names_of", FP_METHOD(names_of), METH_FASTCALL,
     "names_of($module, modules, thing, /)\n--\n\n"
     "Return a list of (module, name) for each global name of the modules that refers to the object thing itself.\n\n"
     "modules: a dictionary as sys.modules; its values that are no modules are left out."},
    {"remove_unless_read", FP_METHOD(remove_unless_read), METH_FASTCALL,
     "remove_unless_read($module, container, entry, reader, /)\n--\n\n"
     "Remove entry from container, and return whether it was removed. "
     "Nothing is removed while a thread runs reader: a code object, or a str for all code that uses the global of this "
     "name.\n\n"
     "entry: a key of a dictionary, or an item of a list. An entry that is gone already counts as removed. TypeError: "
     "container is neither."},
    {NULL, NULL, 0, NULL},
};
