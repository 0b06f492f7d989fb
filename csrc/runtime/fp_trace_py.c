/* runtime/fp_trace_py.c -- two types; see fp_trace_py.h. _C.CollectiveTrace decides before each collective whether this
 * rank asks the other ranks. core/fp_trace.c predicts the next collective, and Python asks
 * (flatparam/fsdp/desync/trace.py).
 *
 * _C.ModelTrace notes where the passes of one model begin, as several models may share a CollectiveTrace. It notes a pass
 * with the first collective in it: one rank alone may run a pass without collectives, and that must not begin a pass of
 * another model in the shared trace. */
#include "runtime/fp_trace_py.h"

#include <stddef.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    fp_trace *trace;   /* owned */
    PyObject *agree;   /* agree(index, event, new_pass, alone): ask the other ranks; it raises if they differ */
    PyObject *waiting; /* waiting(): called a few times a second while a collective is waited for */
    PyObject *failed;  /* failed(message): a collective has failed */
    int always;        /* set by Python: 1: ask before each event */
} trace_object;

/* Call a function for its effect. Steals args; NULL: an exception is set. */
static int
call(PyObject *function, PyObject *args)
{
    PyObject *result = args == NULL ? NULL : PyObject_CallObject(function, args);
    Py_XDECREF(args);
    return fp_drop_result(result);
}

/* Note an event that is about to begin. Ask the other ranks unless it was predicted, nothing was missed, and the
 * trace is not broken. -1: it must not begin. */
static int
note(trace_object *self, uint64_t event, int new_pass)
{
    fp_trace_verdict verdict;
    const int64_t index = fp_trace_count(self->trace);
    switch (fp_trace_note(self->trace, event, new_pass, &verdict)) {
        case FP_OK:
            break;
        case FP_ENOMEM:
            PyErr_NoMemory();
            return -1;
        default:
            return fp_raise(PyExc_ValueError, "expected an event below TRACE_MISSED, got %llu",
                            (unsigned long long)event);
    }
    int64_t first;
    uint64_t digest;
    if (verdict == FP_TRACE_EXPECTED && !fp_trace_broken(self->trace) && !self->always &&
        !fp_trace_missed(self->trace, &first, &digest)) {
        return 0;
    }
    return call(self->agree, Py_BuildValue("LKii", (long long)index, (unsigned long long)event, new_pass,
                                           verdict == FP_TRACE_NEW        ? 0
                                           : verdict == FP_TRACE_EXPECTED ? 2
                                                                          : 1));
}

/* ---- _C.CollectiveTrace ---- */

static PyObject *
trace_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"agree", "waiting", "failed", NULL};
    PyObject *agree, *waiting_function, *failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:CollectiveTrace", keywords, &agree, &waiting_function,
                                     &failed)) {
        return NULL;
    }
    trace_object *self = (trace_object *)type->tp_alloc(type, 0);
    FP_NEED_NULL(self);
    self->agree = Py_NewRef(agree);
    self->waiting = Py_NewRef(waiting_function);
    self->failed = Py_NewRef(failed);
    self->trace = fp_trace_new();
    if (self->trace == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int
trace_traverse(trace_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->agree);
    Py_VISIT(self->waiting);
    Py_VISIT(self->failed);
    return 0;
}

static int
trace_clear(trace_object *self)
{
    Py_CLEAR(self->agree);
    Py_CLEAR(self->waiting);
    Py_CLEAR(self->failed);
    return 0;
}

static void
trace_dealloc(PyObject *object)
{
    trace_object *self = (trace_object *)object;
    PyObject_GC_UnTrack(object);
    (void)trace_clear(self);
    fp_trace_free(self->trace);
    fp_free_object(object);
}

fp_trace *
fp_trace_of(PyObject *object)
{
    if (!fp_is_of(object, trace_dealloc)) {
        PyErr_Format(PyExc_TypeError, "expected a CollectiveTrace, got %.200s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    return ((trace_object *)object)->trace;
}

static PyObject *
trace_note(trace_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t event;
    int new_pass;
    FP_TRY_NULL(fp_read_args("note", args, nargs, "ib", &event, &new_pass));
    return fp_none_unless(note(self, (uint64_t)event, new_pass));
}

static PyObject *
trace_begin(trace_object *self, PyObject *ignored)
{
    fp_trace_begin(self->trace);
    Py_RETURN_NONE;
}

static PyObject *
trace_launch(trace_object *self, PyObject *ignored)
{
    fp_trace_launch(self->trace);
    Py_RETURN_NONE;
}

static PyObject *
trace_has_begun(trace_object *self, PyObject *argument)
{
    int64_t index;
    return fp_as_int64(argument, &index) < 0 ? NULL : PyBool_FromLong(fp_trace_has_begun(self->trace, index));
}

static PyObject *
trace_confirm_not_begun(trace_object *self, PyObject *ignored)
{
    fp_trace_confirm_not_begun(self->trace);
    Py_RETURN_NONE;
}

static PyObject *
trace_at(trace_object *self, PyObject *argument)
{
    int64_t index;
    uint64_t event;
    int new_pass;
    FP_TRY_NULL(fp_as_int64(argument, &index));
    if (!fp_trace_at(self->trace, index, &event, &new_pass)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("KO", (unsigned long long)event, new_pass ? Py_True : Py_False);
}

static PyObject *
trace_count(trace_object *self, void *ignored)
{
    return PyLong_FromLongLong(fp_trace_count(self->trace));
}

static PyObject *
trace_passes(trace_object *self, void *ignored)
{
    return PyLong_FromLongLong(fp_trace_passes(self->trace));
}

static PyObject *
trace_missed(trace_object *self, void *ignored)
{
    int64_t index;
    uint64_t digest;
    if (!fp_trace_missed(self->trace, &index, &digest)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("LK", (long long)index, (unsigned long long)digest);
}

static PyObject *
trace_join(trace_object *self, PyObject *object)
{
    fp_trace *other = fp_trace_of(object);
    FP_NEED_NULL(other);
    return fp_trace_join(self->trace, other) == FP_OK ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static PyObject *
trace_broken(trace_object *self, void *ignored)
{
    return PyLong_FromLong(fp_trace_broken(self->trace));
}

static int
set_trace_broken(trace_object *self, PyObject *value, void *ignored)
{
    if (value == NULL) {
        return fp_raise(PyExc_AttributeError, "broken cannot be deleted");
    }
    int64_t broken;
    FP_TRY(fp_as_int64(value, &broken));
    if (broken < FP_TRACE_WHOLE || broken > FP_TRACE_LOST) {
        return fp_raise(PyExc_ValueError, "expected 0, TRACE_BROKEN or TRACE_LOST, got %lld", (long long)broken);
    }
    fp_trace_set_broken(self->trace, (fp_trace_state)broken);
    return 0;
}

static PyMethodDef trace_methods[] = {
    {"note", FP_METHOD(trace_note), METH_FASTCALL,
     "note($self, event, new_pass, /)\n--\n\n"
     "Note an event that is about to begin, and call agree() unless it was expected. If agree() raises, it must not "
     "begin."},
    {"begin", FP_METHOD(trace_begin), METH_NOARGS,
     "begin($self, /)\n--\n\n"
     "The event that was noted last has begun. Without this call before the next event it counts as missed."},
    {"launch", FP_METHOD(trace_launch), METH_NOARGS,
     "launch($self, /)\n--\n\n"
     "The event that was noted last is begun by code that an exception may leave before or after the begin."},
    {"has_begun", FP_METHOD(trace_has_begun), METH_O,
     "has_begun($self, index, /)\n--\n\n"
     "Return whether the event of this index has begun. False also if it is not noted yet, or too old."},
    {"confirm_not_begun", FP_METHOD(trace_confirm_not_begun), METH_NOARGS,
     "confirm_not_begun($self, /)\n--\n\nForget the missed events: it is known that no rank has begun them."},
    {"at", FP_METHOD(trace_at), METH_O,
     "at($self, index, /)\n--\n\n"
     "Return (event, new_pass) of this index, counted from 0; None if it is not noted yet, or too old."},
    {"join", FP_METHOD(trace_join), METH_O,
     "join($self, other, /)\n--\n\nBreak other, a CollectiveTrace, too, when HealthBoard.watch() breaks this one."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef trace_getset[] = {
    {"count", FP_GETTER(trace_count), NULL, "Number of events that were noted.", NULL},
    {"passes", FP_GETTER(trace_passes), NULL, "Number of passes that these events have begun.", NULL},
    {"missed", FP_GETTER(trace_missed), NULL,
     "(index of the first, digest of all) of the events that were missed since the last confirm_not_begun(); None: no "
     "event. "
     "The digest is 0 if it is unknown whether one of them has begun. While there are any, each event calls agree().",
     NULL},
    {"broken", FP_GETTER(trace_broken), (setter)(void (*)(void))set_trace_broken,
     "TRACE_BROKEN: ranks differ, or one is lost; each event calls agree() then. "
     "TRACE_LOST: the same, and a collective was aborted, so its tensors have no values. Else 0.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef trace_members[] = {
    {"always", Py_T_INT, offsetof(trace_object, always), 0, "1: each event calls agree(), expected or not."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot trace_slots[] = {
    {Py_tp_doc, "CollectiveTrace(agree, waiting, failed)\n--\n\n"
                "The collectives over one group in the order of this process, and the prediction of the next "
                "one.\n\nagree(index, event, new_pass, alone): called before an event that was not expected.\n"
                "alone: 0: no event was expected; 1: another event was: ranks that do as expected do not call "
                "agree(); 2: this event was.\nwaiting(): called several times a second during a wait.\n"
                "failed(message): called when a collective has failed."},
    {Py_tp_new, trace_new},
    {Py_tp_dealloc, trace_dealloc},
    {Py_tp_traverse, trace_traverse},
    {Py_tp_clear, trace_clear},
    {Py_tp_methods, trace_methods},
    {Py_tp_getset, trace_getset},
    {Py_tp_members, trace_members},
    {0, NULL},
};

PyType_Spec fp_trace_type = FP_TYPE("CollectiveTrace", trace_object, Py_TPFLAGS_HAVE_GC, trace_slots);

/* ---- _C.ModelTrace ---- */

typedef struct {
    PyObject_HEAD
    trace_object *trace; /* owned */
    int began;           /* 1: a pass has begun since the last event of this model */
    int ended;           /* 1: a backward has ended since the last event of this model */
    int keeps;           /* 1: the last backward has accumulated its gradients (no_sync) */
} model_trace_object;

/* A collective of this model comes. It is the first of a pass after the end of a backward, and also the first gather after
 * the begin of a pass. Where nothing is gathered, a begin counts for nothing, as one rank alone may have run that forward. */
static int
before(PyObject *watcher, uint64_t event)
{
    model_trace_object *self = (model_trace_object *)watcher;
    const int gathers = event % FP_EVENT_KINDS != FP_EVENT_REDUCES; /* or it agrees on something */
    const int new_pass = self->ended || (gathers && self->began);   /* see above */
    self->ended = 0;
    self->began = self->began && !new_pass;
    return note(self->trace, event + (!gathers && self->keeps ? FP_EVENT_REDUCES_ACCUMULATED - FP_EVENT_REDUCES : 0),
                new_pass);
}

static void
begun(PyObject *watcher)
{
    fp_trace_begin(((model_trace_object *)watcher)->trace->trace);
}

static void
launched(PyObject *watcher)
{
    fp_trace_launch(((model_trace_object *)watcher)->trace->trace);
}

static int
waiting(PyObject *watcher)
{
    return call(((model_trace_object *)watcher)->trace->waiting, PyTuple_New(0));
}

static int
failed(PyObject *watcher, const char *message)
{
    PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
    const int status = text == NULL ? -1 : call(((model_trace_object *)watcher)->trace->failed, PyTuple_Pack(1, text));
    Py_XDECREF(text);
    return status;
}

static int
is_broken(PyObject *watcher)
{
    return fp_trace_broken(((model_trace_object *)watcher)->trace->trace);
}

const fp_group_calls fp_model_trace_calls = {.before = before,
                                             .begun = begun,
                                             .launched = launched,
                                             .waiting = waiting,
                                             .failed = failed,
                                             .is_broken = is_broken};

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
    static char *keywords[] = {"trace", NULL};
    PyObject *trace;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:ModelTrace", keywords, &trace)) {
        return NULL;
    }
    FP_NEED_NULL(fp_trace_of(trace));
    model_trace_object *self = (model_trace_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->trace = (trace_object *)Py_NewRef(trace);
        self->ended = 1; /* the first event begins a pass */
    }
    return (PyObject *)self;
}

static int
model_trace_traverse(model_trace_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->trace);
    return 0;
}

static int
model_trace_clear(PyObject *object)
{
    return 0; /* a group uses its watcher until it is freed: cycles are broken at the trace */
}

static void
model_trace_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_CLEAR(((model_trace_object *)object)->trace);
    fp_free_object(object);
}

int
fp_model_trace_check(PyObject *object)
{
    return fp_is_of(object, model_trace_dealloc);
}

static PyType_Slot model_trace_slots[] = {
    {Py_tp_doc, "ModelTrace(trace)\n--\n\n"
                "The passes of one model in trace, a CollectiveTrace that the models of a group share."},
    {Py_tp_new, model_trace_new},
    {Py_tp_dealloc, model_trace_dealloc},
    {Py_tp_traverse, model_trace_traverse},
    {Py_tp_clear, model_trace_clear},
    {0, NULL},
};

PyType_Spec fp_model_trace_type = FP_TYPE("ModelTrace", model_trace_object, Py_TPFLAGS_HAVE_GC, model_trace_slots);
