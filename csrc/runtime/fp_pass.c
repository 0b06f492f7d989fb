/* runtime/fp_pass.c -- the step of a sharded model. _C.Unit is one unit: pre-forward, post-forward, pre-backward and
 * post-backward are one call each. _C.Root is what the units of a tree share: the pass that is under way, its order, and
 * what happens when a backward pass ends.
 *
 * Who calls what: Python calls pre_forward and post_forward around the module; post_forward puts a hook on the output,
 * which calls before_backward; autograd comes to the node behind a unit's views when all their gradients are there and
 * calls gradients_ready; the first before_backward of a pass has the engine call finish when the pass is over.
 *
 * A pass is one forward of the outermost unit and the backward that follows. What was gathered in a pass is good for that
 * pass only: the optimizer may have stepped since. Where there is a copy (a part that is `copied`), it is good until the
 * masters change: at the beginning of a pass each rank looks which of its masters have, and all gather anew what one of
 * them calls out of date (fp_consensus.c). Such units are reduced in an order that does not depend on which of them get
 * gradients here (fp_reduce_order.c). */
#include "runtime/fp_pass.h"

#include "core/fp_alloc.h"
#include "runtime/fp_consensus.h"
#include "runtime/fp_model_trace.h"
#include "runtime/fp_reduce_order.h"

int64_t fp_pass_optimizer_steps;

/* ---- gathering ---- */

PyObject *
fp_pass_collectives(const fp_unit *step)
{
    return step->run->through_python ? step->run->collectives : NULL;
}

static const char *
freed_reason(const fp_unit *step)
{
    PyObject *reason = step->opaque != NULL ? step->opaque : step->reason;
    return reason == NULL ? NULL : PyUnicode_AsUTF8(reason);
}

/* Make the views, unless made is 0 and there are some that fit who requires grad. */
static int
make_views(fp_unit *step, Py_ssize_t index, int made)
{
    fp_flat_param *part = &step->parts[index];
    if (made < 0) {
        return -1;
    }
    if (fp_flat_param_take_requires_grad(part, step->name) < 0) {
        return -1;
    }
    int untracked = 1, same = made == 0 && part->views != NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part->owners); i++) {
        untracked = untracked && !fp_param_requires_grad(PyTuple_GET_ITEM(part->owners, i));
    }
    if (same && untracked == part->untracked) {
        return 0;
    }
    if (!untracked && part->full_precision && fp_param_is_low(part->master)) {
        PyErr_Format(PyExc_ValueError,
                     "%U: parameters that were frozen when it was wrapped, of a low precision, require grad now, and "
                     "their gradients would be added in it: build those that are to train in torch.float32",
                     step->name);
        return -1;
    }
    PyObject **made_views = fp_calloc((size_t)part->n, sizeof *made_views);
    if (made_views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *views = NULL;
    if (fp_flat_buffer_views(part->flat, step->ref, (int)index, untracked, made_views) == 0) {
        views = PyTuple_New(part->n);
        for (Py_ssize_t i = 0; i < part->n; i++) {
            if (views != NULL) {
                PyTuple_SET_ITEM(views, i, made_views[i]); /* steals it */
            }
            else {
                Py_DECREF(made_views[i]);
            }
        }
    }
    fp_free(made_views);
    if (views == NULL) {
        return -1;
    }
    part->untracked = untracked;
    Py_XSETREF(part->views, views);
    if (fp_flat_param_forward_requires_grad(part) < 0) {
        return -1;
    }
    if (part->shows != FP_SHOWS_PARAMS || part->params == NULL) {
        return fp_flat_param_show(part, 1);
    }
    return 0;
}

int
fp_pass_make_views(fp_unit *step, Py_ssize_t index)
{
    const fp_flat_param *part = &step->parts[index];
    return make_views(step, index, fp_flat_buffer_prepare(part->flat, part->master, freed_reason(step)));
}

/* Before a gather: whoever outside has the memory keeps it and its values, unless a graph needs just them. */
static int
renew(fp_unit *step, Py_ssize_t index, int changed)
{
    const int renewed = step->run->in_backward || (!changed && step->awaits_backward)
                            ? 0
                            : fp_flat_buffer_renew(step->parts[index].flat, freed_reason(step));
    return renewed > 0 ? make_views(step, index, renewed) : renewed;
}

/* What was written to the views goes into the shard, and so do parameters that were replaced, or whose data were; the
 * latter by Python. */
int
fp_pass_look_over(fp_unit *step)
{
    int any = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (fp_flat_param_take_written(part, step->name) < 0) {
            return -1;
        }
        const Py_ssize_t moved = fp_flat_param_find_moved(part);
        if (moved < 0) {
            return -1;
        }
        any = any || moved < part->n;
    }
    if (!any) {
        return 0;
    }
    PyObject *result = PyObject_CallNoArgs(step->moved);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int
refuse_moved(const fp_unit *step, const fp_flat_param *part, Py_ssize_t i, const char *what)
{
    PyErr_Format(PyExc_RuntimeError, "%U: parameter `%U` of a %.200s %s", step->name,
                 fp_attributes_name(&part->attributes, i), Py_TYPE(part->attributes.items[i].module)->tp_name, what);
    return -1;
}

/* The same after a forward. The graph has the values that were written, so it is not refused for them. */
static int
take_written_in_forward(fp_unit *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        const int64_t versions = fp_flat_param_versions(part);
        const int written = fp_flat_param_take_written(part, step->name);
        if (written < 0) {
            return -1;
        }
        if (written) {
            part->versions += fp_flat_param_versions(part) - versions;
        }
        const Py_ssize_t other = fp_flat_param_find_other(part);
        if (other < 0) {
            return -1;
        }
        if (other < part->n) {
            if (fp_flat_param_show(part, 1) == 0) {
                refuse_moved(step, part, other,
                             "was replaced by another object in its forward, whose gradient nobody would reduce; it is "
                             "as before: replace it between steps, or set its .data");
            }
            return -1;
        }
    }
    return 0;
}

/* Before the backward of a unit: what was written since its forward is known to autograd, or refused. */
static int
check_unchanged(fp_unit *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (part->views == NULL) {
            continue;
        }
        const Py_ssize_t in_views = fp_flat_buffer_moved_view(part->flat, fp_flat_param_items(part->views));
        const Py_ssize_t moved = in_views >= 0 ? in_views : fp_flat_param_find_moved(part);
        if (moved < 0) {
            return -1;
        }
        if (moved < part->n) {
            return refuse_moved(step, part, moved,
                                "was replaced, or given other data, between forward and backward, which has to come to "
                                "the weights of the forward: change it after the backward");
        }
        if (fp_flat_param_take_written(part, step->name) < 0) {
            return -1;
        }
        const int64_t versions = fp_flat_param_versions(part);
        if (versions != part->versions) {
            fp_flat_buffer_refuse_graphs(part->flat, fp_flat_param_items(part->views));
            part->versions = versions;
        }
    }
    return 0;
}

/* Nobody outside has freed the memory that is gathered from, or resized it. */
static int
check_memory(const fp_unit *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        int64_t present, needed;
        const int lacks = fp_flat_buffer_lacks_memory(step->parts[k].flat, step->parts[k].master, &present, &needed);
        if (lacks > 0) {
            PyErr_Format(
                PyExc_ValueError,
                "%U: the storage of its parameters has %lld bytes of %lld: it was freed or resized outside of "
                "flatparam, and their values are lost. Leave storages as they are, or load a state dict into a "
                "model that is wrapped anew",
                step->name, (long long)present, (long long)needed);
        }
        if (lacks != 0) {
            return -1;
        }
    }
    return 0;
}

static int
start_gather(fp_unit *step)
{
    fp_root *run = step->run;
    int gathered = 0;
    if (check_memory(step) < 0) {
        return -1;
    }
    if (!run->in_backward && !step->copied && fp_pass_look_over(step) < 0) {
        return -1;
    }
    /* Only others were freed since, or could not be gathered when this was last tried. */
    const int goes_on = run->in_backward || (step->gathering && step->full_pass == run->pass);
    step->gathering = 1;
    step->full = 0;
    step->full_pass = run->pass;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (fp_pass_make_views(step, k) < 0) {
            return -1;
        }
        if (goes_on && part->full) {
            continue;
        }
        part->full = 0;
        const int refresh = !part->copied || (step->stale && !run->in_backward);
        if (!refresh && fp_flat_buffer_is_whole(part->flat)) {
            part->full = 1;
            continue; /* it stays full and is up to date */
        }
        const int64_t versions = fp_flat_param_versions(part);
        if (renew(step, k, versions != part->versions) < 0) {
            return -1;
        }
        const int from_shards =
            fp_flat_buffer_gather(part->flat, part->master, fp_flat_param_items(part->views), fp_pass_collectives(step),
                                  versions != part->versions, refresh, goes_on);
        if (from_shards < 0) {
            return -1;
        }
        if (from_shards) {
            part->synced = versions;
            part->synced_steps = fp_pass_optimizer_steps;
            run->refreshes += k == 0 && step->copied;
        }
        part->versions = versions;
        part->full = 1;
        gathered = 1;
    }
    step->full = 1;
    step->keep = step->stale = 0;
    run->gathers += gathered && step->sharded;
    return 0;
}

int
fp_pass_start_gather(fp_unit *step)
{
    Py_INCREF(step); /* looking for moved parameters may run code, and some callers have it from a list of the run's */
    const int status = start_gather(step);
    Py_DECREF(step);
    return status;
}

/* Whether what is gathered has the values of now. */
static int
is_fresh(const fp_unit *step)
{
    if (!step->full || step->run->in_backward) {
        return step->full;
    }
    if (step->copied) {
        return !step->stale && step->full_pass == step->run->pass; /* else requires_grad may have changed since */
    }
    if (step->full_pass == step->run->pass) {
        return 1;
    }
    int fresh = step->keep && step->kept_steps == fp_pass_optimizer_steps;
    for (Py_ssize_t k = 0; fresh && k < step->n_parts; k++) {
        fresh = fp_flat_param_is_as_gathered(&step->parts[k]);
    }
    return fresh;
}

static int
make_full(fp_unit *step)
{
    if (!is_fresh(step) && fp_pass_start_gather(step) < 0) {
        return -1;
    }
    step->full_pass = step->run->pass;
    step->keep = 0;
    for (Py_ssize_t k = 0; step->gathering && k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (fp_flat_buffer_wait(part->flat) < 0) {
            part->full = fp_flat_buffer_is_whole(part->flat);
            step->full = step->full && part->full;
            return -1; /* whoever comes next waits again, or gathers what has failed */
        }
    }
    step->gathering = 0;
    return 0;
}

int
fp_pass_release_part(fp_unit *step, fp_flat_param *part)
{
    part->full = step->full = 0;
    return fp_flat_buffer_release(part->flat, part->views == NULL ? NULL : fp_flat_param_items(part->views),
                                  freed_reason(step));
}

int
fp_pass_release(fp_unit *step)
{
    step->full = step->gathering = step->keep = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_pass_release_part(step, &step->parts[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
is_partly_full(const fp_unit *step)
{
    int full = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        full = full || step->parts[k].full;
    }
    return full;
}

int
fp_pass_show_params(fp_unit *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_flat_param_show_params(&step->parts[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
take_requires_grad(fp_unit *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_flat_param_take_requires_grad(&step->parts[k], step->name) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- the pass ---- */

/* The step is in no backward, awaits none and is not in the order of forwards. */
static void
rest(fp_unit *step)
{
    step->task = -1;
    step->awaits_backward = 0;
    step->position = -1;
    step->pending = 0;
}

PyObject *
fp_pass_units(const fp_root *run)
{
    PyObject *units = PyTuple_New(run->n_steps);
    for (Py_ssize_t s = 0; units != NULL && s < run->n_steps; s++) {
        PyTuple_SET_ITEM(units, s, Py_NewRef(run->steps[s]));
    }
    return units;
}

/* Shards on the host that the device has gathered from may be written to from now on. */
static int
wait_until_read(fp_root *run)
{
    PyObject *units = fp_pass_units(run);
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
fp_pass_recover(fp_root *run)
{
    PyObject *units = fp_pass_units(run); /* letting go of gradients may run code, which may let go of units */
    if (units == NULL) {
        return -1;
    }
    const int in_backward = run->in_backward;
    run->in_backward = 0;
    run->depth = 0;
    run->n_order = 0;
    run->reducing = run->halfway = run->last_forward = run->last_refreshed = NULL;
    fp_reduce_order_forget(run);
    int status = wait_until_read(run);
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
        rest(step);
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
            status = fp_pass_release(step) < 0 || fp_pass_show_params(step) < 0 ? -1 : 0;
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

static int
begin_pass(fp_root *run)
{
    if (run->in_backward && fp_pass_recover(run) < 0) {
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
fp_pass_refresh(fp_root *run)
{
    int status = begin_pass(run);
    PyObject *units = status == 0 ? fp_pass_units(run) : NULL;
    status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        if (step->run == run && step->copied && step->stale) {
            status = make_full(step) < 0 || fp_pass_release(step) < 0 ? -1 : 0;
        }
    }
    Py_XDECREF(units);
    return status == 0 ? wait_until_read(run) : -1;
}

static int
append_order(fp_root *run, fp_unit *step)
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

int
fp_pass_prefetch(fp_unit *target)
{
    return target->full || !target->awaits_backward ? 0 : fp_pass_start_gather(target);
}

/* Gather the unit that backward comes to next: where there is a line, it may have passed those that no gradient came to,
 * and a unit around them whose output was theirs is come to after them. */
static int
prefetch_backward(fp_unit *step)
{
    fp_root *run = step->run;
    const Py_ssize_t at = run->copies && run->cursor < step->position ? run->cursor : step->position;
    const Py_ssize_t next = at - 1;
    return next < 0 || next >= run->n_order || run->order[next] == NULL ? 0 : fp_pass_prefetch(run->order[next]);
}

void
fp_pass_leave(fp_unit *step)
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

/* ---- forward ---- */

static int
check_joined(const fp_unit *step)
{
    if (step->run == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%U is not part of a run yet: call the wrapped module, not its parts",
                     step->name);
        return -1;
    }
    return 0;
}

/* Whether another thread than this is in the model. */
static int
is_elsewhere(const fp_root *run)
{
    return run->in_backward ? fp_graph_is_running(run->ref) && !fp_graph_is_within(fp_graph_backward(), run->backward)
                            : run->depth > 0 && run->thread != PyThread_get_thread_ident();
}

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
        if (stale != NULL && stale->stale && fp_pass_start_gather(stale) < 0) {
            return -1;
        }
    }
    fp_unit *next = step->next_forward;
    return next == NULL || next->stale || is_fresh(next) ? 0 : fp_pass_start_gather(next);
}

static void
refuse_thread(const fp_unit *step)
{
    PyErr_Format(PyExc_RuntimeError,
                 "%U: another thread is in a forward or backward of this model. One thread at a time: gathers and "
                 "reductions of two would come in another order on each rank",
                 step->name);
}

/* One thread at a time works on the units in a backward: autograd has a thread for each device. */
static void
enter(fp_root *run)
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

static void
leave(fp_root *run)
{
    if (--run->held == 0) {
        PyThread_release_lock(run->lock);
    }
    Py_DECREF(run);
}

/* The same for forwards, which matter where one is recomputed. NULL: nothing is locked. */
static fp_root *
lock_in_backward(fp_root *run)
{
    if (!run->in_backward) {
        return NULL;
    }
    enter(run);
    return run;
}

static void
unlock(fp_root *locked)
{
    if (locked != NULL) {
        leave(locked);
    }
}

static PyObject *
pre_forward(fp_unit *step)
{
    fp_root *run = step->run;
    if (is_elsewhere(run)) {
        refuse_thread(step);
        return NULL;
    }
    if (run->in_backward && !fp_graph_is_running(run->ref) && fp_pass_recover(run) < 0) { /* an exception ended it */
        return NULL;
    }
    if (run->depth == 0 && !run->in_backward && begin_pass(run) < 0) {
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
    if (make_full(step) < 0) {
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
    PyObject *units = fp_pass_units(run);
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
fp_pass_pre_forward(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    if (check_joined(step) < 0) {
        return NULL;
    }
    fp_root *locked = lock_in_backward(step->run);
    PyObject *result = pre_forward(step);
    unlock(locked);
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
    if (take_requires_grad(step) < 0 || (step->depth == 0 && take_written_in_forward(step) < 0)) {
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
        if (append_order(run, step) < 0) {
            return NULL;
        }
    }
    if (run->depth == 0 && wait_until_read(run) < 0) {
        return NULL;
    }
    if (step->depth > 0) {
        return Py_NewRef(output);
    }
    const int stays = hooked && (run->depth == 0 || !step->reshard_after_forward);
    if (!stays && fp_pass_release(step) < 0) {
        return NULL;
    }
    if ((!stays || step->reshard_after_forward || !step->sharded) && fp_pass_show_params(step) < 0) {
        return NULL;
    }
    if (run->depth == 0 && list_params(run) < 0) {
        return NULL;
    }
    return Py_NewRef(output);
}

PyObject *
fp_pass_post_forward(PyObject *self, PyObject *output)
{
    fp_unit *step = (fp_unit *)self;
    if (check_joined(step) < 0) {
        return NULL;
    }
    if (step->depth == 0) {
        PyErr_Format(PyExc_RuntimeError, "%U: post_forward without pre_forward", step->name);
        return NULL;
    }
    fp_root *locked = lock_in_backward(step->run);
    step->depth--;
    step->run->depth--;
    PyObject *result = post_forward(step, output);
    if (result == NULL) { /* abort_forward counts it down */
        step->depth++;
        step->run->depth++;
    }
    unlock(locked);
    return result;
}

/* A forward with inputs that require grad begins. True if inputs_done is to be called when they have it. */
PyObject *
fp_pass_expect_inputs(PyObject *self, PyObject *ignored)
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
fp_pass_inputs_done(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    step->pending -= step->pending > 0;
    if (step->pending > 0 || step->run == NULL || !step->run->in_backward || step->depth > 0 ||
        !(step->run->synchronize || step->reshard_after_forward) || is_elsewhere(step->run)) {
        Py_RETURN_NONE;
    }
    fp_root *locked = lock_in_backward(step->run);
    int status = 0;
    for (Py_ssize_t k = 0; status == 0 && k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (part->untracked) {
            status = fp_pass_release_part(step, part) < 0 || fp_flat_param_show_params(part) < 0 ? -1 : 0;
        }
    }
    unlock(locked);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *
fp_pass_abort_forward(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    fp_root *run = step->run;
    if (run != NULL && is_elsewhere(run)) {
        Py_RETURN_NONE; /* it was refused */
    }
    if (run != NULL && step->depth > 0) {
        step->depth--;
        run->depth--;
    }
    if (run != NULL && !run->in_backward && run->depth == 0 && fp_pass_recover(run) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- backward ---- */

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
    if (is_elsewhere(run) && (run->in_backward || !is_of_autograd())) {
        refuse_thread(step);
        return -1;
    }
    if (run->in_backward && fp_graph_is_running(run->ref)) {
        return 0;
    }
    if (run->in_backward && fp_pass_recover(run) < 0) { /* an exception ended the one before */
        return -1;
    }
    if (fp_graph_at_end(run->ref) < 0) {
        return -1;
    }
    run->in_backward = 1;
    run->backward = fp_graph_backward();
    return fp_reduce_order_begin(run);
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
    if (check_unchanged(step) < 0 || make_full(step) < 0 || fp_reduce_order_bring_back(run) < 0) {
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
    if (check_joined(step) < 0) {
        return -1;
    }
    Py_INCREF(step);
    fp_root *run = step->run;
    enter(run);
    fp_range *range = fp_range_begin("pre_backward", step->name);
    const int status = before_backward_of(step, began);
    fp_range_end(range);
    leave(run);
    Py_DECREF(step);
    return status;
}

static int
take_reduced(fp_unit *step, fp_flat_param *part)
{
    PyObject *grad = fp_flat_buffer_take(part->flat, part->master, fp_pass_collectives(step));
    int status = grad == NULL ? -1 : 0;
    if (status == 0 && grad != Py_None) {
        status = fp_flat_param_add_reduced(part, grad);
        if (status == 0 && step->reduced != NULL && step->reduced != Py_None) {
            PyObject *result = PyObject_CallFunction(step->reduced, "n", (Py_ssize_t)(part - step->parts));
            status = result == NULL ? -1 : 0;
            Py_XDECREF(result);
        }
    }
    Py_XDECREF(grad);
    return status;
}

/* Start the second half of a unit's reductions, or take what they have given. */
static int
advance(fp_unit *step)
{
    int status = 0;
    Py_XINCREF(step);
    for (Py_ssize_t k = 0; step != NULL && status == 0 && k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        const int done = fp_flat_buffer_advance(part->flat, part->master, fp_pass_collectives(step));
        status = done > 0 ? take_reduced(step, part) : done;
    }
    Py_XDECREF(step);
    return status;
}

/* The same for the units whose reductions were started before this one's. */
static int
advance_previous(fp_unit *step)
{
    fp_root *run = step->run;
    if (run->reducing == NULL || run->reducing == step) {
        return 0;
    }
    return (run->halfway != step && advance(run->halfway) < 0) || advance(run->reducing) < 0 ? -1 : 0;
}

int
fp_pass_reduce(fp_unit *step, fp_flat_param *part, const fp_gradients *gradients, int how_far)
{
    fp_root *run = step->run;
    part->deferred = 0;
    fp_flat_buffer_note_trained(part->flat, fp_flat_param_items(part->owners), PyTuple_GET_SIZE(part->owners));
    if (take_reduced(step, part) < 0 || /* of another graph in this pass */
        (how_far == FP_REDUCE_OUTER &&
         (advance_previous(step) < 0 || advance(step) < 0)) || /* they go over the same group */
        fp_flat_buffer_reduce(part->flat, gradients, part->master, fp_pass_collectives(step), how_far) < 0 ||
        advance_previous(step) < 0) {
        return -1;
    }
    run->reductions++;
    if (run->reducing != step) {
        run->halfway = run->reducing;
        run->reducing = step;
    }
    return 0;
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
        if (fp_pass_release_part(step, part) < 0 || fp_flat_param_show_params(part) < 0) {
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
        return take_reduced(step, part) < 0 || fp_flat_buffer_pack(part->flat, gradients, part->master) < 0
                   ? -1
                   : fp_reduce_order_flush(run, run->cursor);
    }
    part->passed = 1;
    return fp_pass_reduce(step, part, gradients, run->synchronize ? FP_REDUCE_ALL : FP_REDUCE_INNER);
}

static int
gradients_ready(void *unit, int index, fp_gradients *gradients)
{
    fp_unit *step = unit;
    if (check_joined(step) < 0) {
        return -1;
    }
    Py_INCREF(step);
    fp_root *run = step->run;
    enter(run);
    fp_range *range = fp_range_begin("post_backward", step->name);
    const int status = gradients_ready_of(step, &step->parts[index], gradients);
    fp_range_end(range);
    leave(run);
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
    enter(run);
    const int status =
        begin_backward(step) < 0 || fp_flat_param_read_kept(part, PyUnicode_AsUTF8(step->name)) < 0 ? -1 : 0;
    leave(run);
    Py_DECREF(step);
    return status;
}

static int
finish_step(fp_unit *step)
{
    fp_root *run = step->run;
    rest(step);
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (take_reduced(step, part) < 0) {
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
            (fp_pass_reduce(step, part, NULL, run->synchronize ? FP_REDUCE_ALL : FP_REDUCE_INNER) < 0 ||
             take_reduced(step, part) < 0)) {
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
        step->kept_steps = fp_pass_optimizer_steps;
    }
    else if ((step->gathering || is_partly_full(step)) && fp_pass_release(step) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; run->synchronize && k < step->n_parts; k++) { /* the optimizer steps next */
        const fp_flat_param *part = &step->parts[k]; /* whose masters may be written in ways that no version tells of */
        if (part->copied && !part->untracked && fp_flat_buffer_forget_values(part->flat) < 0) {
            return -1;
        }
    }
    return fp_pass_show_params(step) < 0 ? -1 : take_requires_grad(step);
}

static int
finish(void *run_pointer, uint64_t ignored)
{
    fp_root *run = run_pointer;
    enter(run);
    int status = fp_reduce_order_end(run);
    PyObject *units = status == 0 ? fp_pass_units(run) : NULL;
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
        status = wait_until_read(run); /* else the recovery does */
    }
    if (status == 0) {
        run->in_backward = 0;
    }
    leave(run);
    return status;
}

const fp_module_params_calls fp_pass_unit_calls = {
    .before_backward = before_backward, .gradients_ready = gradients_ready, .before_accumulation = before_accumulation};
const fp_module_params_calls fp_pass_root_calls = {
    .before_backward = finish, .gradients_ready = NULL, .before_accumulation = NULL};
