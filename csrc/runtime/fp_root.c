/* runtime/fp_root.c -- the type _C.Root: what the units of a tree share. What it does is in fp_iteration.c. */
#include "runtime/fp_root.h"

#include <stddef.h>
#include <structmember.h>

#include "core/fp_alloc.h"
#include "runtime/fp_backward.h"
#include "runtime/fp_consensus.h"
#include "runtime/fp_iteration.h"
#include "runtime/fp_model_trace.h"

static PyObject *
run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"backward_prefetch", "forward_prefetch", "collectives", "watched", "find_tensors", NULL};
    PyObject *collectives, *watched, *find_tensors;
    int backward_prefetch, forward_prefetch;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ipOO!O:Root", keywords, &backward_prefetch, &forward_prefetch,
                                     &collectives, &PyTuple_Type, &watched, &find_tensors)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watched); i++) {
        PyObject *entry = PyTuple_GET_ITEM(watched, i);
        if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 3 || !PyDict_Check(PyTuple_GET_ITEM(entry, 0))) {
            PyErr_SetString(PyExc_TypeError, "expected watched to be tuples (dict, name, function)");
            return NULL;
        }
    }
    fp_root *run = (fp_root *)type->tp_alloc(type, 0);
    if (run == NULL) {
        return NULL;
    }
    run->collectives = Py_NewRef(collectives);
    run->watched = Py_NewRef(watched);
    run->find_tensors = Py_NewRef(find_tensors);
    run->backward_prefetch = backward_prefetch;
    run->forward_prefetch = forward_prefetch;
    run->synchronize = 1;
    run->followers = PyTuple_New(0);
    run->ref = fp_params_ref_new(run, "the model", &fp_backward_root_calls);
    run->lock = PyThread_allocate_lock();
    if (run->lock == NULL && !PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    if (run->followers == NULL || run->ref == NULL || run->lock == NULL) {
        Py_CLEAR(run);
    }
    return (PyObject *)run;
}

static int
run_traverse(PyObject *self, visitproc visit, void *arg)
{
    fp_root *run = (fp_root *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(run->collectives);
    Py_VISIT(run->watched);
    Py_VISIT(run->find_tensors);
    Py_VISIT(run->followers);
    Py_VISIT(run->error);
    return fp_consensus_traverse(run, visit, arg);
}

static int
run_clear(PyObject *self)
{
    fp_consensus_drop((fp_root *)self);
    return 0; /* its members refer to functions and settings: other cycles are broken at the units */
}

static void
run_dealloc(PyObject *self)
{
    fp_root *run = (fp_root *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fp_params_ref_drop(run->ref);
    Py_CLEAR(run->collectives);
    Py_CLEAR(run->watched);
    Py_CLEAR(run->find_tensors);
    Py_CLEAR(run->followers);
    fp_consensus_drop(run);
    fp_free(run->steps);
    fp_free(run->line);
    fp_free(run->order);
    if (run->lock != NULL) {
        PyThread_free_lock(run->lock);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* tell(followers) */
static PyObject *
run_tell(PyObject *self, PyObject *followers)
{
    int fits = PyTuple_Check(followers);
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(followers); i++) {
        fits = fp_model_trace_check(PyTuple_GET_ITEM(followers, i));
    }
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of ModelTrace");
        return NULL;
    }
    Py_SETREF(((fp_root *)self)->followers, Py_NewRef(followers));
    Py_RETURN_NONE;
}

static PyObject *
run_recover(PyObject *self, PyObject *ignored)
{
    return fp_iteration_recover((fp_root *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
run_refresh(PyObject *self, PyObject *ignored)
{
    fp_root *run = (fp_root *)self;
    if (run->in_backward || run->depth > 0) {
        PyErr_SetString(PyExc_RuntimeError, "refresh: expected no forward or backward to be under way");
        return NULL;
    }
    Py_INCREF(run);
    const int status = fp_iteration_refresh(run);
    Py_DECREF(run);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
run_state(PyObject *self, void *ignored)
{
    const fp_root *run = (fp_root *)self;
    const int runs = fp_graph_task() >= 0 || fp_graph_is_running(run->ref);
    const char *state = run->in_backward ? (runs ? "BACKWARD" : "INTERRUPTED") : run->depth > 0 ? "FORWARD" : "IDLE";
    return PyUnicode_FromString(state);
}

static PyMethodDef run_methods[] = {
    {"tell", run_tell, METH_O,
     "tell($self, followers, /)\n--\n\nFrom now on tell these, a tuple of ModelTrace, where passes begin and end."},
    {"recover", run_recover, METH_NOARGS,
     "recover($self, /)\n--\n\nForget whatever a pass that was broken off has left; every unit is idle and sharded "
     "then."},
    {"refresh", run_refresh, METH_NOARGS,
     "refresh($self, /)\n--\n\nGather from the shards what is out of date of the units that keep a copy. A collective "
     "call."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef run_getset[] = {
    {"state", run_state, NULL, "IDLE, FORWARD, BACKWARD, or INTERRUPTED: an exception ended a backward pass.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef run_members[] = {
    {"blocks", T_INT, offsetof(fp_root, blocks), 0, "How many blocks of no_sync are open."},
    {"synchronize", T_INT, offsetof(fp_root, synchronize), 0, "0: gradients are kept and not reduced."},
    {"always_python", T_INT, offsetof(fp_root, always_python), 0, "1: every collective goes through collectives."},
    {"gathers", T_LONGLONG, offsetof(fp_root, gathers), READONLY, "Gathers of sharded units so far."},
    {"refreshes", T_LONGLONG, offsetof(fp_root, refreshes), READONLY,
     "Gathers from the shards so far, of units that keep a copy."},
    {"reductions", T_LONGLONG, offsetof(fp_root, reductions), READONLY, "Reductions of gradients so far."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot run_slots[] = {
    {Py_tp_doc,
     "Root(backward_prefetch, forward_prefetch, collectives, watched, find_tensors)\n--\n\n"
     "What the units of one tree share: the pass that is under way and its order.\n\n"
     "backward_prefetch: 0 none, 1 before a unit's backward, 2 after it; watched: ((dict, name, function), ...):\n"
     "collectives go through the object collectives once one of them is another function."},
    {Py_tp_new, run_new},
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_traverse, run_traverse},
    {Py_tp_clear, run_clear},
    {Py_tp_methods, run_methods},
    {Py_tp_getset, run_getset},
    {Py_tp_members, run_members},
    {0, NULL},
};

static PyType_Spec run_spec = {
    .name = "flatparam._C.Root",
    .basicsize = sizeof(fp_root),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = run_slots,
};

PyObject *
fp_root_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &run_spec, NULL);
}

int
fp_root_check(PyObject *object)
{
    return fp_is_of(object, run_dealloc);
}
