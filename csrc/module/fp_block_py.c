/* module/fp_block_py.c -- the heap type flatparam._C.Block: a context manager whose end() runs even if Ctrl-C interrupts it.
 * flatparam/common/warned.py and flatparam/dropin/handle.py use it. */
#include "module/fp_tables.h"

enum { MOST_ENDS = 3 }; /* calls of end() at most: Ctrl-C may interrupt each of them */

typedef struct {
    PyObject_HEAD
    PyObject *begin, *end;
} block_object;

static PyObject *
block_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"begin", "end", NULL};
    PyObject *begin, *end;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:Block", keywords, &begin, &end)) {
        return NULL;
    }
    block_object *self = (block_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->begin = Py_NewRef(begin);
        self->end = Py_NewRef(end);
    }
    return (PyObject *)self;
}

static int
block_traverse(block_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->begin);
    Py_VISIT(self->end);
    return 0;
}

static int
block_clear(block_object *self)
{
    Py_CLEAR(self->begin);
    Py_CLEAR(self->end);
    return 0;
}

static void
block_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    block_clear((block_object *)self);
    fp_free_object(self);
}

/* Python handles no signal between these calls of end(), so Ctrl-C can raise only inside of one, and end() is called again. */
static int
end_it(const block_object *self)
{
    PyObject *first = NULL;
    for (int i = 0; i < MOST_ENDS; i++) {
        PyObject *done = PyObject_CallNoArgs(self->end);
        if (done != NULL) {
            Py_DECREF(done);
            break;
        }
        PyObject *error = PyErr_GetRaisedException();
        if (first == NULL) {
            first = error;
        }
        else {
            Py_DECREF(error);
        }
    }
    if (first != NULL) {
        PyErr_SetRaisedException(first);
    }
    return first == NULL ? 0 : -1;
}

static PyObject *
block_enter(block_object *self, PyObject *ignored)
{
    PyObject *result = PyObject_CallNoArgs(self->begin);
    if (result == NULL) {
        PyObject *error = PyErr_GetRaisedException();
        if (end_it(self) < 0) {
            PyErr_Clear(); /* the exception of begin() is its cause */
        }
        PyErr_SetRaisedException(error);
    }
    return result;
}

static PyObject *
block_exit(block_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    return end_it(self) < 0 ? NULL : Py_NewRef(Py_False);
}

static PyMethodDef block_methods[] = {
    {"__enter__", FP_METHOD(block_enter), METH_NOARGS,
     "__enter__($self, /)\n--\n\nCall begin() and return its result. "
     "If begin() raises, call end() and raise the exception of begin()."},
    {"__exit__", FP_METHOD(block_exit), METH_FASTCALL,
     "__exit__($self, *exception)\n--\n\nCall end(). Return False: an exception of the block goes on."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot block_slots[] = {
    {Py_tp_doc, "Block(begin, end)\n--\n\n"
                "A context manager. The with statement calls begin() when it is entered, and end() when it is left "
                "or begin() has raised.\n\n"
                "If end() raises, as for Ctrl-C, it is called again, three times at most. It must go on where it was "
                "interrupted, and do nothing if nothing is left. Then its first exception is raised."},
    {Py_tp_new, block_new},
    {Py_tp_dealloc, block_dealloc},
    {Py_tp_traverse, block_traverse},
    {Py_tp_clear, block_clear},
    {Py_tp_methods, block_methods},
    {0, NULL},
};

PyType_Spec fp_block_type = FP_TYPE("Block", block_object, Py_TPFLAGS_HAVE_GC, block_slots);
