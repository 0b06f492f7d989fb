/* runtime/fp_iteration.c -- an iteration of a model: a forward of the outermost unit and the backward that follows. This
 * file has the thread that an iteration runs for, the post-forward order, and the recovery of an iteration that was broken
 * off. */
#include "runtime/fp_iteration.h"

#include "runtime/fp_check.h"
#include "runtime/fp_consensus.h"
#include "runtime/fp_fresh.h"
#include "runtime/fp_members.h"
#include "runtime/fp_trace_py.h"
#include "runtime/fp_reduce_order.h"
#include "runtime/fp_unshard.h"

/* ---- threads ---- */

int
fp_iteration_check_joined(const fp_unit *unit)
{
    if (unit->root == NULL) {
        return fp_raise(PyExc_RuntimeError, "%U has joined no model yet: call the wrapped module, not its parts",
                        unit->name);
    }
    return 0;
}

/* A model is in one iteration at a time. The iteration runs for one thread of the user. These threads run for it too:
 * autograd's threads in the backward that this thread has called, with the forwards that they recompute. In a backward
 * they take turns under root->lock. Any other thread is refused until the iteration has ended, as gathers of two
 * iterations would come in another order on each rank. During a recovery every thread is refused. */
int
fp_iteration_is_elsewhere(const fp_root *root)
{
    const int runs = fp_root_in_backward(root) ? fp_graph_is_running(root->ref) : root->depth > 0;
    return root->phase == FP_PHASE_CLOSED || (runs && root->caller != fp_graph_caller());
}

int
fp_iteration_check_thread(const fp_unit *unit)
{
    if (!fp_iteration_is_elsewhere(unit->root)) {
        return 0;
    }
    return fp_raise(
        PyExc_RuntimeError,
        unit->root->phase == FP_PHASE_CLOSED
            ? "%U: the model is being recovered, or refreshed: a forward or backward may begin after that"
            : "%U: another thread is in a forward or backward of this model. One thread at a time: gathers and "
              "reductions of two would come in another order on each rank",
        unit->name);
}

/* Write the unit's state after event to *next. -1 with RuntimeError if this thread, or the table, does not allow it. */
static int
next_pass(const fp_unit *unit, fp_pass_event event, unsigned *next)
{
    if (event == FP_PASS_BEGIN_FORWARD || event == FP_PASS_END_FORWARD) {
        FP_TRY(fp_iteration_check_thread(unit));
    }
    return fp_unit_next(unit, &fp_pass_moves, unit->pass, event, next);
}

int
fp_iteration_check(const fp_unit *unit, fp_pass_event event)
{
    unsigned next;
    return next_pass(unit, event, &next);
}

int
fp_iteration_move(fp_unit *unit, fp_pass_event event)
{
    fp_root *root = unit->root;
    unsigned next;
    FP_TRY(next_pass(unit, event, &next));
    if (event == FP_PASS_BEGIN_FORWARD) {
        if (root->depth == 0) {
            FP_TRY(fp_graph_keep_caller());
        }
        root->caller = fp_graph_caller();
        root->depth++;
        unit->depth++;
    }
    else if (event == FP_PASS_END_FORWARD) {
        root->depth--;
        if (--unit->depth > 0) {
            return 0; /* an outer forward of this unit is still under way */
        }
    }
    else if (event == FP_PASS_RESET) {
        unit->depth = 0;
    }
    unit->pass = next;
    return 0;
}

void
fp_iteration_enter(fp_root *root)
{
    fp_lock_take(&root->lock);
    Py_INCREF(root);
}

void
fp_iteration_leave(fp_root *root)
{
    if (root != NULL) {
        fp_lock_leave(&root->lock);
        Py_DECREF(root);
    }
}

fp_root *
fp_iteration_enter_in_backward(fp_root *root)
{
    if (!fp_root_in_backward(root)) {
        return NULL;
    }
    fp_iteration_enter(root);
    return root;
}

/* ---- units ---- */

int
fp_iteration_end_backward(fp_unit *unit)
{
    unit->position = -1;
    unit->pending = 0;
    unit->backwards++;
    return fp_iteration_move(unit, FP_PASS_FINISH_BACKWARD);
}

static int
wait_until_read(fp_flat_param *flat_param)
{
    return fp_flat_buffer_wait_read(flat_param->flat);
}

static int
wait_until_all_read(fp_root *root, fp_unit *unit)
{
    return fp_unit_each(unit, wait_until_read);
}

int
fp_iteration_wait_until_read(fp_root *root)
{
    return fp_root_each(root, wait_until_all_read);
}

/* For a loop that goes on after an error. If status < 0 take the exception that is set, and keep the first one in *first. An
 * interruption (KeyboardInterrupt, say) takes the place of an Exception, so that it is not lost. */
static void
keep_first(PyObject **first, int status)
{
    PyObject *error = status < 0 ? PyErr_GetRaisedException() : NULL;
    const int goes_first = error != NULL && !PyErr_GivenExceptionMatches(error, PyExc_Exception) &&
                           PyErr_GivenExceptionMatches(*first, PyExc_Exception);
    if (*first == NULL || goes_first) {
        Py_XSETREF(*first, error);
    }
    else {
        Py_XDECREF(error);
    }
}

/* keep_first() for a wait that fails because its gather has failed, which nobody asks about any more: only an interruption
 * counts. */
static void
keep_interruption(PyObject **first, int status)
{
    if (status < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        status = 0;
    }
    keep_first(first, status);
}

/* The order matters. All units rest before any is freed: code of the user that runs meanwhile finds no pass. Device reads
 * end before memory is freed. All gathers are given up before the first one is waited for. The accumulated gradient is
 * dropped after a backward: some units have that backward's gradients in it, others have not. */
int
fp_iteration_recover(fp_root *root)
{
    PyObject *units =
        fp_unit_list_copy(&root->units); /* dropping gradients may run code of the user, which may free units */
    FP_NEED(units);
    const int in_backward = fp_root_in_backward(root);
    PyObject *first = NULL; /* owned */
    root->phase = FP_PHASE_CLOSED;
    root->depth = 0;
    root->order.n = 0;
    root->reducing = root->halfway = root->last_forward = root->last_refreshed = NULL;
    fp_reduce_order_forget(root);
    for (Py_ssize_t s = 0; s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *unit = (fp_unit *)PyTuple_GET_ITEM(units, s);
        keep_first(&first, fp_iteration_move(unit, FP_PASS_RESET)); /* legal in each state */
        keep_first(&first, fp_iteration_end_backward(unit));
    }
    keep_first(&first, fp_iteration_wait_until_read(root));
    for (Py_ssize_t s = 0; s < PyTuple_GET_SIZE(units); s++) {
        const fp_unit *unit = (fp_unit *)PyTuple_GET_ITEM(units, s);
        for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
            keep_interruption(&first, fp_flat_buffer_give_up(unit->flat_params[k].flat));
        }
    }
    for (Py_ssize_t s = 0; s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *unit = (fp_unit *)PyTuple_GET_ITEM(units, s);
        for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
            fp_flat_param *flat_param = &unit->flat_params[k];
            fp_flat_buffer_forget_written(flat_param->flat);
            fp_flat_buffer_drop_grads(flat_param->flat, flat_param->shown == FP_SHOWN_REDUCED);
            if (in_backward) {
                fp_flat_param_drop_accumulated(flat_param);
            }
            if (fp_flat_param_has_secondary_shard(flat_param)) {
                keep_interruption(&first, fp_flat_buffer_forget_values(flat_param->flat));
            }
        }
        keep_first(&first, fp_unshard_release(unit));
        keep_first(&first, fp_unshard_show_params(unit));
    }
    root->phase = FP_PHASE_OPEN;
    Py_DECREF(units);
    fp_idle_check(root, "recover");
    if (first != NULL) {
        PyErr_SetRaisedException(first);
        return -1;
    }
    return 0;
}

int
fp_iteration_look_for_replaced(fp_root *root)
{
    PyObject *watched = Py_XNewRef(root->watched); /* a lookup may run code that calls always_python() */
    int replaced = watched == NULL;
    for (Py_ssize_t i = 0; !replaced && i < PyTuple_GET_SIZE(watched); i++) {
        PyObject *entry = PyTuple_GET_ITEM(watched, i);
        PyObject *now = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
        replaced = now != PyTuple_GET_ITEM(entry, 2);
        if (now == NULL && PyErr_Occurred()) {
            Py_DECREF(watched);
            return -1;
        }
    }
    Py_XDECREF(watched);
    root->through_python = replaced;
    return 0;
}

int
fp_iteration_begin(fp_root *root)
{
    if (fp_root_in_backward(root)) {
        FP_TRY(fp_iteration_recover(root));
    }
    fp_units_check(root, "the begin of a pass");
    fp_members_forget(root);
    root->pass++;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(root->model_traces); i++) {
        fp_model_trace_begin_pass(PyTuple_GET_ITEM(root->model_traces, i));
    }
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        fp_unit *unit = root->units.items[s];
        unit->position = unit->entry = unit->seen_writes = -1;
        unit->stale = unit->stale == FP_STALE_GATHERED ? FP_STALE_NO : unit->stale;
    }
    root->order.n = 0;
    root->last_forward = root->last_refreshed = NULL;
    FP_TRY(fp_iteration_look_for_replaced(root));
    return fp_consensus_before_forward(root);
}

/* Gather a stale unit with a secondary shard from the shards, and free it. */
static int
refresh(fp_root *root, fp_unit *unit)
{
    if (unit->root != root || !fp_unit_has_secondary_shard(unit) || unit->stale != FP_STALE_YES) {
        return 0;
    }
    const int has = fp_members_has(unit);
    if (has <= 0) {
        return has;
    }
    FP_TRY(fp_unshard_make_full(unit));
    return fp_unshard_release(unit);
}

static int
refresh_all(fp_root *root)
{
    FP_TRY(fp_iteration_begin(root));
    FP_TRY(fp_root_each(root, refresh));
    return fp_iteration_wait_until_read(root);
}

int
fp_iteration_refresh(fp_root *root)
{
    root->phase = FP_PHASE_CLOSED;
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        fp_fresh_forget_learned(root->units.items[s]);
    }
    const int status = refresh_all(root);
    root->phase = FP_PHASE_OPEN;
    return status;
}

int
fp_iteration_append_order(fp_root *root, fp_unit *unit)
{
    FP_TRY(fp_unit_list_add(&root->order, unit));
    unit->position = root->order.n - 1;
    return 0;
}

void
fp_iteration_leave_root(fp_unit *unit)
{
    fp_root *root = unit->root;
    if (root == NULL) {
        return;
    }
    fp_reduce_order_leave(root, unit);
    fp_unit_list_remove(&root->units, unit);
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        fp_unit *other = root->units.items[s];
        other->next_forward = other->next_forward == unit ? NULL : other->next_forward;
        other->next_refreshed = other->next_refreshed == unit ? NULL : other->next_refreshed;
    }
    for (Py_ssize_t i = 0; i < root->order.n; i++) {
        root->order.items[i] = root->order.items[i] == unit ? NULL : root->order.items[i];
    }
    fp_unit **const borrowed[] = {&root->last_forward, &root->last_refreshed, &root->reducing, &root->halfway};
    for (size_t i = 0; i < sizeof borrowed / sizeof *borrowed; i++) {
        *borrowed[i] = *borrowed[i] == unit ? NULL : *borrowed[i];
    }
    root->consensus.error_unit = root->consensus.error_unit == unit ? NULL : root->consensus.error_unit;
    unit->root = NULL;
    Py_DECREF(root);
}
