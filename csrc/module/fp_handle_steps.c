/* module/fp_handle_steps.c -- the heap type flatparam._C.HandleSteps, which LayerZero's handle is a subclass of: its state,
 * and the steps of a micro-batch as they mostly are. What else there may be (other devices and groups, what users have put,
 * cleared or broken off) the subclass does, in methods that are called here. */
#include "module/fp_handle.h"
#include "python/fp_attributes.h"
#include "tensor/fp_channel.h"
#include "tensor/fp_gradients.h"
#include "tensor/fp_graph.h"

#define BIT(state) (1U << (state))

/* By state, what may come before. Activation checkpointing runs forwards, and uses a unit again, within a backward. */
static const unsigned before[] = {
    [IDLE] = ~0U,
    [FORWARD] = BIT(IDLE) | BIT(FORWARD),
    [BACKWARD_PRE] = BIT(IDLE) | BIT(BACKWARD_PRE) | BIT(BACKWARD_POST),
    [BACKWARD_POST] = BIT(IDLE) | BIT(BACKWARD_PRE) | BIT(BACKWARD_POST),
    [SUMMON_FULL_PARAMS] = BIT(IDLE),
    [SYNC_PARAMS] = BIT(IDLE),
};

/* What is kept of the flat parameter's attributes, which nobody sets again. */
static const struct {
    const char *name;
    size_t offset;
    enum { LIST, TENSOR, ANY } kind;
} fields[] = {
    {"_params", offsetof(fp_handle_steps, params), LIST},
    {"_shared_params", offsetof(fp_handle_steps, shared), LIST},
    {"_tensors", offsetof(fp_handle_steps, tensors), LIST},
    {"_shard_param_infos", offsetof(fp_handle_steps, infos), ANY},
    {"_zero1_shard", offsetof(fp_handle_steps, shard), TENSOR},
    {"_full_grad_padded", offsetof(fp_handle_steps, grad), TENSOR},
    {"_full_prec_grad_padded", offsetof(fp_handle_steps, sum), TENSOR},
    {"_full_param_padded", offsetof(fp_handle_steps, padded), TENSOR}, /* last: with it, all are there */
};

PyObject *fp_handle_names[FP_NAMES];

int
fp_handle_exec(void)
{
    static const char *const names[FP_NAMES] = {
        [FP_NAME_GRAD] = "grad",
        [FP_NAME_IS_CPU] = "is_cpu",
        [FP_NAME_SAVED_GRAD] = "_saved_grad",
        [FP_NAME_STATE] = "_state",
        [FP_NAME_TAKEN] = "taken",
        [FP_NAME_VALUE] = "_value_",
        [FP_NAME_ZERO3_SHARD] = "_zero3_shard",
    };
    for (int i = 0; i < FP_NAMES; i++) {
        fp_handle_names[i] = PyUnicode_InternFromString(names[i]);
        if (fp_handle_names[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* ---- states ---- */

/* The value of a HandleTrainingState; -1 on failure. */
static int
code_of(PyObject *state)
{
    int64_t code = 0;
    PyObject *value = PyObject_GetAttr(state, fp_handle_names[FP_NAME_VALUE]);
    const int status = value == NULL ? -1 : fp_as_int64(value, &code);
    Py_XDECREF(value);
    if (status == 0 && (code < IDLE || code > SYNC_PARAMS)) {
        PyErr_Format(PyExc_ValueError, "expected a HandleTrainingState, got %R", state);
        return -1;
    }
    return status < 0 ? -1 : (int)code;
}

static int
set_code(fp_handle_steps *h, PyObject *state, int code)
{
    if (code < 0 || (h->flat != NULL && PyObject_SetAttr(h->flat, fp_handle_names[FP_NAME_STATE], state) < 0)) {
        return -1;
    }
    h->state_code = code;
    Py_XSETREF(h->state, Py_NewRef(state));
    return 0;
}

static PyObject *
set_state(fp_handle_steps *h, PyObject *state)
{
    return fp_none_unless(set_code(h, state, code_of(state)));
}

static PyObject *
get_training_state(fp_handle_steps *h, void *closure)
{
    return Py_NewRef(h->state == NULL ? Py_None : h->state);
}

static int
set_training_state(fp_handle_steps *h, PyObject *value, void *closure)
{
    const int was_in_backward = fp_handle_in_backward(h);
    if (value == NULL || h->state == NULL) {
        PyErr_SetString(PyExc_AttributeError, "the state cannot be deleted, nor set before there is one");
        return -1;
    }
    PyObject *state = Py_TYPE(value) == Py_TYPE(h->state) ? Py_NewRef(value) : fp_handle_by_ops(h, "_state_of", value);
    const int code = state == NULL ? -1 : code_of(state);
    int status = -1;
    if (code >= 0 && !(before[code] & BIT(h->state_code)) &&
        !(code == FORWARD && was_in_backward && fp_graph_task() != -1)) {
        status = fp_handle_run(h, "_refuse", state);
    }
    else if (set_code(h, state, code) == 0) {
        status = code == IDLE && was_in_backward ? fp_handle_leave_backward(h) : 0;
    }
    Py_XDECREF(state);
    return status;
}

static PyObject *
may_follow(fp_handle_steps *h, PyObject *const *args, Py_ssize_t nargs)
{
    const int first = fp_check_nargs("_may_follow", nargs, 2) < 0 ? -1 : code_of(args[0]);
    const int second = first < 0 ? -1 : code_of(args[1]);
    return second < 0 ? NULL : PyBool_FromLong((before[second] & BIT(first)) != 0);
}

/* ---- what users have done ---- */

/* Whether masters were written to here, or an optimizer has stepped, since they were gathered last; -1 on failure. */
static int
is_changed(fp_handle_steps *h)
{
    fp_versions now;
    int64_t steps = 0;
    PyObject *taken =
        h->optimizers == NULL ? Py_NewRef(Py_None) : PyObject_GetAttr(h->optimizers, fp_handle_names[FP_NAME_TAKEN]);
    const int status = taken == NULL || fp_as_int64(taken, &steps) < 0 ? -1 : fp_handle_versions(h, &now);
    Py_XDECREF(taken);
    return status < 0 ? -1 : now.values != h->seen_values || steps != h->seen_steps;
}

static PyObject *
get_is_as_shown(fp_handle_steps *h, void *closure)
{
    return fp_bool_unless(fp_handle_is_as_shown(h));
}

static PyObject *
get_is_changed(fp_handle_steps *h, void *closure)
{
    return fp_bool_unless(is_changed(h));
}

/* Whether users have put nothing in place of parameters or gradients, and cleared none; -1 on failure. */
static int
is_as_put(fp_handle_steps *h)
{
    fp_versions now;
    PyObject *grad = PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_GRAD]);
    int as_put = grad == NULL ? -1 : 1;
    if (as_put > 0 && grad != Py_None && (h->is_shown || !h->in_backward)) {
        as_put = h->is_shown ? fp_handle_is_as_shown(h) : fp_handle_versions(h, &now) < 0 ? -1 : now.grads > 0;
    }
    if (as_put > 0) {
        PyObject *const arguments[] = {h->params, h->flat_param, grad, h->infos};
        PyObject *found = fp_module_params_scan(h->unit, arguments, 4);
        as_put = found == NULL ? -1 : PyList_Check(found) && PyList_GET_SIZE(found) == 0;
        Py_XDECREF(found);
    }
    Py_XDECREF(grad);
    return as_put;
}

/* Whether there was something to write back; -1 on failure. */
static int
write_back(fp_handle_steps *h)
{
    const int as_put = h->is_unsharded ? 1 : fp_handle_is_usual(h) ? is_as_put(h) : 0;
    return as_put != 0 ? (as_put < 0 ? -1 : 0) : fp_handle_truth(fp_handle_by_ops(h, "_write_back_by_ops", NULL));
}

static PyObject *
write_back_method(fp_handle_steps *h, PyObject *ignored)
{
    return fp_bool_unless(write_back(h));
}

/* ---- unsharding ---- */

/* Whether what was gathered is good without asking. */
static int
is_settled(const fp_handle_steps *h)
{
    return h->gathered && (h->confirmed || fp_handle_in_backward(h));
}

static PyObject *
needs_unshard(fp_handle_steps *h, PyObject *ignored)
{
    return PyBool_FromLong(!h->is_unsharded || h->was_given_up || h->state_code == SUMMON_FULL_PARAMS ||
                           !is_settled(h));
}

/* What to gather into; a new reference. */
static PyObject *
target(fp_handle_steps *h)
{
    return h->state_code == SUMMON_FULL_PARAMS ? fp_handle_by_ops(h, "_get_padded_to_gather_into", NULL)
                                               : Py_NewRef(h->padded);
}

static PyObject *
pre_unshard(fp_handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL && (fp_handle_run(h, "init_flat_param_attributes", NULL) < 0 || h->padded == NULL)) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_RuntimeError, "the handle has no flat parameter");
    }
    const int wrote = write_back(h);
    PyObject *padded = wrote < 0 || fp_handle_check_device(h) < 0 ? NULL : target(h);
    const int given = padded == NULL ? -1 : fp_handle_allocate(h, padded);
    Py_XDECREF(padded);
    return given < 0 ? NULL : PyBool_FromLong(given || wrote);
}

/* Whether to gather from the masters; -1 on failure. Collective, unless control flow tells, or the ranks have agreed. */
static int
must_refresh(fp_handle_steps *h)
{
    PyObject *copy = PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_ZERO3_SHARD]),
             *agreed = h->agreed; /* both owned */
    int status = -1;
    h->agreed = NULL;
    const int has_copy = h->has_zero3_copy || h->stays_unsharded ? copy != Py_None : h->gathered;
    if (copy != NULL && (!has_copy || (h->needs_param_sync && !h->param_synced))) {
        status = 1; /* known to all ranks */
    }
    else if (copy != NULL && fp_handle_in_backward(h)) {
        status = 0; /* backward goes with what its forward had */
    }
    else if (copy != NULL) {
        const int changed = is_changed(h);
        status = changed < 0         ? -1
                 : fp_is_set(agreed) ? PyObject_IsTrue(agreed)
                                     : fp_handle_truth(fp_handle_by_ops(h, "_ask", changed ? Py_True : Py_False));
        if (status == 0 && changed > 0 && fp_is_set(agreed)) {
            status = fp_handle_run(h, "_refuse_write", NULL);
        }
    }
    Py_XDECREF(agreed);
    Py_XDECREF(copy);
    return status;
}

static PyObject *
must_refresh_method(fp_handle_steps *h, PyObject *ignored)
{
    return h->flat_param == NULL ? PyErr_Format(PyExc_RuntimeError, "the handle has no flat parameter")
                                 : fp_bool_unless(must_refresh(h));
}

/* Begin to gather from the zero3 shard, where Python has no part in it. 1; 0: it has; -1 on failure. */
static int
begin_gather(fp_handle_steps *h, PyObject *padded, PyObject *shard)
{
    fp_gather *native = h->native == NULL || h->stays_unsharded ? NULL : fp_gather_of(h->native);
    const int64_t own = native == NULL ? 0 : fp_torch_numel(shard);
    if (native == NULL || own < 0 || own * h->ranks != h->numel || fp_is_set(h->gather)) {
        return own < 0 ? -1 : 0;
    }
    PyObject *now = PyObject_GetAttr(PyTuple_GET_ITEM(h->gathering, 0), PyTuple_GET_ITEM(h->gathering, 1));
    Py_XDECREF(now);
    if (now != PyTuple_GET_ITEM(h->gathering, 2) || fp_gather_begin(native, padded, shard) < 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_XSETREF(h->gather, Py_NewRef(h->native));
    Py_XSETREF(h->source, Py_NewRef(shard));
    return 1;
}

static PyObject *
wait_unshard(fp_handle_steps *h, PyObject *ignored)
{
    if (!fp_is_set(h->gather)) {
        Py_RETURN_NONE;
    }
    PyObject *under_way = Py_NewRef(h->gather), *error = NULL, *result = NULL;
    fp_gather *native = fp_gather_of(under_way);
    h->was_given_up = 1;
    const int ended = native == NULL ? 0 : fp_gather_wait(native);
    if (ended > 0) {
        h->was_given_up = 0;
        Py_CLEAR(h->gather);
        Py_CLEAR(h->source);
        result = Py_NewRef(Py_None);
    }
    else {
        error = ended < 0 ? PyErr_GetRaisedException() : Py_NewRef(Py_None);
        result = fp_handle_by_ops(h, "_wait_for_gather", error);
    }
    Py_XDECREF(error);
    Py_DECREF(under_way);
    return result;
}

static PyObject *
all_gather_flat_param(fp_handle_steps *h, PyObject *padded)
{
    if (is_settled(h)) {
        return Py_NewRef(padded);
    }
    int status = h->padded == NULL ? 1 : must_refresh(h);
    if (status > 0) {
        status = fp_handle_run(h, "_gather_masters", padded);
    }
    else if (status == 0 && !h->gathered) {
        PyObject *shard = PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_ZERO3_SHARD]);
        status = shard == NULL ? -1 : begin_gather(h, padded, shard);
        status = status == 0 ? fp_handle_truth(PyObject_CallMethod((PyObject *)h, "_gather", "(OO)", padded, shard))
                             : status;
        Py_XDECREF(shard);
    }
    if (status < 0) {
        return NULL;
    }
    h->gathered = h->confirmed = 1;
    return Py_NewRef(padded);
}

static PyObject *
use_unsharded(fp_handle_steps *h, PyObject *padded)
{
    const int in_forward = h->state_code == FORWARD;
    int status = 1; /* 1: by operations */
    h->is_unsharded = 1;
    if (h->padded != NULL && h->unit != NULL && (in_forward || h->state_code == BACKWARD_PRE)) {
        PyObject *again = !in_forward && fp_handle_has_views(h) ? Py_True : Py_False;
        PyObject *const arguments[] = {
            h->flat_param, padded, h->tensors, again, in_forward ? Py_True : Py_False, h->unsafe ? Py_True : Py_False};
        PyObject *views = fp_module_params_use_unsharded(h->unit, arguments, 6);
        status = views == NULL ? -1 : views == Py_None;
        if (status == 0 && views != h->tensors) {
            status = PyList_SetSlice(h->tensors, 0, PyList_GET_SIZE(h->tensors), views);
        }
        Py_XDECREF(views);
    }
    return status <= 0 ? fp_none_unless(status) : fp_handle_by_ops(h, "_use_unsharded_by_ops", padded);
}

static PyObject *
unshard(fp_handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL) {
        return fp_handle_by_ops(h, "_refuse_unshard", NULL);
    }
    PyObject *padded = target(h), *gathered = NULL, *result = NULL;
    if (padded != NULL && fp_handle_allocate(h, padded) >= 0) {
        gathered = h->state_code == SUMMON_FULL_PARAMS ? fp_handle_by_ops(h, "_gather_masters", padded)
                                                       : all_gather_flat_param(h, padded);
    }
    if (gathered != NULL) {
        result = use_unsharded(h, padded);
    }
    Py_XDECREF(gathered);
    Py_XDECREF(padded);
    return result;
}

/* ---- resharding ---- */

static PyObject *
use_sharded(fp_handle_steps *h, PyObject *ignored)
{
    int status = 0; /* 0: by operations */
    h->is_unsharded = 0;
    if (h->padded != NULL && h->unit != NULL) {
        const int64_t numel = fp_torch_numel(h->shard);
        PyObject *const arguments[] = {h->flat_param, h->shard, h->params,
                                       h->shared,     h->infos, h->unsafe ? Py_True : Py_False};
        status = numel < 0                 ? -1
                 : numel != h->shard_numel ? 0
                                           : fp_handle_truth(fp_module_params_use_sharded(h->unit, arguments, 6));
    }
    if (status == 0) {
        return fp_handle_by_ops(h, "_use_sharded_by_ops", NULL);
    }
    if (status > 0 &&
        h->state_code == BACKWARD_POST) { /* the graph of the views may go; without it they are used again */
        status = fp_handle_clear_grads(h->tensors);
        for (Py_ssize_t i = 0; status >= 0 && i < PyList_GET_SIZE(h->tensors); i++) {
            status = PyList_SetItem(h->tensors, i, Py_NewRef(Py_None));
        }
    }
    return fp_none_unless(status);
}

static PyObject *
reshard(fp_handle_steps *h, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    const Py_ssize_t named = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    if (nargs + named != 1 || (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, 0),
                                                                              "free_unsharded_flat_param") != 0)) {
        return PyErr_Format(PyExc_TypeError, "reshard() takes free_unsharded_flat_param, and nothing else");
    }
    const int frees = PyObject_IsTrue(args[0]);
    if (frees < 0 || fp_handle_truth(wait_unshard(h, NULL)) < 0 ||
        (h->is_from_masters && fp_handle_run(h, "_take_zero3_shard", NULL) < 0)) {
        return NULL;
    }
    h->confirmed = 0;
    Py_CLEAR(h->agreed);
    if ((h->is_unsharded || h->state_code != BACKWARD_POST || h->padded == NULL || fp_handle_has_views(h)) &&
        fp_handle_truth(use_sharded(h, NULL)) < 0) {
        return NULL;
    }
    if (h->state_code == SUMMON_FULL_PARAMS) {
        return fp_handle_by_ops(h, "_free_summoned", NULL);
    }
    if (frees && h->padded != NULL && !(h->stays_unsharded && h->gathered)) {
        if (fp_handle_free(h, h->padded, "_free_after_use") < 0) {
            return NULL;
        }
        h->gathered = 0;
    }
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static PyObject *
bind(fp_handle_steps *h, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t ranks;
    if (fp_check_nargs("_bind", nargs, 7) < 0 || fp_as_int64(args[6], &ranks) < 0) {
        return NULL;
    }
    if (h->flat_param != NULL || !PyTuple_Check(args[3]) || PyTuple_GET_SIZE(args[3]) != 3 ||
        fp_attributes_check(args[0], 0) < 0 || (args[4] != Py_None && !fp_is_module_params(args[4])) ||
        (args[5] != Py_None && fp_gather_of(args[5]) == NULL)) {
        return PyErr_Format(PyExc_TypeError,
                            "expected to be called once, with a flat parameter, its handle, optimizers, "
                            "(module, name, function), a ModuleParams, a Gather and ranks");
    }
    for (size_t i = 0; i < 6; i++) {
        h->objects[i] = i >= 4 && args[i] == Py_None ? NULL : Py_NewRef(args[i]);
    }
    h->ranks = ranks;
    Py_RETURN_NONE;
}

static PyObject *
bind_buffers(fp_handle_steps *h, PyObject *ignored)
{
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        PyObject **slot = (PyObject **)((char *)h + fields[i].offset);
        PyObject *value =
            *slot != NULL || h->flat_param == NULL ? NULL : PyObject_GetAttrString(h->flat_param, fields[i].name);
        if (value == NULL || (fields[i].kind == LIST && !PyList_Check(value)) ||
            (fields[i].kind == TENSOR && fp_attributes_check(value, 0) < 0)) {
            Py_XDECREF(value);
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "expected %s, once", fields[i].name);
        }
        *slot = value;
    }
    PyObject *message = PyObject_GetAttrString(h->flat, "_freed_message");
    h->message = message == NULL ? NULL : fp_as_text(message);
    Py_XDECREF(message);
    h->numel = h->message == NULL ? -1 : fp_torch_numel(h->padded);
    h->shard_numel = h->numel < 0 ? -1 : fp_torch_numel(h->shard);
    return fp_none_unless(h->shard_numel < 0 ? -1 : 0);
}

static PyObject *
steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    fp_handle_steps *h = (fp_handle_steps *)type->tp_alloc(type, 0);
    if (h != NULL) {
        h->prepared = h->seen_values = h->seen_steps = -1;
        h->needs_param_sync = 1;
        h->sum_code = SUM_NONE;
    }
    return (PyObject *)h;
}

static int
steps_traverse(fp_handle_steps *h, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(h));
    for (size_t i = 0; i < OBJECTS; i++) {
        Py_VISIT(h->objects[i]);
    }
    return 0;
}

static int
steps_clear(fp_handle_steps *h)
{
    Py_CLEAR(h->padded); /* first: without it no step uses the others */
    for (size_t i = 0; i < OBJECTS; i++) {
        Py_CLEAR(h->objects[i]);
    }
    return 0;
}

static void
steps_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    (void)steps_clear((fp_handle_steps *)self);
    fp_free_object(self);
}

#define METHOD(name, function, flags, signature, text)                                                                 \
    {name, FP_METHOD(function), flags, name signature "\n--\n\n" text}
static PyMethodDef steps_methods[] = {
    METHOD("_bind", bind, METH_FASTCALL, "($self, flat_param, flat, optimizers, gathering, unit, native, ranks, /)",
           "Once: what the steps are of."),
    METHOD("_bind_buffers", bind_buffers, METH_NOARGS, "($self, /)", "Once: when the flat parameter has all tensors."),
    METHOD("_set_state", set_state, METH_O, "($self, state, /)", "Whatever it was before."),
    METHOD("_may_follow", may_follow, METH_FASTCALL, "($self, first, second, /)",
           "Whether a state may come after one."),
    METHOD("_note_shown", fp_handle_note_shown, METH_NOARGS, "($self, /)", "The sum is shown, as it is now."),
    METHOD("_stop_showing", fp_handle_stop_showing, METH_NOARGS, "($self, /)",
           "Take notice of what the user did to what was shown, and take it back. Returns whether it was shown."),
    METHOD("_write_back", write_back_method, METH_NOARGS, "($self, /)",
           "Copy into the master what the user has put in place of parameters; whether there was any."),
    METHOD(
        "_must_refresh", must_refresh_method, METH_NOARGS, "($self, /)",
        "Whether to gather from the masters rather than to use what was gathered from them before.\n\nCollective, over "
        "the zero1 group, unless in backward or control flow tells: an all-reduce of 4 bytes."),
    METHOD("needs_unshard", needs_unshard, METH_NOARGS, "($self, /)",
           "Whether unshard() has anything to do: to gather, to ask if what was kept is fresh, or to switch to it."),
    METHOD("pre_unshard", pre_unshard, METH_NOARGS, "($self, /)",
           "Write back what was put in place of parameters, and allocate. Returns whether anything was done."),
    METHOD(
        "unshard", unshard, METH_NOARGS, "($self, /)",
        "Gather what is not gathered yet, or is no longer fresh, and switch to it.\n\nFrom the masters over the zero1 "
        "group where they have changed, else from the zero3 shards over theirs; in SUMMON_FULL_PARAMS from the "
        "masters, in full precision. The data are there after post_unshard()."),
    METHOD("wait_unshard", wait_unshard, METH_NOARGS, "($self, /)",
           "Wait for the gather: the host on the CPU, the current stream on an accelerator."),
    METHOD("post_unshard", wait_unshard, METH_NOARGS, "($self, /)", "The same as wait_unshard()."),
    METHOD("_all_gather_flat_param", all_gather_flat_param, METH_O, "($self, padded, /)",
           "Fill padded, unless it has fresh values."),
    METHOD("_use_unsharded_flat_param", use_unsharded, METH_O, "($self, padded, /)",
           "Let flat_param be the unsharded one; the modules have views in forward and backward, else parameters."),
    METHOD("_use_unpadded_unsharded_flat_param", use_unsharded, METH_O, "($self, padded, /)", "The same."),
    METHOD("_use_sharded_flat_param", use_sharded, METH_NOARGS, "($self, /)",
           "Let flat_param be the master, and the parameters its pieces."),
    METHOD(
        "reshard", reshard, METH_FASTCALL | METH_KEYWORDS, "($self, /, free_unsharded_flat_param)",
        "Switch to the master; take the zero3 shard if the masters were gathered; free the unsharded one if asked.\n\n"
        "With a zero3 group of one rank the unsharded parameter is the zero3 shard, and is not freed."),
    METHOD("prepare_gradient_for_backward", fp_handle_prepare_gradient, METH_NOARGS, "($self, /)",
           "Make zeros in param_dtype for this backward to accumulate into: flat_param.grad.\n\nThey are "
           "_full_grad_padded; the views in the modules have their parts as .grad. What was reduced before is put "
           "aside, to be added to. Nothing happens in a frozen unit."),
    METHOD("accumulate_grad", fp_handle_accumulate, METH_NOARGS, "($self, /)",
           "Add this backward's gradient to the sum of the micro-batches, in full_prec_dtype.\n\nNothing happens in a "
           "frozen unit. Raises: RuntimeError in another state than BACKWARD_POST, without "
           "prepare_gradient_for_backward() before, and for gradients that have a history."),
    METHOD("free_runtime_unshard_grad", fp_handle_free_gradient, METH_NOARGS, "($self, /)",
           "Free this backward's gradient, which has been accumulated. Raises: RuntimeError if it has not."),
    METHOD("reload_full_prec_grad", fp_handle_reload, METH_NOARGS, "($self, /)",
           "Copy the sum back to the device, on the current stream, if it was offloaded; else nothing."),
    {NULL, NULL, 0, NULL},
};

#define OBJECT(name, field, flags) {name, _Py_T_OBJECT, offsetof(fp_handle_steps, field), flags, NULL}
#define FLAG(field) {"_" #field, Py_T_BOOL, offsetof(fp_handle_steps, field), 0, NULL}
#define NUMBER(name, kind, field) {name, kind, offsetof(fp_handle_steps, field), 0, NULL}
static PyMemberDef steps_members[] = {
    OBJECT("flat_param", flat_param, Py_READONLY),
    OBJECT("_unit", unit, Py_READONLY),
    OBJECT("_state", state, Py_READONLY),
    OBJECT("_ag_handle", gather, 0),
    OBJECT("_gather_source", source, 0),
    OBJECT("_agreed", agreed, 0),
    OBJECT("_total", total, 0),
    FLAG(is_unsharded),
    FLAG(gathered),
    FLAG(confirmed),
    FLAG(was_given_up),
    FLAG(is_from_masters),
    FLAG(in_backward),
    FLAG(is_shown),
    FLAG(needs_param_sync),
    FLAG(param_synced),
    FLAG(has_zero3_copy),
    FLAG(stays_unsharded),
    FLAG(is_on_host),
    FLAG(unsafe),
    NUMBER("_sum", Py_T_INT, sum_code),
    NUMBER("_prepared", Py_T_LONGLONG, prepared),
    NUMBER("_seen_values", Py_T_LONGLONG, seen_values),
    NUMBER("_seen_steps", Py_T_LONGLONG, seen_steps),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef steps_getset[] = {
    {"_training_state", FP_GETTER(get_training_state), (setter)(void (*)(void))set_training_state,
     "Raises when set: ValueError for no state, RuntimeError if it may not follow that which it is in.", NULL},
    {"_is_as_shown", FP_GETTER(get_is_as_shown), NULL, "Whether gradients are as at _note_shown().", NULL},
    {"_is_changed_here", FP_GETTER(get_is_changed), NULL,
     "Whether masters were written to here since they were gathered.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot steps_slots[] = {
    {Py_tp_doc, "HandleSteps()\n--\n\nThe steps of a micro-batch of LayerZero's handle, its subclass."},
    {Py_tp_new, steps_new},
    {Py_tp_dealloc, steps_dealloc},
    {Py_tp_traverse, steps_traverse},
    {Py_tp_clear, steps_clear},
    {Py_tp_methods, steps_methods},
    {Py_tp_members, steps_members},
    {Py_tp_getset, steps_getset},
    {0, NULL},
};

PyType_Spec fp_handle_steps_type =
    FP_TYPE("HandleSteps", fp_handle_steps, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, steps_slots);
