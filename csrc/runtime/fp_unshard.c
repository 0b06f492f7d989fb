/* runtime/fp_unshard.c -- the unsharded data of a unit: its views, its gathers, what users write to it, its end; see
 * fp_unshard.h.
 *
 * The gathered data is valid for one iteration: an optimizer may step after it. fp_fresh.c lists the cases in which it is
 * valid for longer. */
#include "runtime/fp_unshard.h"

#include "core/fp_alloc.h"
#include "runtime/fp_check.h"
#include "runtime/fp_fresh.h"
#include "runtime/fp_members.h"

int
fp_unshard_move(fp_unit *unit, fp_unit_event event)
{
    unsigned next;
    FP_TRY(fp_unit_next(unit, &fp_unit_moves, unit->state, event, &next));
    unit->state = next;
    return 0;
}

static const char *
freed_reason(const fp_unit *unit)
{
    PyObject *reason = unit->opaque != NULL ? unit->opaque : unit->reason;
    return reason == NULL ? NULL : PyUnicode_AsUTF8(reason); /* does not fail: fp_as_text() has made each */
}

/* Make the views of flat parameter number index. made: 1: its unsharded tensor is new, so views are made in any case; 0:
 * only if requires_grad of the owners has changed since; -1: an error, which is passed on. */
static int
make_views(fp_unit *unit, Py_ssize_t index, int made)
{
    fp_flat_param *flat_param = &unit->flat_params[index];
    FP_TRY(made);
    FP_TRY(fp_flat_param_take_requires_grad(flat_param, unit->name));
    const int same = made == 0 && flat_param->views != NULL;
    int untracked = flat_param->leaf == NULL || !fp_param_requires_grad(flat_param->leaf);
    for (Py_ssize_t i = 0; flat_param->leaf == NULL && i < flat_param->owners.n; i++) {
        untracked = untracked && !fp_param_requires_grad(flat_param->owners.params[i]);
    }
    if (same && untracked == fp_flat_param_is_untracked(flat_param)) {
        return 0;
    }
    if (!untracked && fp_flat_buffer_has_full_precision(flat_param->flat) && fp_param_is_low(flat_param->shard)) {
        return fp_raise(
            PyExc_ValueError,
            "%U: parameters that were frozen when it was wrapped, of a low precision, require grad now, and "
            "their gradients would be added in it: build those that are to train in torch.float32",
            unit->name);
    }
    PyObject *views = PyTuple_New(flat_param->attributes.n); /* its items are set at once */
    if (views == NULL || fp_flat_buffer_views(flat_param->flat, unit->ref, (int)index, untracked, flat_param->leaf,
                                              &PyTuple_GET_ITEM(views, 0)) < 0) {
        Py_XDECREF(views);
        return -1;
    }
    if (flat_param->dress != NULL && fp_drop_result(PyObject_CallOneArg(flat_param->dress, views)) < 0) {
        Py_DECREF(views);
        return -1;
    }
    Py_XSETREF(flat_param->views, views);
    flat_param->holders = INT64_MAX;
    return flat_param->shows != FP_SHOWS_PARAMS || flat_param->params == NULL ? fp_flat_param_show(flat_param, 1) : 0;
}

int
fp_unshard_make_views(fp_unit *unit, Py_ssize_t index)
{
    const fp_flat_param *flat_param = &unit->flat_params[index];
    return make_views(unit, index, fp_flat_buffer_prepare(flat_param->flat, flat_param->shard, freed_reason(unit)));
}

/* Before a gather: if a user holds the memory (NumPy, DLPack), leave it and its values alone, and make new memory and
 * views. Not if a graph needs the old memory. changed: 1: the shard has other values than at the gather before. */
static int
renew(fp_unit *unit, Py_ssize_t index, int changed)
{
    const int renewed = fp_root_in_backward(unit->root) || (!changed && fp_unit_awaits_backward(unit))
                            ? 0
                            : fp_flat_buffer_renew(unit->flat_params[index].flat, freed_reason(unit));
    return renewed > 0 ? make_views(unit, index, renewed) : renewed;
}

int
fp_unshard_sync_user_writes(fp_unit *unit)
{
    int any = 0, written = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        const int taken = fp_flat_param_take_written(flat_param, unit->name, 1);
        const Py_ssize_t moved = taken < 0 ? -1 : fp_flat_param_find_moved(flat_param);
        FP_TRY(moved);
        written = written || taken;
        any = any || moved < flat_param->attributes.n;
    }
    if (!any) {
        return written;
    }
    return fp_drop_result(PyObject_CallNoArgs(unit->on_param_replaced)) < 0 ? -1 : 1;
}

/* -1 with StateError that names the i-th parameter. what: the end of the sentence. */
static int
refuse_moved(const fp_unit *unit, const fp_flat_param *flat_param, Py_ssize_t i, const char *what)
{
    PyObject *type = fp_get_state(PyType_GetModule(Py_TYPE(unit)))->StateError;
    return fp_raise(type, "%U: parameter `%U` of a %.200s %s", unit->name, flat_param->attributes.items[i].name,
                    Py_TYPE(flat_param->attributes.items[i].module)->tp_name, what);
}

int
fp_unshard_take_written_in_forward(fp_unit *unit)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        const int64_t versions = fp_flat_param_versions(flat_param);
        const int written = fp_flat_param_take_written(flat_param, unit->name, 0);
        FP_TRY(written);
        if (written) {
            flat_param->versions += fp_flat_param_versions(flat_param) - versions;
        }
        const Py_ssize_t other = fp_flat_param_find_other(flat_param);
        FP_TRY(other);
        if (other < flat_param->attributes.n) {
            if (fp_flat_param_show(flat_param, 1) == 0) {
                refuse_moved(unit, flat_param, other,
                             "was replaced by another object in its forward, whose gradient nobody would reduce; it is "
                             "as before: replace it between steps, or set its .data");
            }
            return -1;
        }
    }
    return 0;
}

static const char changed_between[] =
    "and those that are flattened with it were modified by an inplace operation, an optimizer's step or a loaded "
    "state dict, between forward and backward, which needs the weights of the forward: step, load and write after "
    "the backward. FSDP does not support changing the parameters between forward and backward";

int
fp_unshard_check_unchanged(fp_unit *unit)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        if (flat_param->views == NULL) {
            continue;
        }
        const Py_ssize_t in_views = fp_flat_buffer_moved_view(flat_param->flat, fp_items(flat_param->views));
        const Py_ssize_t moved = in_views >= 0 ? in_views : fp_flat_param_find_moved(flat_param);
        FP_TRY(moved);
        if (moved < flat_param->attributes.n) {
            return refuse_moved(unit, flat_param, moved,
                                "was replaced, or given other data, between forward and backward, which has to come to "
                                "the weights of the forward: change it after the backward. FSDP does not support "
                                "changing the parameters between forward and backward");
        }
        if (fp_flat_buffer_is_changed(flat_param->flat) && fp_flat_param_take_written(flat_param, unit->name, 0) < 0) {
            return -1; /* is_changed is asked first, as taking looks at the data of all views */
        }
        const int64_t versions = fp_flat_param_versions(flat_param);
        if (versions != flat_param->versions) {
            /* A graph has saved some views, so autograd would refuse it with a message that names no parameter. */
            if (fp_flat_buffer_holders(flat_param->flat, fp_items(flat_param->views)) > flat_param->holders) {
                return refuse_moved(unit, flat_param, 0, changed_between);
            }
            FP_TRY(fp_flat_param_refuse_graphs(flat_param));
            flat_param->versions = versions;
        }
    }
    return 0;
}

int
fp_unshard_check_memory(const fp_unit *unit)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        int64_t present, needed;
        const int lacks =
            fp_flat_buffer_lacks_memory(unit->flat_params[k].flat, unit->flat_params[k].shard, &present, &needed);
        if (lacks > 0) {
            PyErr_Format(
                PyExc_ValueError,
                "%U: the storage of its parameters has %lld bytes of %lld: it was freed or resized outside of "
                "flatparam, and their values are lost. Leave storages as they are, or load a state dict into a "
                "model that is wrapped anew",
                unit->name, (long long)present, (long long)needed);
        }
        if (lacks != 0) {
            return -1;
        }
    }
    return 0;
}

/* Start the gathers of the flat parameters that need one. *gathered becomes 1 if one does. goes_on: 1: flat parameters that are
 * gathered stay as they are. */
static int
gather_each(fp_unit *unit, int goes_on, int *gathered)
{
    fp_root *root = unit->root;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        FP_TRY(fp_unshard_make_views(unit, k));
        if (goes_on && flat_param->gathered) {
            continue;
        }
        flat_param->gathered = 0;
        const int refresh = !fp_flat_param_has_secondary_shard(flat_param) ||
                            (unit->stale == FP_STALE_YES && !fp_root_in_backward(root));
        if (!refresh && fp_flat_buffer_is_gathered(flat_param->flat)) {
            flat_param->gathered = 1;
            continue; /* it stays gathered, and its values are current */
        }
        const int64_t versions = fp_flat_param_versions(flat_param);
        const int changed = versions != flat_param->versions;
        FP_TRY(renew(unit, k, changed));
        if (changed && flat_param->extension != NULL) {
            FP_TRY(fp_flat_param_refuse_graphs(flat_param));
        }
        const int from_shards =
            fp_flat_buffer_gather(flat_param->flat, flat_param->shard, fp_items(flat_param->views),
                                  fp_unit_collectives(unit), changed, refresh, goes_on, freed_reason(unit));
        FP_TRY(from_shards);
        if (from_shards) {
            flat_param->synced = versions;
            flat_param->synced_steps = fp_optimizer_steps;
            root->counts[FP_COUNT_REFRESHES] += k == 0 && fp_unit_has_secondary_shard(unit);
        }
        flat_param->versions = versions;
        flat_param->gathered = 1;
        *gathered = 1;
    }
    return 0;
}

/* The same, in one call of the group's backend if it can join the gathers of several flat parameters. */
static int
gather_together(fp_unit *unit, int goes_on, int *gathered)
{
    const int together = fp_unit_begin_together(unit, FP_JOIN_GATHERS);
    const int status = together < 0 ? -1 : gather_each(unit, goes_on, gathered);
    return together > 0 ? fp_unit_end_together(unit, FP_JOIN_GATHERS, status) : status;
}

/* joined: 1: the caller joins the gathers of several units. */
static int
start_gather(fp_unit *unit, int joined)
{
    fp_root *root = unit->root;
    int gathered = 0;
    FP_TRY(fp_unshard_check_memory(unit));
    if (!fp_root_in_backward(root)) { /* a question before the forward has synchronized them */
        const int was_asked = fp_unit_has_secondary_shard(unit) ? fp_members_has(unit) : 0;
        if (was_asked <= 0 && (was_asked < 0 || fp_unshard_sync_user_writes(unit) < 0)) {
            return -1;
        }
    }
    /* Data that was gathered in the capture of a CUDA graph has values in a replay only, and the graph owns its memory. */
    if (fp_fresh_is_void(unit)) {
        FP_TRY(fp_unshard_release(unit));
    }
    /* 1: the flat parameters that are gathered have current values: the others were freed, or their gathers failed. */
    const int goes_on = fp_root_in_backward(root) || (unit->state == FP_UNIT_PARTLY && unit->gather_pass == root->pass);
    FP_TRY(fp_unshard_move(unit, FP_UNIT_BEGIN_GATHER));
    unit->gather_pass = root->pass;
    unit->data_steps = fp_optimizer_steps;
    unit->gather_steps = root->optimizer_steps;
    FP_TRY(joined ? gather_each(unit, goes_on, &gathered) : gather_together(unit, goes_on, &gathered));
    FP_TRY(fp_unshard_move(unit, FP_UNIT_END_START)); /* fails if code of the user has freed it meanwhile */
    unit->stale = unit->stale == FP_STALE_NO ? FP_STALE_NO : FP_STALE_GATHERED;
    unit->suspect = unit->suspect && fp_unit_has_secondary_shard(unit);
    root->counts[FP_COUNT_GATHERS] += gathered && fp_unit_is_sharded(unit);
    fp_unit_check(unit, "start_gather");
    return 0;
}

int
fp_unshard_start(fp_unit *unit)
{
    Py_INCREF(unit); /* code of the user may run, and some callers have a borrowed pointer from a list of the root */
    const int status = start_gather(unit, 0);
    Py_DECREF(unit);
    return status;
}

/* ---- small units, gathered as one ----
 *
 * Where forward would gather one unit ahead that is small, the small units after it are gathered with it: by the same
 * order (next_forward) and under the same conditions, so ranks decide alike. Not in backward: gradients may come to other
 * units on other ranks, which would begin other groups. Each unit keeps its state, its views and its flat parameters, and is
 * freed by itself. Gradients are reduced unit by unit: a sum over more than two ranks of gloo depends on the place in the
 * buffer. */

static int64_t
unsharded_bytes(const fp_unit *unit)
{
    int64_t bytes = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        bytes += fp_flat_buffer_gathered_bytes(unit->flat_params[k].flat);
    }
    return bytes;
}

int
fp_unshard_is_small(const fp_unit *unit)
{
    const int64_t least = unit->root->min_unit_bytes;
    return least > 0 && fp_unit_is_sharded(unit) && !fp_unit_has_secondary_shard(unit) && unsharded_bytes(unit) < least;
}

/* Find the units to gather with group[0], and return how many they are together; -1. */
static Py_ssize_t
find_together(fp_unit **group, int (*find_next)(const fp_unit *unit, fp_unit **next))
{
    Py_ssize_t n = 1;
    int64_t bytes = unsharded_bytes(group[0]);
    while (n < FP_MOST_TOGETHER && bytes < group[0]->root->min_unit_bytes) {
        fp_unit *next;
        FP_TRY(find_next(group[n - 1], &next));
        if (next == NULL || !fp_unshard_is_small(next)) {
            return n;
        }
        for (Py_ssize_t i = 0; i < n; i++) {
            if (group[i] == next) {
                return n;
            }
        }
        const int fits = fp_flat_buffers_fit(group[0]->flat_params[0].flat, next->flat_params[0].flat);
        if (fits <= 0) {
            return fits < 0 ? -1 : n;
        }
        bytes += unsharded_bytes(next);
        group[n++] = next;
    }
    return n;
}

/* Start the gathers of units whose n_flats flat buffers are flats. packs: fp_flat_buffers_begin_pack() has begun. */
static int
start_each(fp_unit *const *group, Py_ssize_t n, fp_flat_buffer *const *flats, Py_ssize_t n_flats, int packs)
{
    PyObject *collectives = fp_unit_collectives(group[0]), *shard = group[0]->flat_params[0].shard;
    const int joins = packs || collectives != NULL ? 0 : fp_flat_buffers_begin(flats, n_flats, shard, FP_JOIN_GATHERS);
    int status = joins < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        status = start_gather(group[i], packs || joins);
    }
    if (packs) {
        return fp_flat_buffers_gather_pack(flats, n_flats, collectives, status < 0);
    }
    PyObject *error = status < 0 ? PyErr_GetRaisedException() : NULL;
    const int ended = joins > 0 ? fp_flat_buffers_end(flats, n_flats, shard, FP_JOIN_GATHERS) : 0;
    if (error != NULL) {
        PyErr_SetRaisedException(error);
    }
    return ended < 0 ? -1 : status;
}

/* The gather of the group has not begun: the flat parameters that were packed for it are not gathered. */
static void
note_failed(fp_unit *unit)
{
    int failed = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        if (flat_param->gathered && !fp_flat_buffer_is_gathered(flat_param->flat)) {
            flat_param->gathered = 0;
            failed = 1;
        }
    }
    if (failed && unit->state == FP_UNIT_GATHERING) {
        (void)fp_unshard_move(unit, FP_UNIT_FAIL); /* legal in this state */
    }
}

static int
start_together(fp_unit *const *group, Py_ssize_t n)
{
    Py_ssize_t n_flats = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        n_flats += group[i]->n_flat_params;
    }
    fp_flat_buffer **flats = fp_new_array(n_flats, sizeof *flats);
    FP_NEED(flats);
    n_flats = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        for (Py_ssize_t k = 0; k < group[i]->n_flat_params; k++) {
            flats[n_flats++] = group[i]->flat_params[k].flat;
        }
    }
    const int status = start_each(group, n, flats, n_flats, fp_flat_buffers_begin_pack(flats, n_flats));
    fp_free(flats);
    for (Py_ssize_t i = 0; status < 0 && i < n; i++) {
        note_failed(group[i]);
    }
    return status;
}

int
fp_unshard_start_small(fp_unit *first, int (*find_next)(const fp_unit *unit, fp_unit **next))
{
    if (!fp_unshard_is_small(first)) {
        return fp_unshard_start(first);
    }
    fp_unit *group[FP_MOST_TOGETHER] = {first};
    const Py_ssize_t n = find_together(group, find_next);
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_INCREF(group[i]); /* code of the user may run */
    }
    const int status = n < 0 ? -1 : n == 1 ? start_gather(first, 0) : start_together(group, n);
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_DECREF(group[i]);
    }
    return status;
}

int
fp_unshard_is_for_graph(const fp_unit *unit)
{
    const fp_phase phase = unit->root->phase;
    return phase == FP_PHASE_RECORDS || (phase == FP_PHASE_RETAINS && unit->for_graph);
}

int
fp_unshard_make_full(fp_unit *unit)
{
    const int fresh = fp_fresh_is_of_now(unit);
    FP_TRY(fresh);
    const int is_ahead = fresh && unit->state == FP_UNIT_GATHERING && !fp_root_in_backward(unit->root) &&
                         !fp_unit_has_secondary_shard(unit);
    if (is_ahead && fp_unit_is_sharded(unit)) {
        FP_TRY(fp_fresh_check_ahead(unit));
    }
    if (!fresh) {
        FP_TRY(fp_unshard_start(unit));
    }
    FP_TRY(fp_unshard_move(unit, FP_UNIT_USE));
    unit->gather_pass = unit->root->pass;
    if (unit->state == FP_UNIT_UNSHARDED) {
        return 0;
    }
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        if (fp_flat_buffer_wait(flat_param->flat) < 0) {
            if (!fp_flat_buffer_is_gathered(flat_param->flat)) {
                PyObject *error = PyErr_GetRaisedException();
                flat_param->gathered = 0;
                if (fp_unshard_move(unit, FP_UNIT_FAIL) < 0) { /* code that ran in the wait has freed it */
                    PyErr_Clear();
                }
                PyErr_SetRaisedException(error);
            }
            return -1; /* the next call waits again, or gathers again if the gather failed */
        }
    }
    return fp_unshard_move(unit, FP_UNIT_ARRIVE);
}

static int
is_gathered(fp_flat_param *flat_param)
{
    return flat_param->gathered;
}

int
fp_unshard_release_part(fp_unit *unit, fp_flat_param *flat_param)
{
    PyObject *const *views = flat_param->views == NULL ? NULL : fp_items(flat_param->views);
    const int status = fp_flat_buffer_release(flat_param->flat, views, freed_reason(unit));
    if (status < 0 && fp_flat_buffer_is_gathered(flat_param->flat)) {
        return -1; /* the wait was interrupted: nothing has changed */
    }
    flat_param->gathered = 0;
    const fp_unit_event event = fp_unit_each(unit, is_gathered) ? FP_UNIT_FREE_SOME : FP_UNIT_FREE;
    FP_TRY(fp_unshard_move(unit, event));
    fp_unit_check(unit, "release");
    return status; /* -1 where its gather has failed */
}

int
fp_unshard_release(fp_unit *unit)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        FP_TRY(fp_unshard_release_part(unit, &unit->flat_params[k]));
    }
    return fp_unshard_move(unit, FP_UNIT_FREE);
}

int
fp_unshard_hide_old(fp_unit *unit)
{
    /* Not KEPT: the graph that needs the data is refused with another message. */
    const int is_free = unit->root != NULL && !fp_root_in_backward(unit->root) && !fp_unit_is_in_forward(unit) &&
                        (unit->state == FP_UNIT_SHARDED || unit->state == FP_UNIT_UNSHARDED);
    for (Py_ssize_t k = 0; is_free && k < unit->n_flat_params; k++) {
        const fp_flat_param *flat_param = &unit->flat_params[k];
        if (!fp_flat_param_stays_full(flat_param) || flat_param->synced == fp_flat_param_versions(flat_param)) {
            continue;
        }
        if (unit->state == FP_UNIT_SHARDED) {
            FP_TRY(renew(unit, k, 1));
        }
        FP_TRY(fp_flat_buffer_hide(flat_param->flat, freed_reason(unit)));
    }
    return 0;
}

int
fp_unshard_keep(fp_unit *unit, int64_t steps)
{
    unit->data_steps = steps;
    FP_TRY(fp_unshard_move(unit, steps >= 0 ? FP_UNIT_KEEP : FP_UNIT_KEEP_FOR_GRAPH));
    fp_unit_check(unit, "keep");
    return 0;
}

int
fp_unshard_end_forward(fp_unit *unit, int awaits_backward)
{
    if (!awaits_backward) {
        FP_TRY(unit->for_graph ? fp_unshard_keep(unit, -1) : fp_unshard_release(unit));
    }
    if (awaits_backward && !unit->reshard_after_forward && fp_unit_is_sharded(unit)) {
        return 0;
    }
    return unit->for_graph ? fp_unit_each(unit, fp_flat_param_list_params) : fp_unshard_show_params(unit);
}

int
fp_unshard_frees_passed(const fp_unit *unit)
{
    return !fp_unshard_is_for_graph(unit) && (fp_root_synchronizes(unit->root) || unit->reshard_after_forward);
}

int
fp_unshard_pass(fp_unit *unit, fp_flat_param *flat_param)
{
    if (!fp_unshard_frees_passed(unit)) {
        return 0;
    }
    if (fp_root_synchronizes(unit->root) && fp_flat_param_plan(flat_param)->secondary.group != NULL &&
        fp_flat_buffer_forget_gathered(flat_param->flat) < 0) {
        return -1;
    }
    FP_TRY(fp_unshard_release_part(unit, flat_param));
    return fp_flat_param_show_params(flat_param);
}

int
fp_unshard_show_params(fp_unit *unit)
{
    return fp_unit_each(unit, fp_flat_param_show_params);
}

int
fp_unshard_take_requires_grad(fp_unit *unit)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        FP_TRY(fp_flat_param_take_requires_grad(&unit->flat_params[k], unit->name));
    }
    return 0;
}

int
fp_unshard_prefetch(fp_unit *target)
{
    const int fresh = fp_fresh_is_of_now(target);
    FP_TRY(fresh);
    if (fresh || !fp_unit_awaits_backward(target) ||
        fp_unit_is_recorded(target)) { /* nodes of a recorded graph would read it before it is gathered */
        return 0;
    }
    return fp_unshard_start(target);
}
