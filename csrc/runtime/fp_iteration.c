/* runtime/fp_iteration.c -- an iteration of a model: one forward of the outermost unit and the backward that follows; its order
 * of units, the thread it runs in, and what is forgotten when it is broken off. At its beginning each rank looks which masters
 * of units with a copy have changed, and all gather anew what one of them calls out of date (fp_consensus.c). */
#include "runtime/fp_iteration.h"

#include "core/fp_alloc.h"
#include "runtime/fp_consensus.h"
#include "runtime/fp_model_trace.h"
#include "runtime/fp_reduce_order.h"
#include "runtime/fp_unshard.h"

/* ---- threads ---- */

int
fp_iteration_check_joined(const fp_unit *step)
{
    if (step->run == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%U is not part of a run yet: call the wrapped module, not its parts",
                     step->name);
        return -1;
    }
    return 0;
}

/* Whether another thread than this is in the model. */
int
fp_iteration_is_elsewhere(const fp_root *run)
{
    return run->in_backward ? fp_graph_is_running(run->ref) && !fp_graph_is_within(fp_graph_backward(), run->backward)
                            : run->depth > 0 && run->thread != PyThread_get_thread_ident();
}

void
fp_iteration_refuse_thread(const fp_unit *step)
{
    PyErr_Format(PyExc_RuntimeError,
                 "%U: another thread is in a forward or backward of this model. One thread at a time: gathers and "
                 "reductions of two would come in another order on each rank",
                 step->name);
}

/* One thread at a time works on the units in a backward: autograd has a thread for each device. */
void
fp_iteration_enter(fp_root *run)
{
    const unsigned long self = PyThread_get_thread_ident();
    if (run->held == 0 || run->holder != self) {
        if (PyThread_acquire_lock(run->lock, NOWAIT_LOCK) != PY_LOCK_ACQUIRED) {
            Py_BEGIN_ALLOW_THREADS;
            PyThread_acquire_lock(run->lock, WAIT_LOCK);
            Py_END_ALLOW_THREADS;
        }
        run->holder = self;
    }
    run->held++;
    Py_INCREF(run);
}

void
fp_iteration_leave(fp_root *run)
{
    if (--run->held == 0) {
        PyThread_release_lock(run->lock);
    }
    Py_DECREF(run);
}

/* The same for forwards, which matter where one is recomputed. NULL: nothing is locked. */
fp_root *
fp_iteration_lock_in_backward(fp_root *run)
{
    if (!run->in_backward) {
        return NULL;
    }
    fp_iteration_enter(run);
    return run;
}

void
fp_iteration_unlock(fp_root *locked)
{
    if (locked != NULL) {
        fp_iteration_leave(locked);
    }
}

/* ---- the units in it ---- */

/* The step is in no backward, awaits none and is not in the order of forwards. */
void
fp_iteration_rest(fp_unit *step)
{
    step->task = -1;
    step->awaits_backward = 0;
    step->position = -1;
    step->pending = 0;
}

/* Shards on the host that the device has gathered from may be written to from now on. */
int
fp_iteration_wait_until_read(fp_root *run)
{
    PyObject *units = fp_root_units(run);
    int status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        for (Py_ssize_t k = 0; status == 0 && k < step->n_parts; k++) {
            status = fp_flat_buffer_wait_read(step->parts[k].flat);
        }
    }
    Py_XDECREF(units);
    return status;
}

/* Forget whatever a pass that was broken off has left. After a backward that is also what no_sync has kept before: of some
 * units the gradients of that backward are in it, of others not. */
int
fp_iteration_recover(fp_root *run)
{
    PyObject *units = fp_root_units(run); /* letting go of gradients may run code, which may let go of units */
    if (units == NULL) {
        return -1;
    }
    const int in_backward = run->in_backward;
    run->in_backward = 0;
    run->depth = 0;
    run->n_order = 0;
    run->reducing = run->halfway = run->last_forward = run->last_refreshed = NULL;
    fp_reduce_order_forget(run);
    int status = fp_iteration_wait_until_read(run);
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        const fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        for (Py_ssize_t k = 0; k < step->n_parts; k++) {
            if (fp_flat_buffer_give_up(step->parts[k].flat) < 0) {
                PyErr_Clear(); /* a gather that failed: there is nothing to wait for any more */
            }
        }
    }
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        step->depth = 0;
        fp_iteration_rest(step);
        for (Py_ssize_t k = 0; status == 0 && k < step->n_parts; k++) {
            fp_flat_param *part = &step->parts[k];
            part->deferred = 0;
            fp_flat_buffer_forget_written(part->flat);
            fp_flat_buffer_forget(part->flat, !part->shows_kept);
            status = in_backward ? fp_flat_param_drop_kept(part) : 0;
            if (status == 0 && part->copied && fp_flat_buffer_forget_values(part->flat) < 0) {
                PyErr_Clear(); /* a gather that failed: there is nothing to wait for any more */
            }
        }
        if (status == 0) {
            status = fp_unshard_release(step) < 0 || fp_unshard_show_params(step) < 0 ? -1 : 0;
        }
    }
    Py_DECREF(units);
    return status;
}

static int
was_replaced(fp_root *run, int *replaced)
{
    *replaced = run->always_python;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(run->watched) && !*replaced; i++) {
        PyObject *entry = PyTuple_GET_ITEM(run->watched, i);
        PyObject *now = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
        if (now == NULL && PyErr_Occurred()) {
            return -1;
        }
        *replaced = now != PyTuple_GET_ITEM(entry, 2);
    }
    return 0;
}

int
fp_iteration_begin(fp_root *run)
{
    if (run->in_backward && fp_iteration_recover(run) < 0) {
        return -1;
    }
    run->pass++;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(run->followers); i++) {
        fp_model_trace_begin_pass(PyTuple_GET_ITEM(run->followers, i));
    }
    for (Py_ssize_t i = 0; i < run->n_order; i++) {
        if (run->order[i] != NULL) {
            run->order[i]->position = -1;
        }
    }
    run->n_order = 0;
    run->last_forward = run->last_refreshed = NULL;
    return was_replaced(run, &run->through_python) < 0 || (run->copies && fp_consensus_on_stale(run) < 0) ? -1 : 0;
}

int
fp_iteration_refresh(fp_root *run)
{
    int status = fp_iteration_begin(run);
    PyObject *units = status == 0 ? fp_root_units(run) : NULL;
    status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        if (step->run == run && step->copied && step->stale) {
            status = fp_unshard_make_full(step) < 0 || fp_unshard_release(step) < 0 ? -1 : 0;
        }
    }
    Py_XDECREF(units);
    return status == 0 ? fp_iteration_wait_until_read(run) : -1;
}

int
fp_iteration_append_order(fp_root *run, fp_unit *step)
{
    if (run->n_order == run->room_order) {
        const Py_ssize_t room = run->room_order == 0 ? 64 : 2 * run->room_order;
        fp_unit **order = fp_calloc((size_t)room, sizeof *order);
        if (order == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (Py_ssize_t i = 0; i < run->n_order; i++) {
            order[i] = run->order[i];
        }
        fp_free(run->order);
        run->order = order;
        run->room_order = room;
    }
    step->position = run->n_order;
    run->order[run->n_order++] = step;
    return 0;
}

void
fp_iteration_leave_root(fp_unit *step)
{
    fp_root *run = step->run;
    if (run == NULL) {
        return;
    }
    Py_ssize_t kept = 0;
    for (Py_ssize_t s = 0; s < run->n_steps; s++) {
        if (run->steps[s] != step) {
            run->steps[kept] = run->steps[s];
            if (run->steps[kept]->next_forward == step) {
                run->steps[kept]->next_forward = NULL;
            }
            if (run->steps[kept]->next_refreshed == step) {
                run->steps[kept]->next_refreshed = NULL;
            }
            kept++;
        }
    }
    fp_reduce_order_leave(run, step);
    run->n_steps = kept;
    for (Py_ssize_t i = 0; i < run->n_order; i++) {
        run->order[i] = run->order[i] == step ? NULL : run->order[i];
    }
    if (run->error_step == step) {
        run->error_step = NULL;
    }
    if (run->last_forward == step) {
        run->last_forward = NULL;
    }
    if (run->last_refreshed == step) {
        run->last_refreshed = NULL;
    }
    if (run->reducing == step) {
        run->reducing = NULL;
    }
    if (run->halfway == step) {
        run->halfway = NULL;
    }
    step->run = NULL;
    Py_DECREF(run);
}
