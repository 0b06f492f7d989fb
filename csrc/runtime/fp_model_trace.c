/* runtime/fp_model_trace.c -- the type _C.ModelTrace: where the passes of one model begin in a CollectiveTrace that models share. A pass
 * that comes to no collective may be of one rank alone: it must not end the pass of another model there. */
#include "runtime/fp_model_trace.h"

#include "runtime/fp_trace_py.h"

typedef struct {
    PyObject_HEAD
    PyObject *trace;
    int began; /* a pass, since the last event of this model */
    int ended; /* a backward, since the last event of this model */
    int keeps; /* the last backward kept its gradients */
} model_trace_object;

static int
before(PyObject *watcher, uint64_t event)
{
    model_trace_object *self = (model_trace_object *)watcher;
    const int gathers = event % FP_EVENT_KINDS != FP_EVENT_REDUCES; /* or is about to */
    const int new_pass =
        self->ended || (gathers && self->began); /* where there are no gathers a pass may be of one rank */
    self->ended = 0;
    self->began = self->began && !new_pass;
    return fp_trace_note_event(
        self->trace, event + (!gathers && self->keeps ? FP_EVENT_REDUCES_KEPT - FP_EVENT_REDUCES : 0), new_pass);
}

static int
waiting(PyObject *watcher)
{
    return fp_trace_note_wait(((model_trace_object *)watcher)->trace);
}

static int
failed(PyObject *watcher, const char *message)
{
    return fp_trace_note_failure(((model_trace_object *)watcher)->trace, message);
}

static int
is_broken(PyObject *watcher)
{
    return fp_trace_is_broken(((model_trace_object *)watcher)->trace);
}

const fp_group_calls fp_model_trace_calls = {
    .before = before, .waiting = waiting, .failed = failed, .is_broken = is_broken};

void
fp_model_trace_begin_pass(PyObject *trace)
{
    ((model_trace_object *)trace)->began = 1;
}

void
fp_model_trace_end_backward(PyObject *trace, int keeps)
{
    model_trace_object *self = (model_trace_object *)trace;
    self->ended = 1;
    self->keeps = keeps;
}

static PyObject *
model_trace_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"order", NULL};
    PyObject *trace;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:ModelTrace", keywords, &trace)) {
        return NULL;
    }
    if (!fp_trace_check(trace)) {
        PyErr_Format(PyExc_TypeError, "expected a CollectiveTrace, got %.200s", Py_TYPE(trace)->tp_name);
        return NULL;
    }
    model_trace_object *self = (model_trace_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->trace = Py_NewRef(trace);
        self->ended = 1; /* the first event begins a pass */
    }
    return (PyObject *)self;
}

static int
model_trace_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((model_trace_object *)object)->trace);
    return 0;
}

static int
model_trace_clear(PyObject *object)
{
    return 0; /* a watcher is used until it goes: cycles are broken at the trace */
}

static void
model_trace_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_CLEAR(((model_trace_object *)object)->trace);
    type->tp_free(object);
    Py_DECREF(type);
}

int
fp_model_trace_check(PyObject *object)
{
    return fp_is_of(object, model_trace_dealloc);
}

static PyType_Slot model_trace_slots[] = {
    {Py_tp_doc,
     "ModelTrace(order)\n--\n\nOne model at order, a CollectiveTrace that models of a group share: whose passes they "
     "are."},
    {Py_tp_new, model_trace_new},
    {Py_tp_dealloc, model_trace_dealloc},
    {Py_tp_traverse, model_trace_traverse},
    {Py_tp_clear, model_trace_clear},
    {0, NULL},
};

PyType_Spec fp_model_trace_type = FP_TYPE("ModelTrace", model_trace_object, Py_TPFLAGS_HAVE_GC, model_trace_slots);
