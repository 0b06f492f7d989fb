/* runtime/fp_flat_param.c -- one flat parameter: the attributes of its modules, .grad of its owners; see fp_flat_param.h. */
#include "runtime/fp_flat_param.h"

#include <string.h>

#include "core/fp_alloc.h"
#include "tensor/fp_shards.h"

int64_t fp_flat_param_not_steppable;

/* Nested: this rank's accumulated gradient is a range of the unsharded one. Its first element in that. */
static int64_t
accumulated_first(const fp_flat_param *flat_param)
{
    const fp_flat_buffer_plan *plan = fp_flat_param_plan(flat_param);
    return plan->secondary.rank * (plan->primary.n / plan->secondary.n * plan->shard_numel);
}

/* The first element of this rank's shard in that range. */
static int64_t
own_first(const fp_flat_param *flat_param)
{
    return fp_flat_param_plan(flat_param)->primary.rank * fp_flat_param_plan(flat_param)->shard_numel -
           accumulated_first(flat_param);
}

/* ---- the attributes of modules, and .grad ---- */

static int
is_not_steppable(const fp_flat_param *flat_param)
{
    return flat_param->shown == FP_SHOWN_ACCUMULATED_WIDE || flat_param->shown == FP_SHOWN_UNREDUCED;
}

/* The only way to another fp_shown_state. Counts fp_flat_param_not_steppable. */
static int
move_shown(fp_flat_param *flat_param, fp_shown_event event, const char *name)
{
    const int was_not_steppable = is_not_steppable(flat_param);
    unsigned next;
    if (fp_state_next(&fp_shown_moves, flat_param->shown, event, &next) != FP_OK) {
        char text[FP_STATE_MESSAGE_BYTES];
        fp_state_message(&fp_shown_moves, flat_param->shown, event, text, sizeof text);
        return fp_raise(PyExc_RuntimeError, "%s: %s", name, text);
    }
    flat_param->shown = next;
    fp_flat_param_not_steppable += is_not_steppable(flat_param) - was_not_steppable;
    return 0;
}

/* The event for showing the accumulated gradient. Where nothing is sharded an optimizer may step with it, if it has the
 * dtype of the parameters and no reduced gradient was put aside. */
static fp_shown_event
event_of_showing(const fp_flat_param *flat_param)
{
    if (fp_flat_param_plan(flat_param)->primary.group != NULL || flat_param->aside.deferred_reduced != NULL) {
        return FP_SHOWN_SHOW_UNREDUCED;
    }
    return fp_param_is_low(flat_param->shard) ? FP_SHOWN_SHOW_WIDE : FP_SHOWN_SHOW_ACCUMULATED;
}

PyObject *
fp_flat_param_attributes(const fp_flat_param *flat_param)
{
    return flat_param->extended != NULL ? flat_param->extended : flat_param->views;
}

/* Let the extension make new tensors from the views. */
static int
extend_views(fp_flat_param *flat_param)
{
    PyObject *made = PyObject_CallOneArg(flat_param->extension, flat_param->views);
    int status = made == NULL ? -1 : 0;
    if (status == 0 && (!PyTuple_Check(made) || PyTuple_GET_SIZE(made) != flat_param->attributes.n)) {
        PyErr_Format(PyExc_TypeError, "expected an extension to give a tuple of %zd tensors", flat_param->attributes.n);
        status = -1;
    }
    for (Py_ssize_t i = 0; status == 0 && i < flat_param->attributes.n; i++) {
        status = fp_attributes_check(PyTuple_GET_ITEM(made, i), 0);
    }
    if (status < 0) {
        Py_XDECREF(made);
        return -1;
    }
    Py_XSETREF(flat_param->extended, made);
    return 0;
}

int
fp_flat_param_refuse_graphs(fp_flat_param *flat_param)
{
    fp_flat_buffer_refuse_graphs(flat_param->flat, fp_items(flat_param->views));
    return flat_param->extension == NULL
               ? 0
               : fp_drop_result(PyObject_CallMethod(flat_param->extension, "refuse_graphs", NULL));
}

int
fp_flat_param_show(fp_flat_param *flat_param, int views)
{
    if (views && flat_param->extension != NULL && extend_views(flat_param) < 0) {
        return -1;
    }
    PyObject *values = Py_NewRef(views ? fp_flat_param_attributes(flat_param)
                                       : flat_param->params); /* owned: code of the user may run */
    const fp_place place = {.is_parameter = !views, .listed = flat_param->params != NULL, .unsafe = 0};
    const int status = fp_attributes_put(&flat_param->attributes, fp_items(values), NULL, place);
    Py_DECREF(values);
    if (status == 0) {
        flat_param->shows = views ? FP_SHOWS_VIEWS : FP_SHOWS_PARAMS;
    }
    if (status == 0 && !views) {
        Py_CLEAR(flat_param->extended);
    }
    return status;
}

int
fp_flat_param_show_views(fp_flat_param *flat_param)
{
    return flat_param->shows == FP_SHOWS_VIEWS && flat_param->extension == NULL ? 0 : fp_flat_param_show(flat_param, 1);
}

int
fp_flat_param_list_params(fp_flat_param *flat_param)
{
    if (flat_param->shows != FP_SHOWS_VIEWS || flat_param->params == NULL) {
        return 0;
    }
    PyObject *params = Py_NewRef(flat_param->params); /* owned: code of the user may run */
    const int status = fp_attributes_list(&flat_param->attributes, fp_items(params));
    Py_DECREF(params);
    flat_param->shows = FP_SHOWS_BOTH;
    return status;
}

int
fp_flat_param_show_params(fp_flat_param *flat_param)
{
    return flat_param->shows == FP_SHOWS_PARAMS || flat_param->params == NULL ? 0 : fp_flat_param_show(flat_param, 0);
}

int64_t
fp_flat_param_versions(const fp_flat_param *flat_param)
{
    return fp_param_versions(flat_param->owners.params, flat_param->owners.numels, flat_param->owners.n) +
           fp_param_versions(&flat_param->shard, NULL, 1) + fp_flat_buffer_sources(flat_param->flat, flat_param->shard);
}

int
fp_flat_param_trains_as_gathered(const fp_flat_param *flat_param)
{
    int untracked = 1;
    for (Py_ssize_t i = 0; untracked && i < flat_param->owners.n; i++) {
        untracked = !fp_param_requires_grad(flat_param->owners.params[i]);
    }
    return untracked == fp_flat_param_is_untracked(flat_param);
}

int
fp_flat_param_counts_as_gathered(const fp_flat_param *flat_param)
{
    return fp_flat_param_trains_as_gathered(flat_param) && flat_param->versions == fp_flat_param_versions(flat_param);
}

int
fp_flat_param_is_as_gathered(fp_flat_param *flat_param)
{
    if (!fp_flat_param_counts_as_gathered(flat_param) ||
        fp_flat_buffer_is_written(flat_param->flat, fp_items(flat_param->views))) {
        return 0;
    }
    const Py_ssize_t moved = fp_flat_param_find_moved(flat_param);
    return moved < 0 ? -1 : moved == flat_param->attributes.n;
}

PyObject *
fp_flat_param_of_view(const fp_flat_param *flat_param, PyObject *view)
{
    PyObject *values = fp_flat_param_attributes(flat_param);
    if (values == NULL || flat_param->params == NULL || fp_flat_param_is_untracked(flat_param)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < flat_param->attributes.n; i++) {
        if (PyTuple_GET_ITEM(values, i) == view) {
            return PyTuple_GET_ITEM(flat_param->params, i);
        }
    }
    return NULL;
}

int
fp_flat_param_take_requires_grad(const fp_flat_param *flat_param, PyObject *name)
{
    for (Py_ssize_t i = 0; fp_flat_param_is_untracked(flat_param) && i < flat_param->attributes.n; i++) {
        PyObject *owner = flat_param->params == NULL ? NULL : PyTuple_GET_ITEM(flat_param->params, i);
        const int taken = fp_param_take_requires_grad(PyTuple_GET_ITEM(fp_flat_param_attributes(flat_param), i), owner);
        FP_TRY(taken);
        if (taken == 2 || (taken == 1 && owner == NULL)) {
            return fp_raise(
                PyExc_RuntimeError,
                "requires_grad of parameter `%U` of a %.200s in %U was set in the middle of its forward, %s. Set "
                "it before that, on the parameters() of the model",
                flat_param->attributes.items[i].name, Py_TYPE(flat_param->attributes.items[i].module)->tp_name, name,
                owner == NULL ? "where it is a part of the flat parameter"
                              : "and it was used after that: its gradient would be lost");
        }
    }
    return 0;
}

Py_ssize_t
fp_flat_param_find_other(fp_flat_param *flat_param)
{
    if (flat_param->shows == FP_SHOWS_NOTHING) {
        return flat_param->attributes.n;
    }
    const int is_parameter = flat_param->shows == FP_SHOWS_PARAMS;
    PyObject *values = is_parameter ? flat_param->params : fp_flat_param_attributes(flat_param);
    PyObject *listed = flat_param->params == NULL            ? NULL
                       : flat_param->shows == FP_SHOWS_VIEWS ? values
                                                             : flat_param->params;
    Py_INCREF(values);
    Py_XINCREF(listed);
    const Py_ssize_t found = fp_attributes_find_other(&flat_param->attributes, fp_items(values),
                                                      listed == NULL ? NULL : fp_items(listed), is_parameter);
    Py_DECREF(values);
    Py_XDECREF(listed);
    return found;
}

Py_ssize_t
fp_flat_param_find_moved(fp_flat_param *flat_param)
{
    if (flat_param->params != NULL) {
        const Py_ssize_t moved = fp_param_moved(&flat_param->owners, flat_param->shard);
        if (moved >= 0) {
            return moved;
        }
    }
    return fp_flat_param_find_other(flat_param);
}

int
fp_flat_param_alias(fp_flat_param *flat_param)
{
    if (flat_param->params == NULL) {
        return 0;
    }
    /* by hand (leaf) pieces are 1-D over one rank too */
    const int is_sharded = fp_flat_param_plan(flat_param)->primary.n > 1 || flat_param->leaf != NULL;
    return fp_torch_set_shards(&flat_param->owners, flat_param->shard, is_sharded);
}

int
fp_flat_param_take_written(fp_flat_param *flat_param, PyObject *name, int leaves)
{
    if (flat_param->views == NULL || !fp_flat_buffer_is_written(flat_param->flat, fp_items(flat_param->views))) {
        return 0;
    }
    PyObject *views = Py_NewRef(flat_param->views);
    Py_ssize_t misfit;
    int status = fp_flat_buffer_take_written(flat_param->flat, flat_param->shard, fp_items(views), leaves, &misfit);
    if (status >= 0 && misfit == flat_param->attributes.n) {
        PyErr_Format(PyExc_RuntimeError,
                     "%U: a parameter was changed in place at a time when the module's tensors are out of date, so the "
                     "change is dropped: write to it inside summon_full_params()",
                     name);
        status = -1;
    }
    else if (status >= 0 && misfit >= 0) {
        PyErr_Format(
            PyExc_ValueError,
            "%U: the new data of parameter `%U` of a %.200s have another shape, dtype or device than it has there, are "
            "sharded, freed or resized, or came with another tensor (torch.utils.swap_tensors), so they are dropped: "
            "give it data that fit, or wrap it anew",
            name, flat_param->attributes.items[misfit].name,
            Py_TYPE(flat_param->attributes.items[misfit].module)->tp_name);
        status = -1;
    }
    Py_DECREF(views);
    return status;
}

int
fp_flat_param_adopt(fp_flat_param *flat_param, Py_ssize_t i, PyObject *param)
{
    if (flat_param->params == NULL || i < 0 || i >= flat_param->attributes.n) {
        return fp_raise(PyExc_IndexError, "there is no such parameter");
    }
    FP_TRY(fp_attributes_check(param, 1));
    PyObject *params = PyTuple_New(flat_param->attributes.n);
    for (Py_ssize_t k = 0; params != NULL && k < flat_param->attributes.n; k++) {
        PyTuple_SET_ITEM(params, k, Py_NewRef(k == i ? param : PyTuple_GET_ITEM(flat_param->params, k)));
    }
    FP_NEED(params);
    Py_SETREF(flat_param->params, params);
    flat_param->owners.params = fp_items(params);
    flat_param->versions = flat_param->synced = -1;
    return 0;
}

static int
clear_grads(fp_flat_param *flat_param)
{
    for (Py_ssize_t i = 0; i < flat_param->owners.n; i++) {
        FP_TRY(fp_gradients_set(flat_param->owners.params[i], NULL));
    }
    return 0;
}

/* Show the reduced gradient that was put aside: the owners that had a piece of it get it as .grad. */
static int
show_deferred_reduced(fp_flat_param *flat_param)
{
    PyObject *deferred_reduced = flat_param->aside.deferred_reduced;
    if (deferred_reduced == NULL) {
        return 0;
    }
    flat_param->aside.deferred_reduced = NULL;
    const fp_reduced reduced = {.tensor = deferred_reduced, .divisor = 1.0, .dtype = -1};
    const int status = fp_gradients_add_pieces(&flat_param->owners, flat_param->aside.has, &reduced, NULL);
    Py_DECREF(deferred_reduced);
    return status;
}

/* Set ValueError about the gradient of the i-th owner. why: the end of the sentence. */
static void
refuse_gradient(const fp_flat_param *flat_param, Py_ssize_t i, const char *name, const char *why)
{
    PyObject *what = flat_param->params == NULL
                         ? PyUnicode_FromString("its flat parameter")
                         : PyUnicode_FromFormat("parameter `%U` of a %.200s", flat_param->attributes.items[i].name,
                                                Py_TYPE(flat_param->attributes.items[i].module)->tp_name);
    if (what != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: the gradient of %U %s", name, what, why);
        Py_DECREF(what);
    }
}

static const char written_in_place[] =
    "was changed in place between micro-batches. There it shows the accumulated gradient, which is dropped now; the "
    "reduced gradient of an earlier backward lies beside it, and the change would miss it. Change gradients after the "
    "last micro-batch, when they are reduced";

int
fp_flat_param_check_grads(const fp_flat_param *flat_param, const char *name)
{
    const Py_ssize_t i = fp_gradients_find_freed(&flat_param->owners);
    if (i < flat_param->owners.n) {
        refuse_gradient(flat_param, i, name,
                        "has no memory for its elements: its storage was freed or resized outside of flatparam, and "
                        "its values are lost. Set .grad to None instead, and leave storages as they are");
    }
    return i < flat_param->owners.n ? -1 : 0;
}

/* Read the user's edits of the accumulated gradient that .grad shows. The number of owners that still have a part of it; -1:
 * error; -2 - i: the edit of the i-th owner cannot count. */
static Py_ssize_t
read_edits(fp_flat_param *flat_param, const char *name, int drops_zeros)
{
    FP_TRY(fp_flat_param_check_grads(flat_param, name));
    PyObject *accumulated = fp_flat_buffer_accumulated_grad(flat_param->flat);
    FP_NEED(accumulated);
    Py_ssize_t left;
    if (!fp_flat_param_is_nested(flat_param)) {
        left = fp_gradients_check_accumulated(&flat_param->owners, accumulated, flat_param->shard, &flat_param->aside,
                                              drops_zeros);
    }
    else {
        left = fp_gradients_check_pieces(&flat_param->owners, accumulated, flat_param->shard, &flat_param->aside,
                                         accumulated_first(flat_param), own_first(flat_param), name);
    }
    Py_DECREF(accumulated);
    return left;
}

int
fp_flat_param_note_user_edits(fp_flat_param *flat_param, const char *name, int drops_zeros)
{
    if (flat_param->shown == FP_SHOWN_REDUCED) {
        return 0;
    }
    FP_TRY(move_shown(flat_param, FP_SHOWN_READ, name));
    const Py_ssize_t left = read_edits(flat_param, name, drops_zeros);
    if (left < -1) {
        refuse_gradient(flat_param, -2 - left, name, written_in_place);
    }
    PyObject *error = PyErr_GetRaisedException(); /* set again below, once the refused gradients are dropped */
    if (left <= 0) {
        fp_flat_buffer_drop_grads(flat_param->flat, 1);
    }
    int status = clear_grads(flat_param);
    if (status == 0) {
        status = show_deferred_reduced(flat_param);
    }
    if (error != NULL) {
        PyErr_SetRaisedException(error); /* it hides an error of the two calls above */
    }
    return left < 0 ? -1 : status;
}

PyObject *
fp_flat_param_reduced(fp_flat_param *flat_param)
{
    const fp_param_pieces *owners = &flat_param->owners;
    char *has = fp_new_array(owners->n, 1);
    PyObject *reduced = has == NULL ? NULL : fp_gradients_collect(owners, flat_param->shard, has);
    for (Py_ssize_t i = 0; reduced != NULL && reduced != Py_None && i < owners->n; i++) {
        if (!has[i] && fp_gradients_clear_piece(owners, i, reduced) < 0) {
            Py_CLEAR(reduced);
        }
    }
    fp_free(has);
    return reduced;
}

/* New array [owners.n], which the caller frees: 1 for an owner that gets a piece of a gradient, as it trains or has a frozen
 * share. NULL with MemoryError. */
static char *
receivers_of(const fp_flat_param *flat_param)
{
    const fp_param_pieces *owners = &flat_param->owners;
    char *receives = fp_new_array(owners->n, 1);
    for (Py_ssize_t i = 0; receives != NULL && i < owners->n; i++) {
        receives[i] = (char)(flat_param->aside.frozen_share[i] || fp_param_requires_grad(owners->params[i]));
    }
    return receives;
}

int
fp_flat_param_add_reduced(fp_flat_param *flat_param, const fp_reduced *reduced, const char *name)
{
    FP_TRY(fp_flat_param_check_grads(flat_param, name));
    char *receives = receivers_of(flat_param);
    FP_NEED(receives);
    memset(flat_param->aside.frozen_share, 0, (size_t)flat_param->owners.n);
    const int status = fp_gradients_add_pieces(&flat_param->owners, receives, reduced, name);
    fp_free(receives);
    return status;
}

int
fp_flat_param_clear_accumulated(fp_flat_param *flat_param, const int32_t *cleared)
{
    Py_ssize_t left = 0;
    PyObject *accumulated = fp_flat_buffer_accumulated_grad(flat_param->flat);
    int status = accumulated == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; i < flat_param->owners.n; i++) {
        flat_param->aside.cleared[i] = 0;
        left += (fp_param_requires_grad(flat_param->owners.params[i]) || flat_param->aside.frozen_share[i]) &&
                cleared[i] == 0;
        if (status == 0 && accumulated != Py_None && cleared[i] != 0) {
            status = fp_gradients_clear_accumulated(flat_param->owners.geometry, i, accumulated,
                                                    accumulated_first(flat_param));
        }
    }
    Py_XDECREF(accumulated);
    if (status == 0 && left == 0) {
        fp_flat_buffer_drop_grads(flat_param->flat, 1);
    }
    return status < 0 ? -1 : left > 0;
}

void
fp_flat_param_drop_accumulated(fp_flat_param *flat_param)
{
    if (fp_flat_param_note_user_edits(flat_param, "", 0) < 0) {
        PyErr_Clear(); /* the edits of a dropped gradient do not matter */
    }
    fp_flat_buffer_drop_grads(flat_param->flat, 1);
    for (Py_ssize_t i = 0; i < flat_param->owners.n; i++) {
        flat_param->aside.frozen_share[i] = 0;
    }
}

int
fp_flat_param_set_accumulated(fp_flat_param *flat_param, PyObject *accumulated, PyObject *frozen_share)
{
    fp_flat_param_drop_accumulated(flat_param);
    if (accumulated != Py_None && fp_flat_buffer_set_accumulated(flat_param->flat, accumulated) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < flat_param->owners.n; i++) {
        flat_param->aside.frozen_share[i] = accumulated != Py_None && PyTuple_GET_ITEM(frozen_share, i) == Py_True;
    }
    return 0;
}

int
fp_flat_param_sync_shown_grads(fp_flat_param *flat_param, const char *name, int drops_zeros)
{
    if (flat_param->shown == FP_SHOWN_REDUCED) {
        return 0;
    }
    FP_TRY(fp_flat_param_note_user_edits(flat_param, name, drops_zeros));
    return fp_flat_buffer_has_accumulated(flat_param->flat) ? fp_flat_param_show_accumulated(flat_param, name) : 0;
}

/* Put the reduced gradient that .grad shows aside: deferred_reduced. accumulated: the accumulated gradient, which takes it
 * where neither a group nor a driver would reduce it. */
static int
defer_reduced(fp_flat_param *flat_param, PyObject *accumulated)
{
    const fp_param_pieces *owners = &flat_param->owners;
    PyObject *reduced = fp_gradients_collect(owners, flat_param->shard, flat_param->aside.has);
    FP_NEED(reduced);
    if (reduced == Py_None) {
        Py_CLEAR(reduced);
    }
    Py_XSETREF(flat_param->aside.deferred_reduced, reduced); /* an earlier call that failed may have left one */
    if (reduced == NULL) {
        return 0;
    }
    if (fp_flat_param_plan(flat_param)->primary.group == NULL &&
        fp_flat_param_plan(flat_param)->replicate_group == NULL && flat_param->leaf == NULL) {
        const int status = fp_torch_convert(accumulated, reduced, 1);
        Py_CLEAR(flat_param->aside.deferred_reduced);
        for (Py_ssize_t i = 0; i < owners->n; i++) {
            flat_param->aside.frozen_share[i] = (char)(flat_param->aside.frozen_share[i] || flat_param->aside.has[i]);
        }
        return status;
    }
    FP_TRY(fp_flat_buffer_wait_copies(flat_param->flat));
    return fp_gradients_mark_zeros(accumulated);
}

int
fp_flat_param_show_accumulated(fp_flat_param *flat_param, const char *name)
{
    FP_TRY(fp_flat_param_check_grads(flat_param, name));
    PyObject *accumulated = fp_flat_buffer_accumulated_grad(flat_param->flat);
    FP_NEED(accumulated);
    int status = defer_reduced(flat_param, accumulated);
    char *receives = status < 0 ? NULL : receivers_of(flat_param);
    if (receives != NULL) {
        const int64_t own = !fp_flat_param_is_nested(flat_param) ? -1 : own_first(flat_param);
        status = fp_gradients_show_accumulated(&flat_param->owners, receives, accumulated, own);
        fp_free(receives);
    }
    else {
        status = -1;
    }
    Py_DECREF(accumulated);
    return status < 0 ? -1 : move_shown(flat_param, event_of_showing(flat_param), name);
}

/* ---- life ---- */

void
fp_flat_param_free(fp_flat_param *flat_param)
{
    (void)move_shown(flat_param, FP_SHOWN_READ, ""); /* legal in each state; counts fp_flat_param_not_steppable */
    fp_attributes_clear(&flat_param->attributes);
    Py_CLEAR(flat_param->shard);
    Py_CLEAR(flat_param->params);
    Py_CLEAR(flat_param->views);
    Py_CLEAR(flat_param->leaf);
    Py_CLEAR(flat_param->extension);
    Py_CLEAR(flat_param->dress);
    Py_CLEAR(flat_param->extended);
    Py_CLEAR(flat_param->aside.deferred_reduced);
    fp_attributes_free(&flat_param->attributes);
    fp_flat_buffer_free(flat_param->flat);
    if (flat_param->owners.geometry != flat_param->geometry) {
        fp_torch_geometry_free((fp_geometry *)flat_param->owners.geometry);
    }
    fp_torch_geometry_free(flat_param->geometry);
    fp_free((void *)flat_param->owners.starts);
    fp_free(flat_param->aside.has);
}

int
fp_flat_param_traverse(fp_flat_param *flat_param, visitproc visit, void *arg)
{
    Py_VISIT(flat_param->shard);
    Py_VISIT(flat_param->params);
    Py_VISIT(flat_param->views);
    Py_VISIT(flat_param->leaf);
    Py_VISIT(flat_param->extension);
    Py_VISIT(flat_param->dress);
    Py_VISIT(flat_param->extended);
    Py_VISIT(flat_param->aside.deferred_reduced);
    return fp_attributes_traverse(&flat_param->attributes, visit, arg);
}
