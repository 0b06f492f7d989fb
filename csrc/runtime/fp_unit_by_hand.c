/* runtime/fp_unit_by_hand.c -- the steps of a unit without hooks, for a driver; see fp_unit_by_hand.h. */
#include "runtime/fp_unit_by_hand.h"

#include <string.h>

#include "runtime/fp_iteration.h"
#include "runtime/fp_unshard.h"

/* The flat parameter. NULL with RuntimeError: drive() was not called. */
static fp_flat_param *
driven(const fp_unit *unit)
{
    if (unit->n_flat_params == 1 && unit->flat_params[0].leaf != NULL && unit->root != NULL) {
        return &unit->flat_params[0];
    }
    PyErr_Format(PyExc_RuntimeError, "%U: expected drive() to be called before", unit->name);
    return NULL;
}

/* ---- waits ---- */

static int
before_gather(PyObject *watcher, uint64_t event)
{
    return PyObject_SetAttrString(watcher, "looks", Py_False);
}

static int
waiting(PyObject *watcher)
{
    return fp_drop_result(PyObject_CallMethod(watcher, "look", NULL));
}

static int
failed(PyObject *watcher, const char *message)
{
    PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
    return text == NULL ? -1 : fp_drop_result(PyObject_CallMethod(watcher, "explain", "N", text));
}

static void
ignore(PyObject *watcher)
{
}

static int
is_broken(PyObject *watcher)
{
    return 0;
}

static const fp_group_calls watcher_calls = {.before = before_gather,
                                             .begun = ignore,
                                             .launched = ignore,
                                             .waiting = waiting,
                                             .failed = failed,
                                             .is_broken = is_broken};

static void
watch(fp_group *group, PyObject *watcher, int sliced)
{
    if (group != NULL) {
        fp_group_watch(group, 0, watcher, &watcher_calls, 0, sliced);
    }
}

PyObject *
fp_by_hand_drive(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs)
{
    fp_flat_param *flat_param = unit->n_flat_params == 1 ? &unit->flat_params[0] : NULL;
    int sliced;
    FP_TRY_NULL(fp_read_args("drive", args, nargs, "OOOb", &sliced));
    FP_TRY_NULL(fp_attributes_check(args[0], 1));
    if (flat_param == NULL || flat_param->params == NULL || flat_param->leaf != NULL || unit->root == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "%U: expected one flat parameter with original parameters, and a root",
                            unit->name);
    }
    flat_param->leaf = Py_NewRef(args[0]);
    watch(fp_flat_param_plan(flat_param)->primary.group, args[1], sliced);
    watch(fp_flat_param_plan(flat_param)->secondary.group, args[2], sliced);
    fp_flat_buffer_lose_size(flat_param->flat);
    FP_TRY_NULL(fp_flat_buffer_prepare(flat_param->flat, flat_param->shard, PyUnicode_AsUTF8(unit->reason)));
    return fp_flat_buffer_unsharded(flat_param->flat);
}

/* ---- parameters ---- */

PyObject *
fp_by_hand_gather(fp_unit *unit, PyObject *argument)
{
    fp_flat_param *flat_param = driven(unit);
    const char *reason = PyUnicode_AsUTF8(unit->reason);
    int refresh;
    FP_NEED_NULL(flat_param);
    FP_TRY_NULL(fp_as_bool(argument, &refresh));
    FP_TRY_NULL(fp_iteration_look_for_replaced(unit->root));
    FP_TRY_NULL(fp_unshard_check_memory(unit));
    const int64_t versions = refresh ? fp_flat_param_versions(flat_param) : 0;
    const int renewed = refresh ? fp_flat_buffer_renew(flat_param->flat, reason) : 0;
    FP_TRY_NULL(renewed);
    if (renewed) {
        Py_CLEAR(flat_param->views);
    }
    PyObject *const *views = flat_param->views == NULL ? NULL : fp_items(flat_param->views);
    const int changed = refresh && versions != flat_param->versions;
    const int status = fp_flat_buffer_gather(flat_param->flat, flat_param->shard, views, fp_unit_collectives(unit),
                                             changed, refresh, 0, reason);
    flat_param->gathered = status >= 0;
    FP_TRY_NULL(status);
    if (refresh) {
        flat_param->versions = versions;
    }
    return renewed ? fp_flat_buffer_unsharded(flat_param->flat) : Py_NewRef(Py_None);
}

PyObject *
fp_by_hand_wait(fp_unit *unit, PyObject *ignored)
{
    fp_flat_param *flat_param = driven(unit);
    return flat_param == NULL ? NULL : fp_none_unless(fp_flat_buffer_wait(flat_param->flat));
}

PyObject *
fp_by_hand_is_gathered(fp_unit *unit, void *ignored)
{
    return PyBool_FromLong(unit->n_flat_params == 1 && fp_flat_buffer_is_gathered(unit->flat_params[0].flat));
}

PyObject *
fp_by_hand_show_views(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs)
{
    fp_flat_param *flat_param = driven(unit);
    int may_replace;
    FP_NEED_NULL(flat_param);
    FP_TRY_NULL(fp_read_args("show_views", args, nargs, "Ob", &may_replace));
    if (!PyList_Check(args[0])) {
        return PyErr_Format(PyExc_TypeError, "expected a list, got %.200s", Py_TYPE(args[0])->tp_name);
    }
    PyObject *whole = fp_flat_buffer_unsharded(flat_param->flat);
    const int status = whole == NULL ? -1 : fp_torch_alias_flat(flat_param->leaf, whole, -1);
    Py_XDECREF(whole);
    if (may_replace && fp_flat_buffer_has_hooks(flat_param->flat)) { /* else later backwards would call them, too */
        Py_CLEAR(flat_param->views);
    }
    FP_TRY_NULL(status);
    FP_TRY_NULL(fp_unshard_make_views(unit, 0));
    FP_TRY_NULL(fp_flat_param_show_views(flat_param));
    PyObject *views = flat_param->views;
    const Py_ssize_t n = PyList_GET_SIZE(args[0]);
    const int same = n > 0 && PyList_GET_ITEM(args[0], 0) == PyTuple_GET_ITEM(views, 0);
    return fp_none_unless(same ? 0 : PyList_SetSlice(args[0], 0, n, views));
}

PyObject *
fp_by_hand_show_params(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs)
{
    fp_flat_param *flat_param = driven(unit);
    int moves;
    FP_NEED_NULL(flat_param);
    FP_TRY_NULL(fp_read_args("show_params", args, nargs, "Ob", &moves));
    const int is_whole = args[0] != Py_None;
    PyObject *source = is_whole ? args[0] : flat_param->shard;
    FP_TRY_NULL(fp_attributes_check(source, 0));
    FP_TRY_NULL(fp_torch_alias_flat(flat_param->leaf, source, -1));
    FP_TRY_NULL(fp_flat_param_show_params(flat_param));
    if (!moves || !is_whole) {
        return fp_none_unless(moves ? fp_flat_param_alias(flat_param) : 0);
    }
    PyObject *params = Py_NewRef(flat_param->params); /* owned: setting data may run code of the user */
    const int status = fp_torch_alias(fp_items(params), flat_param->geometry, flat_param->leaf);
    Py_DECREF(params);
    return fp_none_unless(status);
}

PyObject *
fp_by_hand_take_written(fp_unit *unit, PyObject *ignored)
{
    return driven(unit) == NULL ? NULL : fp_none_unless(fp_unshard_take_written_in_forward(unit));
}

PyObject *
fp_by_hand_cut(fp_unit *unit, PyObject *ignored)
{
    fp_flat_param *flat_param = driven(unit);
    FP_NEED_NULL(flat_param);
    FP_TRY_NULL(fp_flat_buffer_cut_secondary_shard(flat_param->flat));
    return fp_flat_buffer_secondary_shard(flat_param->flat);
}

PyObject *
fp_by_hand_forget(fp_unit *unit, PyObject *ignored)
{
    fp_flat_param *flat_param = driven(unit);
    return flat_param == NULL ? NULL : fp_none_unless(fp_flat_buffer_forget_values(flat_param->flat));
}

PyObject *
fp_by_hand_versions(fp_unit *unit, PyObject *ignored)
{
    const fp_flat_param *flat_param = driven(unit);
    return flat_param == NULL ? NULL
                              : PyLong_FromLongLong(fp_flat_param_versions(flat_param) +
                                                    fp_param_versions(&flat_param->leaf, NULL, 1));
}

/* ---- gradients ---- */

PyObject *
fp_by_hand_set_grads(fp_unit *unit, PyObject *grad)
{
    const fp_flat_param *flat_param = driven(unit);
    if (flat_param == NULL || flat_param->views == NULL) {
        return flat_param == NULL ? NULL : PyErr_Format(PyExc_RuntimeError, "%U: there are no views yet", unit->name);
    }
    PyObject *views = Py_NewRef(flat_param->views);
    const int status = fp_torch_set_grads(fp_items(views), flat_param->geometry, grad);
    Py_DECREF(views);
    return fp_none_unless(status);
}

/* leaf.grad = the reduced gradient that .grad of the owners shows; None: there is none. */
static int
show_reduced(fp_flat_param *flat_param)
{
    PyObject *reduced = fp_flat_param_reduced(flat_param);
    const int status = reduced == NULL ? -1 : fp_gradients_set(flat_param->leaf, reduced);
    Py_XDECREF(reduced);
    return status;
}

static int
show_sum(fp_flat_param *flat_param, PyObject *sum, const char *name)
{
    FP_TRY(fp_attributes_check(sum, 0));
    PyObject *shown = fp_flat_buffer_accumulated_grad(flat_param->flat);
    FP_NEED(shown);
    const int is_same = shown == Py_None ? 0 : fp_torch_same_storage(shown, sum);
    Py_DECREF(shown);
    FP_TRY(is_same);
    if (!is_same) {
        FP_TRY(fp_flat_buffer_set_accumulated(flat_param->flat, sum));
    }
    FP_TRY(fp_flat_param_show_accumulated(flat_param, name));
    return fp_gradients_set(flat_param->leaf, sum);
}

PyObject *
fp_by_hand_show_sum(fp_unit *unit, PyObject *sum)
{
    fp_flat_param *flat_param = driven(unit);
    if (flat_param == NULL || flat_param->shown != FP_SHOWN_REDUCED) {
        return flat_param == NULL ? NULL : Py_NewRef(Py_None);
    }
    if (sum == Py_None) {
        return fp_none_unless(show_reduced(flat_param));
    }
    return fp_none_unless(show_sum(flat_param, sum, PyUnicode_AsUTF8(unit->name)));
}

PyObject *
fp_by_hand_add_reduced(fp_unit *unit, PyObject *tensor)
{
    fp_flat_param *flat_param = driven(unit);
    const fp_reduced reduced = {.tensor = tensor, .divisor = 1.0, .dtype = -1};
    FP_NEED_NULL(flat_param);
    FP_TRY_NULL(fp_attributes_check(tensor, 0));
    FP_TRY_NULL(fp_flat_param_check_grads(flat_param, PyUnicode_AsUTF8(unit->name)));
    FP_TRY_NULL(fp_flat_param_add_reduced(flat_param, &reduced, NULL));
    return fp_none_unless(show_reduced(flat_param));
}
