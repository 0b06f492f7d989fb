/* runtime/fp_unshard.c -- the unsharded data of a unit: made views of, gathered, checked for what users did to them, freed.
 *
 * What was gathered in an iteration is good for that one only: the optimizer may have stepped since. Where there is a copy (a
 * flat parameter that is `copied`), it is good until the masters change. */
#include "runtime/fp_unshard.h"

#include "core/fp_alloc.h"

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
fp_unshard_make_views(fp_unit *step, Py_ssize_t index)
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
fp_unshard_look_over(fp_unit *step)
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
int
fp_unshard_take_written_in_forward(fp_unit *step)
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
int
fp_unshard_check_unchanged(fp_unit *step)
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
    if (!run->in_backward && !step->copied && fp_unshard_look_over(step) < 0) {
        return -1;
    }
    /* Only others were freed since, or could not be gathered when this was last tried. */
    const int goes_on = run->in_backward || (step->gathering && step->full_pass == run->pass);
    step->gathering = 1;
    step->full = 0;
    step->full_pass = run->pass;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if (fp_unshard_make_views(step, k) < 0) {
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
            fp_flat_buffer_gather(part->flat, part->master, fp_flat_param_items(part->views), fp_unit_collectives(step),
                                  versions != part->versions, refresh, goes_on);
        if (from_shards < 0) {
            return -1;
        }
        if (from_shards) {
            part->synced = versions;
            part->synced_steps = fp_optimizer_steps;
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
fp_unshard_start(fp_unit *step)
{
    Py_INCREF(step); /* looking for moved parameters may run code, and some callers have it from a list of the run's */
    const int status = start_gather(step);
    Py_DECREF(step);
    return status;
}

/* Whether what is gathered has the values of now. */
int
fp_unshard_is_fresh(const fp_unit *step)
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
    int fresh = step->keep && step->kept_steps == fp_optimizer_steps;
    for (Py_ssize_t k = 0; fresh && k < step->n_parts; k++) {
        fresh = fp_flat_param_is_as_gathered(&step->parts[k]);
    }
    return fresh;
}

int
fp_unshard_make_full(fp_unit *step)
{
    if (!fp_unshard_is_fresh(step) && fp_unshard_start(step) < 0) {
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
fp_unshard_release_part(fp_unit *step, fp_flat_param *part)
{
    part->full = step->full = 0;
    return fp_flat_buffer_release(part->flat, part->views == NULL ? NULL : fp_flat_param_items(part->views),
                                  freed_reason(step));
}

int
fp_unshard_release(fp_unit *step)
{
    step->full = step->gathering = step->keep = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_unshard_release_part(step, &step->parts[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fp_unshard_is_partly_full(const fp_unit *step)
{
    int full = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        full = full || step->parts[k].full;
    }
    return full;
}

int
fp_unshard_show_params(fp_unit *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_flat_param_show_params(&step->parts[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fp_unshard_take_requires_grad(fp_unit *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_flat_param_take_requires_grad(&step->parts[k], step->name) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fp_unshard_prefetch(fp_unit *target)
{
    return target->full || !target->awaits_backward ? 0 : fp_unshard_start(target);
}
