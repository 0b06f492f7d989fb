/* module/fp_handle_steps.c -- the heap type flatparam._C.HandleSteps, which LayerZero's handle is a subclass of: its state,
 * and the steps of a micro-batch as they mostly are. What else there may be (other devices and groups, what users have put,
 * cleared or broken off) the subclass does, in methods that are called here. */
#include "module/fp_tables.h"

#include "python/fp_attributes.h"
#include "tensor/fp_channel.h"
#include "tensor/fp_gradients.h"
#include "tensor/fp_graph.h"
#include "tensor/fp_torch.h"

/* The values of HandleTrainingState, and of Sum: where the sum of the micro-batches is */
enum { IDLE = 1, FORWARD, BACKWARD_PRE, BACKWARD_POST, SUMMON_FULL_PARAMS, SYNC_PARAMS };
enum { SUM_NONE = 1, SUM_ZEROS, SUM_ON_DEVICE, SUM_ON_HOST };

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

enum { OBJECTS = 20 };
typedef struct {
    PyObject_HEAD
    union {
        struct {
            PyObject *flat_param, *flat, *optimizers, *gathering; /* set once, as unit and native */
            PyObject *unit, *native; /* a ModuleParams; a Gather over the zero3 group, which does what gathering is */
            PyObject *params, *shared, *tensors, *infos, *shard, *padded, *grad, *sum; /* of flat_param: see fields */
            PyObject *message, *state;                                                 /* of memory that is freed */
            PyObject *gather, *source, *agreed, *total;                                /* or None, as all below */
        };
        PyObject *objects[OBJECTS]; /* owned; NULL until they are set */
    };
    int64_t numel, shard_numel, ranks; /* unsharded, sharded; of the zero3 group */
    int state_code, sum_code;
    char is_unsharded, gathered, confirmed, was_given_up, is_from_masters, in_backward, is_shown;
    char needs_param_sync, param_synced, has_zero3_copy, stays_unsharded, is_on_host, unsafe;
    long long prepared;                /* version of this backward's gradient when it was zeros; -1: there is none */
    long long seen_values, seen_steps; /* of masters, and of optimizers, when the masters were gathered last */
    fp_versions shown;                 /* of the sum, when it was shown */
} handle_steps;

/* What is kept of the flat parameter's attributes, which nobody sets again. */
static const struct {
    const char *name;
    size_t offset;
    enum { LIST, TENSOR, ANY } kind;
} fields[] = {
    {"_params", offsetof(handle_steps, params), LIST},
    {"_shared_params", offsetof(handle_steps, shared), LIST},
    {"_tensors", offsetof(handle_steps, tensors), LIST},
    {"_shard_param_infos", offsetof(handle_steps, infos), ANY},
    {"_zero1_shard", offsetof(handle_steps, shard), TENSOR},
    {"_full_grad_padded", offsetof(handle_steps, grad), TENSOR},
    {"_full_prec_grad_padded", offsetof(handle_steps, sum), TENSOR},
    {"_full_param_padded", offsetof(handle_steps, padded), TENSOR}, /* last: with it, all are there */
};

static struct {
    PyObject *grad, *is_cpu, *saved_grad, *state, *taken, *value, *zero3_shard;
} names; /* interned, owned for the life of the process */

int
fp_handle_steps_exec(void)
{
    return (names.grad = PyUnicode_InternFromString("grad")) == NULL ||
                   (names.is_cpu = PyUnicode_InternFromString("is_cpu")) == NULL ||
                   (names.saved_grad = PyUnicode_InternFromString("_saved_grad")) == NULL ||
                   (names.state = PyUnicode_InternFromString("_state")) == NULL ||
                   (names.taken = PyUnicode_InternFromString("taken")) == NULL ||
                   (names.value = PyUnicode_InternFromString("_value_")) == NULL ||
                   (names.zero3_shard = PyUnicode_InternFromString("_zero3_shard")) == NULL
               ? -1
               : 0;
}

/* ---- calls of the subclass ---- */

static PyObject *
by_ops(handle_steps *h, const char *name, PyObject *argument)
{
    return argument == NULL ? PyObject_CallMethod((PyObject *)h, name, NULL)
                            : PyObject_CallMethod((PyObject *)h, name, "(O)", argument);
}

/* The truth of an object, which is given up, or NULL; -1 on failure. */
static int
truth(PyObject *object)
{
    const int is_true = object == NULL ? -1 : PyObject_IsTrue(object);
    Py_XDECREF(object);
    return is_true;
}

/* For its effect: 0 or -1. */
static int
run(handle_steps *h, const char *name, PyObject *argument)
{
    PyObject *result = by_ops(h, name, argument);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyObject *
none_unless(int status)
{
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
bool_unless(int status)
{
    return status < 0 ? NULL : PyBool_FromLong(status);
}

static int
is_set(const PyObject *object)
{
    return object != NULL && object != Py_None;
}

/* Whether the loops in C can have a part in it. */
static int
is_usual(const handle_steps *h)
{
    return h->padded != NULL && h->unit != NULL && PyList_GET_SIZE(h->shared) == 0;
}

static int
are_there_views(const handle_steps *h)
{
    return PyList_GET_SIZE(h->tensors) > 0 && PyList_GET_ITEM(h->tensors, 0) != Py_None;
}

/* ---- states ---- */

static int
is_in_backward_state(const handle_steps *h)
{
    return h->state_code == BACKWARD_PRE || h->state_code == BACKWARD_POST;
}

/* The value of a HandleTrainingState; -1 on failure. */
static int
code_of(PyObject *state)
{
    int64_t code = 0;
    PyObject *value = PyObject_GetAttr(state, names.value);
    const int status = value == NULL ? -1 : fp_as_int64(value, &code);
    Py_XDECREF(value);
    if (status == 0 && (code < IDLE || code > SYNC_PARAMS)) {
        PyErr_Format(PyExc_ValueError, "expected a HandleTrainingState, got %R", state);
        return -1;
    }
    return status < 0 ? -1 : (int)code;
}

static int
set_code(handle_steps *h, PyObject *state, int code)
{
    if (code < 0 || (h->flat != NULL && PyObject_SetAttr(h->flat, names.state, state) < 0)) {
        return -1;
    }
    h->state_code = code;
    Py_XSETREF(h->state, Py_NewRef(state));
    return 0;
}

static PyObject *
set_state(handle_steps *h, PyObject *state)
{
    return none_unless(set_code(h, state, code_of(state)));
}

static int leave_backward(handle_steps *h);

static PyObject *
get_training_state(handle_steps *h, void *closure)
{
    return Py_NewRef(h->state == NULL ? Py_None : h->state);
}

static int
set_training_state(handle_steps *h, PyObject *value, void *closure)
{
    const int was_in_backward = is_in_backward_state(h);
    if (value == NULL || h->state == NULL) {
        PyErr_SetString(PyExc_AttributeError, "the state cannot be deleted, nor set before there is one");
        return -1;
    }
    PyObject *state = Py_TYPE(value) == Py_TYPE(h->state) ? Py_NewRef(value) : by_ops(h, "_state_of", value);
    const int code = state == NULL ? -1 : code_of(state);
    int status = -1;
    if (code >= 0 && !(before[code] & BIT(h->state_code)) &&
        !(code == FORWARD && was_in_backward && fp_graph_task() != -1)) {
        status = run(h, "_refuse", state);
    }
    else if (set_code(h, state, code) == 0) {
        status = code == IDLE && was_in_backward ? leave_backward(h) : 0;
    }
    Py_XDECREF(state);
    return status;
}

static PyObject *
may_follow(handle_steps *h, PyObject *const *args, Py_ssize_t nargs)
{
    const int first = fp_check_nargs("_may_follow", nargs, 2) < 0 ? -1 : code_of(args[0]);
    const int second = first < 0 ? -1 : code_of(args[1]);
    return second < 0 ? NULL : PyBool_FromLong((before[second] & BIT(first)) != 0);
}

/* ---- what users have done ---- */

static int
read_versions(handle_steps *h, fp_versions *found)
{
    int plain = 0;
    *found = (fp_versions){0};
    if (h->padded != NULL) { /* no Python code runs in these */
        PyObject *const masters[] = {h->flat_param, h->shard};
        plain = fp_torch_versions(PySequence_Fast_ITEMS(h->params), PyList_GET_SIZE(h->params), 1, found);
        found->values += fp_param_versions(masters, 2);
    }
    if (plain == 0) {
        long long values, grads, grad_values;
        PyObject *sums = by_ops(h, "_versions", NULL);
        plain = sums != NULL && PyArg_ParseTuple(sums, "LLL", &values, &grads, &grad_values) ? 1 : -1;
        if (plain > 0) {
            *found = (fp_versions){.values = values, .grads = grads, .grad_values = grad_values};
        }
        Py_XDECREF(sums);
    }
    return plain < 0 ? -1 : 0;
}

static PyObject *
note_shown(handle_steps *h, PyObject *ignored)
{
    h->is_shown = 1;
    return none_unless(read_versions(h, &h->shown));
}

/* Whether gradients are as they were then; -1 on failure. */
static int
is_as_shown(handle_steps *h)
{
    fp_versions now;
    return read_versions(h, &now) < 0 ? -1 : now.grads == h->shown.grads && now.grad_values == h->shown.grad_values;
}

static PyObject *
get_is_as_shown(handle_steps *h, void *closure)
{
    return bool_unless(is_as_shown(h));
}

/* Whether masters were written to here, or an optimizer has stepped, since they were gathered last; -1 on failure. */
static int
is_changed(handle_steps *h)
{
    fp_versions now;
    int64_t steps = 0;
    PyObject *taken = h->optimizers == NULL ? Py_NewRef(Py_None) : PyObject_GetAttr(h->optimizers, names.taken);
    const int status = taken == NULL || fp_as_int64(taken, &steps) < 0 ? -1 : read_versions(h, &now);
    Py_XDECREF(taken);
    return status < 0 ? -1 : now.values != h->seen_values || steps != h->seen_steps;
}

static PyObject *
get_is_changed(handle_steps *h, void *closure)
{
    return bool_unless(is_changed(h));
}

/* Whether users have put nothing in place of parameters or gradients, and cleared none; -1 on failure. */
static int
is_as_put(handle_steps *h)
{
    fp_versions now;
    PyObject *grad = PyObject_GetAttr(h->flat_param, names.grad);
    int as_put = grad == NULL ? -1 : 1;
    if (as_put > 0 && grad != Py_None && (h->is_shown || !h->in_backward)) {
        as_put = h->is_shown ? is_as_shown(h) : read_versions(h, &now) < 0 ? -1 : now.grads > 0;
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
write_back(handle_steps *h)
{
    const int as_put = h->is_unsharded ? 1 : is_usual(h) ? is_as_put(h) : 0;
    return as_put != 0 ? (as_put < 0 ? -1 : 0) : truth(by_ops(h, "_write_back_by_ops", NULL));
}

static PyObject *
write_back_method(handle_steps *h, PyObject *ignored)
{
    return bool_unless(write_back(h));
}

/* ---- memory ---- */

/* Give it room for all unsharded elements. 1; 0: it had that; -1 on failure. */
static int
allocate(handle_steps *h, PyObject *tensor)
{
    const int status = fp_torch_allocate(tensor, h->numel);
    return status != 2 ? status : run(h, "_allocate_by_ops", tensor) < 0 ? -1 : 1;
}

/* Free it; by the method of that name where there are streams. */
static int
free_tensor(handle_steps *h, PyObject *tensor, const char *by_method)
{
    int status = 0;
    if (h->is_on_host && h->message != NULL) {
        const char *reason = PyUnicode_AsUTF8(h->message);
        status = reason == NULL ? -1 : fp_torch_free(tensor, reason, 0);
    }
    return status == 0 ? run(h, by_method, tensor) : status < 0 ? -1 : 0;
}

static int
check_device(handle_steps *h)
{
    const int on_host = h->is_on_host ? truth(PyObject_GetAttr(h->flat_param, names.is_cpu)) : 0;
    return on_host != 0 ? (on_host < 0 ? -1 : 0) : run(h, "_check_on_compute_device", h->flat_param);
}

/* ---- unsharding ---- */

/* Whether what was gathered is good without asking. */
static int
is_settled(const handle_steps *h)
{
    return h->gathered && (h->confirmed || is_in_backward_state(h));
}

static PyObject *
needs_unshard(handle_steps *h, PyObject *ignored)
{
    return PyBool_FromLong(!h->is_unsharded || h->was_given_up || h->state_code == SUMMON_FULL_PARAMS ||
                           !is_settled(h));
}

/* What to gather into; a new reference. */
static PyObject *
target(handle_steps *h)
{
    return h->state_code == SUMMON_FULL_PARAMS ? by_ops(h, "_get_padded_to_gather_into", NULL) : Py_NewRef(h->padded);
}

static PyObject *
pre_unshard(handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL && (run(h, "init_flat_param_attributes", NULL) < 0 || h->padded == NULL)) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_RuntimeError, "the handle has no flat parameter");
    }
    const int wrote = write_back(h);
    PyObject *padded = wrote < 0 || check_device(h) < 0 ? NULL : target(h);
    const int given = padded == NULL ? -1 : allocate(h, padded);
    Py_XDECREF(padded);
    return given < 0 ? NULL : PyBool_FromLong(given || wrote);
}

/* Whether to gather from the masters; -1 on failure. Collective, unless control flow tells, or the ranks have agreed. */
static int
must_refresh(handle_steps *h)
{
    PyObject *copy = PyObject_GetAttr(h->flat_param, names.zero3_shard), *agreed = h->agreed; /* both owned */
    int status = -1;
    h->agreed = NULL;
    const int has_copy = h->has_zero3_copy || h->stays_unsharded ? copy != Py_None : h->gathered;
    if (copy != NULL && (!has_copy || (h->needs_param_sync && !h->param_synced))) {
        status = 1; /* known to all ranks */
    }
    else if (copy != NULL && is_in_backward_state(h)) {
        status = 0; /* backward goes with what its forward had */
    }
    else if (copy != NULL) {
        const int changed = is_changed(h);
        status = changed < 0      ? -1
                 : is_set(agreed) ? PyObject_IsTrue(agreed)
                                  : truth(by_ops(h, "_ask", changed ? Py_True : Py_False));
        if (status == 0 && changed > 0 && is_set(agreed)) {
            status = run(h, "_refuse_write", NULL);
        }
    }
    Py_XDECREF(agreed);
    Py_XDECREF(copy);
    return status;
}

static PyObject *
must_refresh_method(handle_steps *h, PyObject *ignored)
{
    return h->flat_param == NULL ? PyErr_Format(PyExc_RuntimeError, "the handle has no flat parameter")
                                 : bool_unless(must_refresh(h));
}

/* Begin to gather from the zero3 shard, where Python has no part in it. 1; 0: it has; -1 on failure. */
static int
begin_gather(handle_steps *h, PyObject *padded, PyObject *shard)
{
    fp_gather *native = h->native == NULL || h->stays_unsharded ? NULL : fp_gather_of(h->native);
    const int64_t own = native == NULL ? 0 : fp_torch_numel(shard);
    if (native == NULL || own < 0 || own * h->ranks != h->numel || is_set(h->gather)) {
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
wait_unshard(handle_steps *h, PyObject *ignored)
{
    if (!is_set(h->gather)) {
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
        result = by_ops(h, "_wait_for_gather", error);
    }
    Py_XDECREF(error);
    Py_DECREF(under_way);
    return result;
}

static PyObject *
all_gather_flat_param(handle_steps *h, PyObject *padded)
{
    if (is_settled(h)) {
        return Py_NewRef(padded);
    }
    int status = h->padded == NULL ? 1 : must_refresh(h);
    if (status > 0) {
        status = run(h, "_gather_masters", padded);
    }
    else if (status == 0 && !h->gathered) {
        PyObject *shard = PyObject_GetAttr(h->flat_param, names.zero3_shard);
        status = shard == NULL ? -1 : begin_gather(h, padded, shard);
        status = status == 0 ? truth(PyObject_CallMethod((PyObject *)h, "_gather", "(OO)", padded, shard)) : status;
        Py_XDECREF(shard);
    }
    if (status < 0) {
        return NULL;
    }
    h->gathered = h->confirmed = 1;
    return Py_NewRef(padded);
}

static PyObject *
use_unsharded(handle_steps *h, PyObject *padded)
{
    const int in_forward = h->state_code == FORWARD;
    int status = 1; /* 1: by operations */
    h->is_unsharded = 1;
    if (h->padded != NULL && h->unit != NULL && (in_forward || h->state_code == BACKWARD_PRE)) {
        PyObject *again = !in_forward && are_there_views(h) ? Py_True : Py_False;
        PyObject *const arguments[] = {
            h->flat_param, padded, h->tensors, again, in_forward ? Py_True : Py_False, h->unsafe ? Py_True : Py_False};
        PyObject *views = fp_module_params_use_unsharded(h->unit, arguments, 6);
        status = views == NULL ? -1 : views == Py_None;
        if (status == 0 && views != h->tensors) {
            status = PyList_SetSlice(h->tensors, 0, PyList_GET_SIZE(h->tensors), views);
        }
        Py_XDECREF(views);
    }
    return status <= 0 ? none_unless(status) : by_ops(h, "_use_unsharded_by_ops", padded);
}

static PyObject *
unshard(handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL) {
        return by_ops(h, "_refuse_unshard", NULL);
    }
    PyObject *padded = target(h), *gathered = NULL, *result = NULL;
    if (padded != NULL && allocate(h, padded) >= 0) {
        gathered = h->state_code == SUMMON_FULL_PARAMS ? by_ops(h, "_gather_masters", padded)
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

/* Clear the gradients of those in list. */
static int
clear_grads(PyObject *list)
{
    PyObject *items = PyList_AsTuple(list); /* what is released may change the list */
    const int plain = items == NULL ? -1 : fp_torch_clear_grads(fp_items(items), PyTuple_GET_SIZE(items));
    Py_XDECREF(items);
    return plain;
}

static PyObject *
use_sharded(handle_steps *h, PyObject *ignored)
{
    int status = 0; /* 0: by operations */
    h->is_unsharded = 0;
    if (h->padded != NULL && h->unit != NULL) {
        const int64_t numel = fp_torch_numel(h->shard);
        PyObject *const arguments[] = {h->flat_param, h->shard, h->params,
                                       h->shared,     h->infos, h->unsafe ? Py_True : Py_False};
        status = numel < 0                 ? -1
                 : numel != h->shard_numel ? 0
                                           : truth(fp_module_params_use_sharded(h->unit, arguments, 6));
    }
    if (status == 0) {
        return by_ops(h, "_use_sharded_by_ops", NULL);
    }
    if (status > 0 &&
        h->state_code == BACKWARD_POST) { /* the graph of the views may go; without it they are used again */
        status = clear_grads(h->tensors);
        for (Py_ssize_t i = 0; status >= 0 && i < PyList_GET_SIZE(h->tensors); i++) {
            status = PyList_SetItem(h->tensors, i, Py_NewRef(Py_None));
        }
    }
    return none_unless(status);
}

static PyObject *
reshard(handle_steps *h, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    const Py_ssize_t named = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    if (nargs + named != 1 || (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, 0),
                                                                              "free_unsharded_flat_param") != 0)) {
        return PyErr_Format(PyExc_TypeError, "reshard() takes free_unsharded_flat_param, and nothing else");
    }
    const int frees = PyObject_IsTrue(args[0]);
    if (frees < 0 || truth(wait_unshard(h, NULL)) < 0 ||
        (h->is_from_masters && run(h, "_take_zero3_shard", NULL) < 0)) {
        return NULL;
    }
    h->confirmed = 0;
    Py_CLEAR(h->agreed);
    if ((h->is_unsharded || h->state_code != BACKWARD_POST || h->padded == NULL || are_there_views(h)) &&
        truth(use_sharded(h, NULL)) < 0) {
        return NULL;
    }
    if (h->state_code == SUMMON_FULL_PARAMS) {
        return by_ops(h, "_free_summoned", NULL);
    }
    if (frees && h->padded != NULL && !(h->stays_unsharded && h->gathered)) {
        if (free_tensor(h, h->padded, "_free_after_use") < 0) {
            return NULL;
        }
        h->gathered = 0;
    }
    Py_RETURN_NONE;
}

/* ---- gradients ---- */

static PyObject *
stop_showing(handle_steps *h, PyObject *ignored)
{
    if (!h->is_shown) {
        Py_RETURN_FALSE;
    }
    int done = is_usual(h) ? is_as_shown(h) : 0;
    done = done > 0 ? clear_grads(h->params) : done;
    if (done <= 0) {
        return done < 0 ? NULL : by_ops(h, "_stop_showing_by_ops", NULL);
    }
    h->is_shown = 0;
    return fp_gradients_set(h->flat_param, Py_None) < 0 ? NULL : Py_NewRef(Py_True);
}

/* Let what the modules have now have its parts of grad as .grad. */
static int
set_unsharded_grads(handle_steps *h, PyObject *grad)
{
    PyObject *done = NULL;
    if (is_usual(h) && fp_torch_all_plain(&grad, 1)) {
        done = fp_module_params_set_grads(h->unit, grad);
        if (done == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear(); /* a parameter is missing or no plain tensor: say which, or take it */
    }
    done = done == NULL ? PyObject_CallMethod(h->flat, "_set_unsharded_grads", "(O)", grad) : done;
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Show the user what he has: what micro-batches have added up, or else what was reduced before. */
static int
show(handle_steps *h)
{
    int status = h->sum_code == SUM_ON_DEVICE && is_set(h->total) && is_usual(h) && !h->is_shown &&
                 h->state_code == IDLE && !h->is_unsharded;
    status = status ? fp_torch_same_storage(h->sum, h->total) : 0;
    status = status > 0 ? clear_grads(h->params) : status;
    if (status <= 0) {
        return status < 0 ? -1 : run(h, "_show", NULL);
    }
    return fp_gradients_set(h->flat_param, h->total) < 0 || set_unsharded_grads(h, h->total) < 0 ||
                   truth(note_shown(h, NULL)) < 0
               ? -1
               : 0;
}

/* grad = zeros, for the backward that comes to add to. */
static int
begin_gradient(handle_steps *h)
{
    PyObject *earlier = truth(stop_showing(h, NULL)) < 0 ? NULL : PyObject_GetAttr(h->flat_param, names.grad);
    int status = earlier == NULL ? -1 : 0;
    if (status == 0 && earlier != Py_None && !h->in_backward) {
        status = run(h, "_set_aside", NULL);
    }
    Py_XDECREF(earlier);
    PyObject *zeros = status < 0 || allocate(h, h->grad) < 0 ? NULL : PyObject_CallMethod(h->grad, "zero_", NULL);
    Py_XDECREF(zeros);
    if (zeros == NULL) {
        return -1;
    }
    h->prepared = fp_param_versions(&h->grad, 1);
    h->in_backward = 1;
    return 0;
}

static PyObject *
prepare_gradient_for_backward(handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL || !h->is_unsharded || (h->state_code != BACKWARD_PRE && h->state_code != IDLE)) {
        return by_ops(h, "_refuse_to_prepare", NULL);
    }
    if (!fp_param_requires_grad(h->flat_param)) {
        Py_RETURN_NONE;
    }
    if (check_device(h) < 0 || (h->prepared < 0 && begin_gradient(h) < 0)) {
        return NULL;
    }
    PyObject *shown = PyObject_GetAttr(h->flat_param, names.grad);
    int status = shown == NULL ? -1 : shown == Py_None ? PyObject_SetAttr(h->flat_param, names.grad, h->grad) : 0;
    Py_XDECREF(shown);
    if (status == 0 && h->state_code == BACKWARD_PRE) {
        status = set_unsharded_grads(h, h->grad);
    }
    return none_unless(status);
}

/* Whether what a backward has left is the one buffer, to be added to a sum on this host; -1 on failure. */
static int
is_in_buffer(handle_steps *h)
{
    if (h->padded == NULL || h->state_code != BACKWARD_POST || !h->is_on_host || h->sum_code == SUM_ON_HOST ||
        h->prepared < 0 || !h->in_backward) {
        return 0;
    }
    PyObject *pair[] = {PyObject_GetAttr(h->flat_param, names.grad), h->grad};
    int same = pair[0] == NULL ? -1 : 0;
    if (same == 0 && fp_torch_all_plain(pair, 2) && !fp_param_requires_grad(h->grad)) {
        same = fp_torch_same_storage(pair[0], pair[1]);
    }
    Py_XDECREF(pair[0]);
    return same;
}

static PyObject *
accumulate_grad(handle_steps *h, PyObject *ignored)
{
    const int in_buffer = is_in_buffer(h), is_first = h->sum_code == SUM_NONE;
    if (in_buffer <= 0) {
        return in_buffer < 0 ? NULL : by_ops(h, "_accumulate_by_ops", NULL);
    }
    if (fp_gradients_set(h->flat_param, Py_None) < 0 || (are_there_views(h) && clear_grads(h->tensors) < 0)) {
        return NULL;
    }
    h->prepared = -1;
    if ((is_first && run(h, "_allocate_sum", NULL) < 0) || fp_torch_convert(h->sum, h->grad, !is_first) < 0) {
        return NULL;
    }
    h->sum_code = SUM_ON_DEVICE;
    Py_RETURN_NONE;
}

static PyObject *
free_runtime_unshard_grad(handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL || (h->prepared >= 0 && run(h, "_give_up_gradient", NULL) < 0)) {
        return none_unless(h->padded == NULL ? 0 : -1);
    }
    return none_unless(free_tensor(h, h->grad, "_free"));
}

static int
leave_backward(handle_steps *h)
{
    if (h->prepared >= 0 && run(h, "_free_unused_gradient", NULL) < 0) {
        return -1;
    }
    h->in_backward = 0;
    PyObject *reduced = h->flat_param == NULL ? NULL : PyObject_GetAttr(h->flat_param, names.saved_grad);
    Py_XDECREF(reduced);
    if (reduced == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
    }
    return reduced == NULL ? show(h) : 0;
}

static PyObject *
reload_full_prec_grad(handle_steps *h, PyObject *ignored)
{
    return h->sum_code == SUM_ON_HOST ? by_ops(h, "_reload", NULL) : Py_NewRef(Py_None);
}

/* ---- the type ---- */

static PyObject *
bind(handle_steps *h, PyObject *const *args, Py_ssize_t nargs)
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
bind_buffers(handle_steps *h, PyObject *ignored)
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
    h->message = PyObject_GetAttrString(h->flat, "_freed_message");
    h->numel = h->message == NULL ? -1 : fp_torch_numel(h->padded);
    h->shard_numel = h->numel < 0 ? -1 : fp_torch_numel(h->shard);
    return none_unless(h->shard_numel < 0 ? -1 : 0);
}

static PyObject *
steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    handle_steps *h = (handle_steps *)type->tp_alloc(type, 0);
    if (h != NULL) {
        h->prepared = h->seen_values = h->seen_steps = -1;
        h->needs_param_sync = 1;
        h->sum_code = SUM_NONE;
    }
    return (PyObject *)h;
}

static int
steps_traverse(handle_steps *h, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(h));
    for (size_t i = 0; i < OBJECTS; i++) {
        Py_VISIT(h->objects[i]);
    }
    return 0;
}

static int
steps_clear(handle_steps *h)
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
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    (void)steps_clear((handle_steps *)self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define METHOD(name, function, flags, signature, text)                                                                 \
    {name, FP_FASTCALL(function), flags, name signature "\n--\n\n" text}
static PyMethodDef steps_methods[] = {
    METHOD("_bind", bind, METH_FASTCALL, "($self, flat_param, flat, optimizers, gathering, unit, native, ranks, /)",
           "Once: what the steps are of."),
    METHOD("_bind_buffers", bind_buffers, METH_NOARGS, "($self, /)", "Once: when the flat parameter has all tensors."),
    METHOD("_set_state", set_state, METH_O, "($self, state, /)", "Whatever it was before."),
    METHOD("_may_follow", may_follow, METH_FASTCALL, "($self, first, second, /)",
           "Whether a state may come after one."),
    METHOD("_note_shown", note_shown, METH_NOARGS, "($self, /)", "The sum is shown, as it is now."),
    METHOD("_stop_showing", stop_showing, METH_NOARGS, "($self, /)",
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
    METHOD("prepare_gradient_for_backward", prepare_gradient_for_backward, METH_NOARGS, "($self, /)",
           "Make zeros in param_dtype for this backward to accumulate into: flat_param.grad.\n\nThey are "
           "_full_grad_padded; the views in the modules have their parts as .grad. What was reduced before is put "
           "aside, to be added to. Nothing happens in a frozen unit."),
    METHOD("accumulate_grad", accumulate_grad, METH_NOARGS, "($self, /)",
           "Add this backward's gradient to the sum of the micro-batches, in full_prec_dtype.\n\nNothing happens in a "
           "frozen unit. Raises: RuntimeError in another state than BACKWARD_POST, without "
           "prepare_gradient_for_backward() before, and for gradients that have a history."),
    METHOD("free_runtime_unshard_grad", free_runtime_unshard_grad, METH_NOARGS, "($self, /)",
           "Free this backward's gradient, which has been accumulated. Raises: RuntimeError if it has not."),
    METHOD("reload_full_prec_grad", reload_full_prec_grad, METH_NOARGS, "($self, /)",
           "Copy the sum back to the device, on the current stream, if it was offloaded; else nothing."),
    {NULL, NULL, 0, NULL},
};

#define OBJECT(name, field, flags) {name, _Py_T_OBJECT, offsetof(handle_steps, field), flags, NULL}
#define FLAG(field) {"_" #field, Py_T_BOOL, offsetof(handle_steps, field), 0, NULL}
#define NUMBER(name, kind, field) {name, kind, offsetof(handle_steps, field), 0, NULL}
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
    {"_training_state", (getter)(void (*)(void))get_training_state, (setter)(void (*)(void))set_training_state,
     "Raises when set: ValueError for no state, RuntimeError if it may not follow that which it is in.", NULL},
    {"_is_as_shown", (getter)(void (*)(void))get_is_as_shown, NULL, "Whether gradients are as at _note_shown().", NULL},
    {"_is_changed_here", (getter)(void (*)(void))get_is_changed, NULL,
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
    FP_TYPE("HandleSteps", handle_steps, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, steps_slots);
