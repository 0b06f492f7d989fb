/* runtime/fp_root.c -- the type _C.Root, which the units of a model share: its life, its methods, no_sync(). The work in
 * an iteration is in fp_iteration.c. */
#include "runtime/fp_root.h"

#include "core/fp_alloc.h"
#include "runtime/fp_backward.h"
#include "runtime/fp_consensus.h"
#include "runtime/fp_iteration.h"
#include "runtime/fp_trace_py.h"

static PyObject *
root_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"backward_prefetch", "forward_prefetch", "collectives", "watched",
                               "find_tensors",      "min_unit_bytes",   "model",       NULL};
    PyObject *collectives, *watched, *find_tensors, *model = Py_None;
    int backward_prefetch, forward_prefetch;
    long long min_unit_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ipOO!O|LO:Root", keywords, &backward_prefetch, &forward_prefetch,
                                     &collectives, &PyTuple_Type, &watched, &find_tensors, &min_unit_bytes, &model)) {
        return NULL;
    }
    if (backward_prefetch < 0 || backward_prefetch > FP_PREFETCH_POST) {
        return PyErr_Format(PyExc_ValueError, "expected backward_prefetch to be 0, 1 or 2, got %d", backward_prefetch);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watched); i++) {
        PyObject *entry = PyTuple_GET_ITEM(watched, i);
        if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 3 || !PyDict_Check(PyTuple_GET_ITEM(entry, 0))) {
            return PyErr_Format(PyExc_TypeError, "expected watched to be tuples (dict, name, function)");
        }
    }
    fp_root *root = (fp_root *)type->tp_alloc(type, 0);
    FP_NEED_NULL(root);
    root->collectives = Py_NewRef(collectives);
    root->watched = Py_NewRef(watched);
    root->find_tensors = Py_NewRef(find_tensors);
    root->members.model = model == Py_None ? NULL : Py_NewRef(model);
    root->prefetch = (unsigned)backward_prefetch | (forward_prefetch ? FP_PREFETCH_FORWARD : 0U);
    root->min_unit_bytes = min_unit_bytes;
    root->model_traces = PyTuple_New(0);
    root->ref = fp_unit_ref_new(root, "the model", &fp_backward_root_calls);
    if (root->model_traces == NULL || root->ref == NULL || fp_lock_make(&root->lock) < 0) {
        Py_CLEAR(root);
    }
    return (PyObject *)root;
}

static int
root_traverse(fp_root *root, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(root));
    Py_VISIT(root->collectives);
    Py_VISIT(root->watched);
    Py_VISIT(root->find_tensors);
    Py_VISIT(root->members.model);
    Py_VISIT(root->model_traces);
    Py_VISIT(root->consensus.error);
    return fp_consensus_traverse(root, visit, arg);
}

static int
root_clear(fp_root *root)
{
    fp_consensus_drop(root);
    return 0; /* its other members are functions and settings: cycles through them are broken at the units */
}

static void
root_dealloc(PyObject *self)
{
    fp_root *root = (fp_root *)self;
    PyObject_GC_UnTrack(self);
    fp_unit_ref_drop(root->ref);
    Py_CLEAR(root->collectives);
    Py_CLEAR(root->watched);
    Py_CLEAR(root->find_tensors);
    Py_CLEAR(root->members.model);
    Py_CLEAR(root->members.found);
    Py_CLEAR(root->model_traces);
    fp_consensus_drop(root);
    fp_free(root->units.items);
    fp_free(root->reduce_order.items);
    fp_free(root->order.items);
    fp_lock_free(&root->lock);
    fp_free_object(self);
}

static PyObject *
root_tell(fp_root *root, PyObject *model_traces)
{
    int fits = PyTuple_Check(model_traces);
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(model_traces); i++) {
        fits = fp_model_trace_check(PyTuple_GET_ITEM(model_traces, i));
    }
    if (!fits) {
        return PyErr_Format(PyExc_TypeError, "expected a tuple of ModelTrace");
    }
    Py_SETREF(root->model_traces, Py_NewRef(model_traces));
    Py_RETURN_NONE;
}

static PyObject *
root_recover(fp_root *root, PyObject *ignored)
{
    if (fp_iteration_is_elsewhere(root)) {
        return PyErr_Format(PyExc_RuntimeError, "recover: another thread is in a forward or backward of this model");
    }
    return fp_none_unless(fp_iteration_recover(root));
}

static PyObject *
root_refresh(fp_root *root, PyObject *ignored)
{
    if (root->phase != FP_PHASE_OPEN || root->depth > 0) {
        return PyErr_Format(PyExc_RuntimeError, "refresh: expected no forward or backward to be under way");
    }
    Py_INCREF(root);
    const int status = fp_iteration_refresh(root);
    Py_DECREF(root);
    return fp_none_unless(status);
}

static PyObject *
root_always_python(fp_root *root, PyObject *ignored)
{
    Py_CLEAR(root->watched);
    Py_RETURN_NONE;
}

static int
check_block(PyObject *block)
{
    if (!PyList_Check(block)) {
        return fp_raise(PyExc_TypeError, "expected a list, got %.200s", Py_TYPE(block)->tp_name);
    }
    return 0;
}

/* A block of no_sync is a list of Python. It is open while it has one item: root->resets when it began. Gradients are
 * reduced while no block is open. */
static PyObject *
root_begin_no_sync(fp_root *root, PyObject *block)
{
    FP_TRY_NULL(check_block(block));
    if (PyList_GET_SIZE(block) > 0) {
        Py_RETURN_NONE;
    }
    PyObject *resets = PyLong_FromLongLong(root->resets);
    FP_NEED_NULL(resets);
    const int status = PyList_Append(block, resets);
    Py_DECREF(resets);
    root->blocks += status == 0;
    return fp_none_unless(status);
}

static PyObject *
root_end_no_sync(fp_root *root, PyObject *block)
{
    int64_t resets = -1;
    FP_TRY_NULL(check_block(block));
    if (PyList_GET_SIZE(block) > 0 && fp_as_int64(PyList_GET_ITEM(block, 0), &resets) < 0) {
        return NULL;
    }
    FP_TRY_NULL(PyList_SetSlice(block, 0, PY_SSIZE_T_MAX, NULL));
    root->blocks -= resets == root->resets;
    Py_RETURN_NONE;
}

static PyObject *
root_end_all_no_sync(fp_root *root, PyObject *ignored)
{
    root->resets++;
    root->blocks = 0;
    Py_RETURN_NONE;
}

static PyObject *
root_state(const fp_root *root, void *ignored)
{
    const int runs = fp_graph_task() >= 0 || fp_graph_is_running(root->ref);
    const char *state = fp_root_in_backward(root) ? (runs ? "BACKWARD" : "INTERRUPTED")
                        : root->depth > 0         ? "FORWARD"
                                                  : "IDLE";
    return PyUnicode_FromString(state);
}

static PyMethodDef root_methods[] = {
    {"tell", FP_METHOD(root_tell), METH_O,
     "tell($self, model_traces, /)\n--\n\n"
     "Tell model_traces, a tuple of ModelTrace, from now on where passes begin and backwards end."},
    {"always_python", FP_METHOD(root_always_python), METH_NOARGS,
     "always_python($self, /)\n--\n\nFrom the next pass on every collective goes through the object collectives."},
    {"begin_no_sync", FP_METHOD(root_begin_no_sync), METH_O,
     "begin_no_sync($self, block, /)\n--\n\n"
     "Accumulate gradients, and do not reduce them, until end_no_sync() is called with block, an empty list."},
    {"end_no_sync", FP_METHOD(root_end_no_sync), METH_O,
     "end_no_sync($self, block, /)\n--\n\nEnd the block of begin_no_sync(block), unless it has ended."},
    {"end_all_no_sync", FP_METHOD(root_end_all_no_sync), METH_NOARGS,
     "end_all_no_sync($self, /)\n--\n\nEnd all blocks. A later end_no_sync() of one of them does nothing."},
    {"recover", FP_METHOD(root_recover), METH_NOARGS,
     "recover($self, /)\n--\n\n"
     "Forget everything that an interrupted pass has left. Afterwards every unit is IDLE and SHARDED. "
     "RuntimeError if another thread is in a forward or backward of the model."},
    {"refresh", FP_METHOD(root_refresh), METH_NOARGS,
     "refresh($self, /)\n--\n\n"
     "Gather the stale units with a secondary shard from the shards, and free them again. A collective call. "
     "RuntimeError while a forward or backward is under way."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef root_getset[] = {
    {"state", FP_GETTER(root_state), NULL,
     "IDLE, FORWARD, BACKWARD, or INTERRUPTED: an exception has ended a backward, and the next pass recovers.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot root_slots[] = {
    {Py_tp_doc,
     "Root(backward_prefetch, forward_prefetch, collectives, watched, find_tensors, min_unit_bytes=0, "
     "model=None)\n--\n\n"
     "What the units of a model share: the groups, the iteration under way, the collectives.\n\n"
     "backward_prefetch: 0: none; 1: gather the next unit before a unit's backward; 2: after it.\n"
     "forward_prefetch: gather the next unit while a unit computes.\n"
     "min_unit_bytes: gather units with fewer unsharded bytes that follow each other as one.\n"
     "watched: ((dict, name, function), ...): collectives go through the object collectives once a user "
     "has replaced one.\n"
     "find_tensors(output): an iterable of the tensors in an output whose type is no tuple, list or dict.\n"
     "model: a weak reference to the outermost module, in which the units are; None: all units are in the model."},
    {Py_tp_new, root_new},
    {Py_tp_dealloc, root_dealloc},
    {Py_tp_traverse, root_traverse},
    {Py_tp_clear, root_clear},
    {Py_tp_methods, root_methods},
    {Py_tp_getset, root_getset},
    {0, NULL},
};

PyType_Spec fp_root_type = FP_TYPE("Root", fp_root, Py_TPFLAGS_HAVE_GC, root_slots);

int
fp_root_check(PyObject *object)
{
    return fp_is_of(object, root_dealloc);
}
