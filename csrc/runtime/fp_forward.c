/* runtime/fp_forward.c -- the methods that Python calls before and after the forward of a unit's module. pre_forward
 * gathers the unit and gives the modules its views. post_forward puts hooks on the output, which call
 * fp_backward_come_to(), and reshards. */
#include "runtime/fp_forward.h"

#include "runtime/fp_backward.h"
#include "runtime/fp_check.h"
#include "runtime/fp_fresh.h"
#include "runtime/fp_iteration.h"
#include "runtime/fp_members.h"
#include "runtime/fp_unshard.h"

/* 1: gather the next unit while this one computes: it was asked for, or gathers run on a separate stream of an accelerator. */
static int
gathers_ahead(const fp_unit *unit)
{
    return (unit->root->prefetch & FP_PREFETCH_FORWARD) ||
           (unit->n_flat_params > 0 && fp_flat_buffer_gathers_ahead(unit->flat_params[0].flat));
}

/* *next = the unit that came after this one in the last forward, if it may be gathered ahead and is not; else NULL. */
static int
find_next(const fp_unit *unit, fp_unit **next)
{
    *next = unit->next_forward;
    if (*next == NULL || (*next)->stale == FP_STALE_YES || !fp_fresh_may_gather_ahead(*next)) {
        *next = NULL;
        return 0;
    }
    const int fresh = fp_fresh_is_of_now(*next);
    const int has = fresh ? 0 : fp_members_has(*next);
    *next = has > 0 ? *next : NULL;
    return fresh < 0 || has < 0 ? -1 : 0;
}

/* Start to gather the unit that came next in the last forward, and the small ones after it. Stale units have a separate
 * order (next_refreshed): their gathers go over all ranks, and every rank runs every stale unit, but a rank may skip other
 * units. first: the first forward of the unit in this pass. */
static int
prefetch_forward(fp_unit *unit, int first)
{
    fp_root *root = unit->root;
    if (root->last_forward != NULL) {
        root->last_forward->next_forward = unit;
    }
    root->last_forward = unit;
    if (first && gathers_ahead(unit) && fp_unit_has_secondary_shard(unit) && unit->stale != FP_STALE_NO) {
        if (root->last_refreshed != NULL) {
            root->last_refreshed->next_refreshed = unit;
        }
        root->last_refreshed = unit;
        fp_unit *stale = unit->next_refreshed;
        const int starts = stale != NULL && stale->stale == FP_STALE_YES ? fp_members_has(stale) : 0;
        if (starts != 0 && (starts < 0 || fp_unshard_start(stale) < 0)) {
            return -1;
        }
    }
    fp_unit *next;
    FP_TRY(find_next(unit, &next));
    return next != NULL && (gathers_ahead(unit) || fp_unshard_is_small(next)) ? fp_unshard_start_small(next, find_next)
                                                                              : 0;
}

/* The backward packs the gradients on the stream that this forward computes on. */
static int
run_here(fp_flat_param *flat_param)
{
    return flat_param->views == NULL ? 0 : fp_flat_buffer_run_here(flat_param->flat, fp_items(flat_param->views));
}

/* Lower holders to the number of those that hold the views now: see fp_flat_param.holders. */
static int
count_holders(fp_flat_param *flat_param)
{
    if (flat_param->views != NULL) {
        const int64_t now = fp_flat_buffer_holders(flat_param->flat, fp_items(flat_param->views));
        flat_param->holders = now < flat_param->holders ? now : flat_param->holders;
    }
    return 0;
}

static int
pre_forward(fp_unit *unit)
{
    fp_root *root = unit->root;
    if (fp_root_in_backward(root) && !fp_graph_is_running(root->ref)) { /* the backward before it raised */
        FP_TRY(fp_iteration_recover(root));
    }
    const int begins = root->depth == 0 && !fp_root_in_backward(root);
    FP_TRY(fp_iteration_move(unit, FP_PASS_BEGIN_FORWARD)); /* while an iteration begins, other threads are refused */
    if (begins) {
        FP_TRY(fp_iteration_begin(root));
    }
    fp_unit_check(unit, "pre_forward");
    if (unit->depth == 1) {
        unit->began = fp_graph_now();
    }
    const int first = !fp_root_in_backward(root) && unit->entry < 0;
    if (first) {
        unit->entered = root->order.n;
        unit->entry = root->entries++;
    }
    const int goes_ahead = !fp_root_in_backward(root) && (root->min_unit_bytes > 0 || gathers_ahead(unit));
    if (first && goes_ahead) {
        fp_fresh_learn(unit);
    }
    FP_TRY(fp_unshard_make_full(unit));
    FP_TRY(fp_unit_each(unit, fp_flat_param_show_views));
    if (!fp_root_in_backward(root)) {
        FP_TRY(fp_unit_each(unit, run_here));
    }
    if (unit->depth == 1 && unit->pending == 0) {
        FP_TRY(fp_unit_each(unit, count_holders));
    }
    return goes_ahead ? prefetch_forward(unit, first) : 0;
}

/* The outermost forward is over: parameters() gives the original parameters, also for units that stay gathered, as a loss
 * may use them. */
static int
list_params(fp_root *root, fp_unit *unit)
{
    FP_TRY(fp_unit_each(unit, fp_flat_param_list_params));
    return fp_backward_watch(unit);
}

static int
begin_forward(fp_unit *unit)
{
    if (unit->for_graph && !fp_root_in_backward(unit->root) && fp_graph_task() >= 0) {
        /* A backward through a recorded graph recomputes this forward in a checkpoint, before any hook of the unit has run. */
        FP_TRY(fp_backward_come_to(unit, unit->began));
    }
    fp_range *range = fp_range_begin("pre_forward", unit->name);
    fp_root *entered = fp_iteration_enter_in_backward(unit->root);
    const int status = pre_forward(unit);
    fp_iteration_leave(entered);
    fp_range_end(range);
    return status;
}

PyObject *
fp_forward_pre(fp_unit *unit, PyObject *ignored)
{
    fp_hidden *hidden = NULL;
    FP_TRY_NULL(fp_iteration_check_joined(unit));
    FP_TRY_NULL(fp_iteration_check_thread(unit)); /* before the lock is taken */
    FP_TRY_NULL(fp_hide_checkpoints(&hidden));
    const int status = begin_forward(unit);
    fp_show_checkpoints(hidden);
    return fp_none_unless(status);
}

/* Put hooks on the tensors in an output that require grad. Adds their number to *hooked, and that of all tensors to
 * *found. Looks into tuples, lists and dicts; find_tensors() looks into other types. */
static int
hook_outputs(fp_unit *unit, PyObject *output, int *hooked, int *found)
{
    if (fp_param_is_tensor(output)) {
        *found += 1;
        if (fp_param_requires_grad(output)) {
            const int done = fp_graph_hook(output, unit->ref, unit->began);
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
        tensors = PyObject_CallFunctionObjArgs(unit->root->find_tensors, output, NULL);
        Py_XSETREF(tensors, tensors == NULL ? NULL : PySequence_Tuple(tensors));
    }
    int status = tensors == NULL || Py_EnterRecursiveCall(" while looking for tensors in an output") ? -1 : 0;
    if (status == 0) {
        for (Py_ssize_t i = 0; status == 0 && i < PyTuple_GET_SIZE(tensors); i++) {
            status = hook_outputs(unit, PyTuple_GET_ITEM(tensors, i), hooked, found);
        }
        Py_LeaveRecursiveCall();
    }
    Py_XDECREF(tensors);
    return status;
}

/* Set unit->opaque: if no tensor was found in the output, a backward may come without a hook and read freed data. Then the
 * error says that the type of the output is the cause. */
static int
note_opaque(fp_unit *unit, PyObject *output, int found)
{
    if (found > 0 || output == Py_None || unit->reason == NULL) {
        Py_CLEAR(unit->opaque);
        return 0;
    }
    PyObject *opaque = PyUnicode_FromFormat("%U It returned a %.200s in which no tensor was found: return tensors, "
                                            "containers of them, a dataclass, or a class "
                                            "that is registered with torch.utils._pytree.",
                                            unit->reason, Py_TYPE(output)->tp_name);
    PyObject *text = opaque == NULL ? NULL : fp_as_text(opaque);
    Py_XDECREF(opaque);
    FP_NEED(text);
    Py_XSETREF(unit->opaque, text);
    return 0;
}

/* Everything but the move END_FORWARD, which end_forward() makes last: until then other threads are refused. */
static int
post_forward(fp_unit *unit, PyObject *output)
{
    fp_root *root = unit->root;
    fp_unit_check(unit, "post_forward");
    const int is_inner = unit->depth > 1, is_outermost = root->depth == 1;
    int hooked = 0, found = 0;
    FP_TRY(fp_unshard_take_requires_grad(unit));
    if (!is_inner) {
        FP_TRY(fp_unshard_take_written_in_forward(unit));
    }
    if (fp_graph_grad_enabled()) {
        FP_TRY(hook_outputs(unit, output, &hooked, &found));
        FP_TRY(note_opaque(unit, output, found));
    }
    if (fp_root_in_backward(root)) { /* recomputed: its backward comes at once */
        return 0;
    }
    if (hooked) {
        FP_TRY(fp_iteration_move(unit, FP_PASS_EXPECT_BACKWARD));
        FP_TRY(fp_iteration_append_order(root, unit));
    }
    if (is_outermost) {
        FP_TRY(fp_iteration_wait_until_read(root));
    }
    if (is_inner) {
        return 0;
    }
    FP_TRY(fp_unshard_end_forward(unit, hooked && (is_outermost || !unit->reshard_after_forward)));
    return is_outermost ? fp_root_each(root, list_params) : 0;
}

/* After a failure the forward is still under way, and abort_forward ends it. */
static int
end_forward(fp_unit *unit, PyObject *output)
{
    FP_TRY(fp_iteration_check(unit, FP_PASS_END_FORWARD));
    FP_TRY(post_forward(unit, output));
    return fp_iteration_move(unit, FP_PASS_END_FORWARD);
}

PyObject *
fp_forward_post(fp_unit *unit, PyObject *output)
{
    fp_hidden *hidden = NULL;
    FP_TRY_NULL(fp_iteration_check_joined(unit));
    FP_TRY_NULL(fp_hide_checkpoints(&hidden));
    fp_range *range = fp_range_begin("post_forward", unit->name);
    fp_root *entered = fp_iteration_enter_in_backward(unit->root);
    const int status = end_forward(unit, output);
    fp_unit_check(unit, "the end of post_forward");
    fp_iteration_leave(entered);
    fp_range_end(range);
    fp_show_checkpoints(hidden);
    return status < 0 ? NULL : Py_NewRef(output);
}

/* A forward begins whose backward needs frozen parameters, for the gradients of its inputs, a list of tensors. Count it in
 * pending until inputs_done() in fp_backward.c. */
PyObject *
fp_forward_expect_inputs(fp_unit *unit, PyObject *tensors)
{
    if (!PyList_Check(tensors)) {
        return PyErr_Format(PyExc_TypeError, "expected a list of tensors, got %s", Py_TYPE(tensors)->tp_name);
    }
    if (unit->root == NULL || !fp_root_in_backward(unit->root) || unit->pending == 0) { /* else it was counted */
        const int hooked = fp_graph_hook_inputs(tensors, unit->ref, unit->backwards);
        FP_TRY_NULL(hooked);
        unit->pending += hooked;
    }
    Py_RETURN_NONE;
}

PyObject *
fp_forward_abort(fp_unit *unit, PyObject *ignored)
{
    fp_root *root = unit->root;
    if (root == NULL || fp_iteration_is_elsewhere(root) || !fp_unit_is_in_forward(unit)) {
        Py_RETURN_NONE; /* the forward was refused, and has begun nothing */
    }
    FP_TRY_NULL(fp_iteration_move(unit, FP_PASS_END_FORWARD));
    return fp_none_unless(root->phase == FP_PHASE_OPEN && root->depth == 0 ? fp_iteration_recover(root) : 0);
}
