/* runtime/fp_backward.c -- what autograd calls of a unit and of the model. The hook on a unit's output calls before_backward;
 * autograd comes to the node behind a unit's views when all their gradients are there and calls gradients_ready; the first
 * before_backward of an iteration has the engine call finish when the backward is over. Units that keep a copy are reduced in
 * an order that does not depend on which of them get gradients here (fp_reduce_order.c). */
#include "runtime/fp_backward.h"

#include "runtime/fp_iteration.h"
#include "runtime/fp_model_trace.h"
#include "runtime/fp_reduce_order.h"
#include "runtime/fp_reduction.h"
#include "runtime/fp_unshard.h"

/* Whether this thread was started by autograd, for whichever backward: nothing tells which thread that is of. */
static int
is_of_autograd(void)
{
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    Py_XDECREF(frame);
    return frame == NULL;
}

static int
begin_backward(fp_unit *step)
{
    fp_root *run = step->run;
    if (fp_iteration_is_elsewhere(run) && (run->in_backward || !is_of_autograd())) {
        fp_iteration_refuse_thread(step);
        return -1;
    }
    if (run->in_backward && fp_graph_is_running(run->ref)) {
        return 0;
    }
    if (run->in_backward && fp_iteration_recover(run) < 0) { /* an exception ended the one before */
        return -1;
    }
    if (fp_graph_at_end(run->ref) < 0) {
        return -1;
    }
    run->in_backward = 1;
    run->backward = fp_graph_backward();
    return fp_reduce_order_begin(run);
}

/* Gather the unit that backward comes to next: where there is a line, it may have passed those that no gradient came to,
 * and a unit around them whose output was theirs is come to after them. */
static int
prefetch_backward(fp_unit *step)
{
    fp_root *run = step->run;
    const Py_ssize_t at = run->copies && run->cursor < step->position ? run->cursor : step->position;
    const Py_ssize_t next = at - 1;
    return next < 0 || next >= run->n_order || run->order[next] == NULL ? 0 : fp_unshard_prefetch(run->order[next]);
}

static int
before_backward_of(fp_unit *step, uint64_t began)
{
    fp_root *run = step->run;
    const int task = fp_graph_task();
    if (begin_backward(step) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_buffer_run_after(step->parts[k].flat, began);
    }
    if (step->task == task && step->full && !step->gathering) {
        return 0; /* a further output */
    }
    const int passed = fp_reduce_order_reach(step);
    if (passed != 0) {
        return passed < 0 ? -1 : 0;
    }
    step->task = task;
    step->awaits_backward = 0;
    if (fp_unshard_check_unchanged(step) < 0 || fp_unshard_make_full(step) < 0 || fp_reduce_order_bring_back(run) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (part->shows == FP_SHOWS_PARAMS &&
            fp_flat_param_show_views(part) < 0) { /* for a forward recomputed in parts */
            return -1;
        }
    }
    return run->backward_prefetch == FP_PREFETCH_PRE ? prefetch_backward(step) : 0;
}

static int
before_backward(void *unit, uint64_t began)
{
    fp_unit *step = unit;
    if (fp_iteration_check_joined(step) < 0) {
        return -1;
    }
    Py_INCREF(step);
    fp_root *run = step->run;
    fp_iteration_enter(run);
    fp_range *range = fp_range_begin("pre_backward", step->name);
    const int status = before_backward_of(step, began);
    fp_range_end(range);
    fp_iteration_leave(run);
    Py_DECREF(step);
    return status;
}

static int
gradients_ready_of(fp_unit *step, fp_flat_param *part, fp_gradients *gradients)
{
    fp_root *run = step->run;
    if (begin_backward(step) < 0) { /* no output of the unit had a hook: who called backward went around it */
        return -1;
    }
    /* Reentrant checkpoints run parts of the unit as graph tasks of their own: more gradients will come. */
    const int more = step->task >= 0 && step->task != fp_graph_task();
    const int reduces = run->synchronize || part->refresh_group != NULL; /* nested: in part, in each micro-batch */
    if (fp_flat_param_drop_frozen(part, gradients) < 0 ||
        fp_flat_param_read_kept(part, PyUnicode_AsUTF8(step->name)) < 0) {
        return -1;
    }
    if (!more && (run->synchronize || step->reshard_after_forward)) {
        if (run->synchronize && part->param_group != NULL && fp_flat_buffer_forget_whole(part->flat) < 0) {
            return -1; /* the optimizer steps next: a copy of what it steps is of no use */
        }
        if (fp_unshard_release_part(step, part) < 0 || fp_flat_param_show_params(part) < 0) {
            return -1;
        }
    }
    if (!more && run->backward_prefetch == FP_PREFETCH_POST && prefetch_backward(step) < 0) {
        return -1;
    }
    if (!reduces || more) {
        part->deferred = reduces;
        part->packed = !more;
        return fp_flat_buffer_keep(part->flat, gradients, part->master);
    }
    if (fp_reduce_order_has(step, part)) {
        part->packed = 1;
        return fp_reduction_take(step, part) < 0 || fp_flat_buffer_pack(part->flat, gradients, part->master) < 0
                   ? -1
                   : fp_reduce_order_flush(run, run->cursor);
    }
    part->passed = 1;
    return fp_reduction_start(step, part, gradients, run->synchronize ? FP_REDUCE_ALL : FP_REDUCE_INNER);
}

static int
gradients_ready(void *unit, int index, fp_gradients *gradients)
{
    fp_unit *step = unit;
    if (fp_iteration_check_joined(step) < 0) {
        return -1;
    }
    Py_INCREF(step);
    fp_root *run = step->run;
    fp_iteration_enter(run);
    fp_range *range = fp_range_begin("post_backward", step->name);
    const int status = gradients_ready_of(step, &step->parts[index], gradients);
    fp_range_end(range);
    fp_iteration_leave(run);
    Py_DECREF(step);
    return status;
}

/* A loss has parameters in it as they are (a penalty on weights): what no_sync has kept goes out of .grad, so that autograd
 * finds a gradient of the shard there, or none. */
static int
before_accumulation(void *unit, int index)
{
    fp_unit *step = unit;
    fp_flat_param *part = &step->parts[index];
    if (step->run == NULL || !part->shows_kept) {
        return 0;
    }
    Py_INCREF(step);
    fp_root *run = step->run;
    fp_iteration_enter(run);
    const int status =
        begin_backward(step) < 0 || fp_flat_param_read_kept(part, PyUnicode_AsUTF8(step->name)) < 0 ? -1 : 0;
    fp_iteration_leave(run);
    Py_DECREF(step);
    return status;
}

static int
finish_step(fp_unit *step)
{
    fp_root *run = step->run;
    fp_iteration_rest(step);
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (fp_reduction_take(step, part) < 0) {
            return -1;
        }
        if (run->synchronize &&
            fp_flat_buffer_has_kept(part->flat)) { /* of micro-batches before; none came in this one */
            if (fp_flat_param_read_kept(part, PyUnicode_AsUTF8(step->name)) < 0) {
                return -1;
            }
            part->deferred = fp_flat_buffer_has_kept(part->flat);
        }
        if (part->deferred &&
            (fp_reduction_start(step, part, NULL, run->synchronize ? FP_REDUCE_ALL : FP_REDUCE_INNER) < 0 ||
             fp_reduction_take(step, part) < 0)) {
            return -1;
        }
        if (fp_flat_buffer_settle_copies(part->flat) < 0) {
            return -1;
        }
        if (!part->shows_kept && fp_flat_buffer_has_kept(part->flat) &&
            (fp_graph_watch(fp_flat_param_items(part->owners), PyTuple_GET_SIZE(part->owners), step->ref, (int)k) < 0 ||
             fp_flat_param_show_kept(part) < 0)) {
            return -1;
        }
    }
    if (step->full && !run->synchronize && !step->reshard_after_forward) {
        step->keep = 1;
        step->kept_steps = fp_optimizer_steps;
    }
    else if ((step->gathering || fp_unshard_is_partly_full(step)) && fp_unshard_release(step) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; run->synchronize && k < step->n_parts; k++) { /* the optimizer steps next */
        const fp_flat_param *part = &step->parts[k]; /* whose masters may be written in ways that no version tells of */
        if (part->copied && !part->untracked && fp_flat_buffer_forget_values(part->flat) < 0) {
            return -1;
        }
    }
    return fp_unshard_show_params(step) < 0 ? -1 : fp_unshard_take_requires_grad(step);
}

static int
finish(void *run_pointer, uint64_t ignored)
{
    fp_root *run = run_pointer;
    fp_iteration_enter(run);
    int status = fp_reduce_order_end(run);
    PyObject *units = status == 0 ? fp_root_units(run) : NULL;
    status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        if (step->run == run) {
            fp_range *range = fp_range_begin("end of backward", step->name);
            status = finish_step(step);
            fp_range_end(range);
        }
    }
    Py_XDECREF(units);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(run->followers); i++) {
        fp_model_trace_end_backward(PyTuple_GET_ITEM(run->followers, i), !run->synchronize);
    }
    run->n_order = 0;
    run->reducing = run->halfway = NULL;
    if (status == 0) {
        status = fp_iteration_wait_until_read(run); /* else the recovery does */
    }
    if (status == 0) {
        run->in_backward = 0;
    }
    fp_iteration_leave(run);
    return status;
}

const fp_module_params_calls fp_backward_unit_calls = {
    .before_backward = before_backward, .gradients_ready = gradients_ready, .before_accumulation = before_accumulation};
const fp_module_params_calls fp_backward_root_calls = {
    .before_backward = finish, .gradients_ready = NULL, .before_accumulation = NULL};
