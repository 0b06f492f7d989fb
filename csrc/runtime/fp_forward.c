/* runtime/fp_forward.c -- what Python calls around the forward of a unit's module. post_forward puts a hook on the output, which
 * calls what fp_backward.c does before the unit's backward. */
#include "runtime/fp_forward.h"

#include "runtime/fp_iteration.h"
#include "runtime/fp_unshard.h"

/* Gather what comes next, if the last time tells. What is out of date is gathered over all ranks, which come to all of that
 * but may skip the rest: so what comes next of it is told by that alone. */
static int
prefetch_forward(fp_unit *step, int first)
{
    fp_root *run = step->run;
    if (run->last_forward != NULL) {
        run->last_forward->next_forward = step;
    }
    run->last_forward = step;
    if (first && step->copied && step->stale_pass == run->pass) {
        if (run->last_refreshed != NULL) {
            run->last_refreshed->next_refreshed = step;
        }
        run->last_refreshed = step;
        fp_unit *stale = step->next_refreshed;
        if (stale != NULL && stale->stale && fp_unshard_start(stale) < 0) {
            return -1;
        }
    }
    fp_unit *next = step->next_forward;
    return next == NULL || next->stale || fp_unshard_is_fresh(next) ? 0 : fp_unshard_start(next);
}

static PyObject *
pre_forward(fp_unit *step)
{
    fp_root *run = step->run;
    if (fp_iteration_is_elsewhere(run)) {
        fp_iteration_refuse_thread(step);
        return NULL;
    }
    if (run->in_backward && !fp_graph_is_running(run->ref) &&
        fp_iteration_recover(run) < 0) { /* an exception ended it */
        return NULL;
    }
    if (run->depth == 0 && !run->in_backward && fp_iteration_begin(run) < 0) {
        return NULL;
    }
    run->thread = run->depth == 0 ? PyThread_get_thread_ident() : run->thread;
    run->depth++;
    if (step->depth++ == 0) {
        step->began = fp_graph_now();
    }
    const int first = !run->in_backward && step->entered_pass != run->pass;
    if (first) {
        step->entered_pass = run->pass;
        step->entered = run->n_order;
        step->entry = run->entries++;
    }
    if (fp_unshard_make_full(step) < 0) {
        return NULL;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_flat_param_show_views(&step->parts[k]) < 0) {
            return NULL;
        }
    }
    if (!run->in_backward && run->forward_prefetch && prefetch_forward(step, first) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* A forward is over: parameters() are the original ones from now on, of units that stay full too. */
static int
list_params(fp_root *run)
{
    PyObject *units = fp_root_units(run);
    int status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        for (Py_ssize_t k = 0; status == 0 && k < step->n_parts; k++) {
            status = fp_flat_param_list_params(&step->parts[k]);
        }
    }
    Py_XDECREF(units);
    return status;
}

PyObject *
fp_forward_pre(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    if (fp_iteration_check_joined(step) < 0) {
        return NULL;
    }
    fp_root *locked = fp_iteration_lock_in_backward(step->run);
    PyObject *result = pre_forward(step);
    fp_iteration_unlock(locked);
    return result;
}

/* Put hooks on the tensors in an output that have a history; *hooked counts these, *found all. */
static int
hook_outputs(fp_unit *step, PyObject *output, int *hooked, int *found)
{
    const int is_tensor = fp_param_is_tensor(output);
    if (is_tensor < 0) {
        return -1;
    }
    if (is_tensor) {
        *found += 1;
        if (fp_param_requires_grad(output)) {
            const int done = fp_graph_hook(output, step->ref, step->began);
            *hooked += done > 0;
            return done < 0 ? -1 : 0;
        }
        return 0;
    }
    if (output == Py_None || PyUnicode_CheckExact(output) || PyLong_Check(output) || PyFloat_CheckExact(output)) {
        return 0;
    }
    PyObject *tensors = NULL;
    if (PyTuple_CheckExact(output) || PyList_CheckExact(output)) {
        tensors = PySequence_Tuple(output); /* a copy of ours */
    }
    else if (PyDict_CheckExact(output)) {
        tensors = PyDict_Values(output);
        Py_XSETREF(tensors, tensors == NULL ? NULL : PyList_AsTuple(tensors));
    }
    else {
        tensors = PyObject_CallFunctionObjArgs(step->run->find_tensors, output, NULL);
        Py_XSETREF(tensors, tensors == NULL ? NULL : PySequence_Tuple(tensors));
    }
    int status = tensors == NULL || Py_EnterRecursiveCall(" while looking for tensors in an output") ? -1 : 0;
    if (status == 0) {
        for (Py_ssize_t i = 0; status == 0 && i < PyTuple_GET_SIZE(tensors); i++) {
            status = hook_outputs(step, PyTuple_GET_ITEM(tensors, i), hooked, found);
        }
        Py_LeaveRecursiveCall();
    }
    Py_XDECREF(tensors);
    return status;
}

/* If no tensor was found in an output: what a backward that comes from it nevertheless is told. */
static int
note_opaque(fp_unit *step, PyObject *output, int found)
{
    if (found > 0 || output == Py_None || step->reason == NULL) {
        Py_CLEAR(step->opaque);
        return 0;
    }
    PyObject *opaque = PyUnicode_FromFormat("%U It returned a %.200s in which no tensor was found: return tensors, "
                                            "containers of them, a dataclass, or a class "
                                            "that is registered with torch.utils._pytree.",
                                            step->reason, Py_TYPE(output)->tp_name);
    if (opaque == NULL) {
        return -1;
    }
    Py_XSETREF(step->opaque, opaque);
    return 0;
}

static PyObject *
post_forward(fp_unit *step, PyObject *output)
{
    fp_root *run = step->run;
    int hooked = 0, found = 0;
    if (fp_unshard_take_requires_grad(step) < 0 || (step->depth == 0 && fp_unshard_take_written_in_forward(step) < 0)) {
        return NULL;
    }
    if (fp_graph_grad_enabled() &&
        (hook_outputs(step, output, &hooked, &found) < 0 || note_opaque(step, output, found) < 0)) {
        return NULL;
    }
    if (run->in_backward) { /* recomputed: its backward comes at once */
        return Py_NewRef(output);
    }
    if (hooked) {
        step->awaits_backward = 1;
        if (fp_iteration_append_order(run, step) < 0) {
            return NULL;
        }
    }
    if (run->depth == 0 && fp_iteration_wait_until_read(run) < 0) {
        return NULL;
    }
    if (step->depth > 0) {
        return Py_NewRef(output);
    }
    const int stays = hooked && (run->depth == 0 || !step->reshard_after_forward);
    if (!stays && fp_unshard_release(step) < 0) {
        return NULL;
    }
    if ((!stays || step->reshard_after_forward || !step->sharded) && fp_unshard_show_params(step) < 0) {
        return NULL;
    }
    if (run->depth == 0 && list_params(run) < 0) {
        return NULL;
    }
    return Py_NewRef(output);
}

PyObject *
fp_forward_post(PyObject *self, PyObject *output)
{
    fp_unit *step = (fp_unit *)self;
    if (fp_iteration_check_joined(step) < 0) {
        return NULL;
    }
    if (step->depth == 0) {
        PyErr_Format(PyExc_RuntimeError, "%U: post_forward without pre_forward", step->name);
        return NULL;
    }
    fp_root *locked = fp_iteration_lock_in_backward(step->run);
    step->depth--;
    step->run->depth--;
    PyObject *result = post_forward(step, output);
    if (result == NULL) { /* abort_forward counts it down */
        step->depth++;
        step->run->depth++;
    }
    fp_iteration_unlock(locked);
    return result;
}

/* A forward with inputs that require grad begins. True if inputs_done is to be called when they have it. */
PyObject *
fp_forward_expect_inputs(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    if (step->run != NULL && step->run->in_backward && step->pending > 0) {
        Py_RETURN_FALSE; /* recomputed: the forward that it repeats has said so */
    }
    step->pending++;
    Py_RETURN_TRUE;
}

/* The gradients of a forward's inputs are there, so what is frozen is not needed for that forward any more. */
PyObject *
fp_forward_inputs_done(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    step->pending -= step->pending > 0;
    if (step->pending > 0 || step->run == NULL || !step->run->in_backward || step->depth > 0 ||
        !(step->run->synchronize || step->reshard_after_forward) || fp_iteration_is_elsewhere(step->run)) {
        Py_RETURN_NONE;
    }
    fp_root *locked = fp_iteration_lock_in_backward(step->run);
    int status = 0;
    for (Py_ssize_t k = 0; status == 0 && k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (part->untracked) {
            status = fp_unshard_release_part(step, part) < 0 || fp_flat_param_show_params(part) < 0 ? -1 : 0;
        }
    }
    fp_iteration_unlock(locked);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *
fp_forward_abort(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    fp_root *run = step->run;
    if (run != NULL && fp_iteration_is_elsewhere(run)) {
        Py_RETURN_NONE; /* it was refused */
    }
    if (run != NULL && step->depth > 0) {
        step->depth--;
        run->depth--;
    }
    if (run != NULL && !run->in_backward && run->depth == 0 && fp_iteration_recover(run) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
