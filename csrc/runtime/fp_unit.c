/* runtime/fp_unit.c -- the type _C.Unit, one unit: its life, its methods for use between passes, and the functions of the
 * module about all units. Its forward is in fp_forward.c, its backward in fp_backward.c. */
#include "runtime/fp_unit.h"

#include <stddef.h>

#include "core/fp_alloc.h"
#include "runtime/fp_trace_py.h"
#include "runtime/fp_backward.h"
#include "runtime/fp_forward.h"
#include "runtime/fp_iteration.h"
#include "runtime/fp_members.h"
#include "runtime/fp_reduce_order.h"
#include "runtime/fp_root.h"
#include "runtime/fp_unit_accumulated.h"
#include "runtime/fp_unit_by_hand.h"
#include "runtime/fp_unshard.h"

/* ---- construction ---- */

/* All units in the process that stay gathered. A process has one optimizer count for all module objects, so it has one list. */
static fp_unit_list full_units;

static PyObject *
unit_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"name", "flat_params", "reshard_after_forward", "on_param_replaced", "reason", NULL};
    PyObject *name, *flat_params, *moved, *reason;
    int reshard_after_forward, stays_full = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UO!pOU:Unit", keywords, &name, &PyTuple_Type, &flat_params,
                                     &reshard_after_forward, &moved, &reason)) {
        return NULL;
    }
    fp_unit *unit = (fp_unit *)type->tp_alloc(type, 0);
    FP_NEED_NULL(unit);
    PyObject_GC_UnTrack(unit); /* the garbage collector must not see it before it is complete */
    unit->name = fp_as_text(name);
    unit->on_param_replaced = Py_NewRef(moved);
    unit->reason = fp_as_text(reason);
    unit->reshard_after_forward = reshard_after_forward;
    unit->position = -1;
    unit->flat_params = fp_new_array(PyTuple_GET_SIZE(flat_params), sizeof *unit->flat_params);
    const int complete = unit->name != NULL && unit->reason != NULL && unit->flat_params != NULL;
    unit->ref = complete ? fp_unit_ref_new(unit, PyUnicode_AsUTF8(unit->name), &fp_backward_unit_calls) : NULL;
    if (unit->ref == NULL) {
        goto fail;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(flat_params); k++) {
        unit->n_flat_params++;
        if (fp_flat_param_read(&unit->flat_params[k], PyTuple_GET_ITEM(flat_params, k)) < 0) {
            goto fail;
        }
        stays_full = stays_full || fp_flat_param_stays_full(&unit->flat_params[k]);
    }
    if (stays_full && fp_unit_list_add(&full_units, unit) < 0) {
        goto fail;
    }
    PyObject_GC_Track(unit);
    return (PyObject *)unit;
fail:
    Py_DECREF(unit);
    return NULL;
}

static int
unit_traverse(fp_unit *unit, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(unit));
    Py_VISIT(unit->root);
    Py_VISIT(unit->on_param_replaced);
    Py_VISIT(unit->reduced);
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        const int status = fp_flat_param_traverse(&unit->flat_params[k], visit, arg);
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

static int
unit_clear(fp_unit *unit)
{
    fp_iteration_leave_root(unit);
    Py_CLEAR(unit->on_param_replaced);
    Py_CLEAR(unit->reduced);
    return 0; /* flat parameters stay: hooks may use them until the unit is freed */
}

/* The last reference goes away. If a graph awaits its backward, it keeps the unit alive until the graph is freed, as
 * autograd keeps parameters alive. */
static void
unit_finalize(fp_unit *unit)
{
    if (unit->ref != NULL && unit->root != NULL) {
        fp_unit_ref_keep(unit->ref, (PyObject *)unit);
    }
}

static void
unit_dealloc(PyObject *self)
{
    fp_unit *unit = (fp_unit *)self;
    if (PyObject_CallFinalizerFromDealloc(self) < 0) {
        return;
    }
    PyObject_GC_UnTrack(self);
    fp_unit_list_remove(&full_units, unit);
    fp_unit_ref_drop(unit->ref);
    fp_iteration_leave_root(unit);
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param_free(&unit->flat_params[k]);
    }
    fp_free(unit->flat_params);
    Py_CLEAR(unit->name);
    Py_CLEAR(unit->on_param_replaced);
    Py_CLEAR(unit->reduced);
    Py_CLEAR(unit->reason);
    Py_CLEAR(unit->opaque);
    fp_free_object(self);
}

/* ---- methods ---- */

static PyObject *
unit_join(fp_unit *unit, PyObject *root_object)
{
    if (!fp_root_check(root_object)) {
        return PyErr_Format(PyExc_TypeError, "expected a Root, got %.200s", Py_TYPE(root_object)->tp_name);
    }
    fp_root *root = (fp_root *)root_object;
    if (unit->root == root) {
        Py_RETURN_NONE;
    }
    FP_TRY_NULL(fp_unit_check_idle(unit, "join another model"));
    FP_TRY_NULL(fp_unit_list_reserve(&root->units, root->units.n + 1));
    FP_TRY_NULL(fp_reduce_order_join(root, unit));
    PyObject *left = Py_XNewRef(unit->root); /* owned: freeing it may run code, in which units may join this root */
    fp_iteration_leave_root(unit);
    root->units.items[root->units.n++] = unit; /* there is room */
    unit->root = (fp_root *)Py_NewRef(root);
    unit->gather_pass = unit->entry = unit->data_steps = unit->recorded = unit->seen_writes = -1;
    fp_members_forget(root);
    Py_XDECREF(left);
    Py_RETURN_NONE;
}

static PyObject *
unit_follow(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t which, number;
    int sliced;
    FP_TRY_NULL(fp_read_args("follow", args, nargs, "iOib", &which, &number, &sliced));
    if (which < 0 || which >= FP_GROUPS * FP_WATCHERS || number < 0 || number > UINT32_MAX - unit->n_flat_params) {
        return PyErr_Format(PyExc_ValueError, "expected a group from 0 to 7 and a number of 32 bits, got %lld and %lld",
                            (long long)which, (long long)number);
    }
    if (!fp_model_trace_check(args[1])) {
        return PyErr_Format(PyExc_TypeError, "expected a ModelTrace, got %.200s", Py_TYPE(args[1])->tp_name);
    }
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        const fp_flat_param *flat_param = &unit->flat_params[k];
        fp_group *const groups[FP_GROUPS] = {[FP_GROUP_SHARD] = fp_flat_param_plan(flat_param)->primary.group,
                                             [FP_GROUP_REPLICATE] = fp_flat_param_plan(flat_param)->replicate_group,
                                             [FP_GROUP_PARAM] = fp_flat_param_plan(flat_param)->secondary.group,
                                             [FP_GROUP_OUTER] = fp_flat_param_plan(flat_param)->outer_group};
        fp_group *group = groups[which % FP_GROUPS];
        if (group != NULL) {
            fp_group_watch(group, (int)(which / FP_GROUPS), args[1], &fp_model_trace_calls, (uint32_t)(number + k),
                           sliced);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
unit_release(fp_unit *unit, PyObject *ignored)
{
    FP_TRY_NULL(fp_unshard_release(unit));
    return fp_none_unless(fp_unshard_show_params(unit));
}

static PyObject *
unit_retire(fp_unit *unit, PyObject *ignored)
{
    fp_unit_ref_drop(unit->ref);
    unit->ref = NULL;
    Py_RETURN_NONE;
}

static PyObject *
unit_make_views(fp_unit *unit, PyObject *ignored)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        FP_TRY_NULL(fp_unshard_make_views(unit, k));
        FP_TRY_NULL(fp_flat_param_list_params(&unit->flat_params[k])); /* no pass runs */
    }
    Py_RETURN_NONE;
}

static PyObject *
unit_put(fp_unit *unit, PyObject *argument)
{
    int views;
    FP_TRY_NULL(fp_as_bool(argument, &views));
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        if ((views ? flat_param->views : flat_param->params) == NULL) {
            continue;
        }
        FP_TRY_NULL(fp_flat_param_show(flat_param, views));
        FP_TRY_NULL(fp_flat_param_list_params(flat_param));
    }
    Py_RETURN_NONE;
}

static PyObject *
unit_sync_user_writes(fp_unit *unit, PyObject *ignored)
{
    return fp_bool_unless(fp_unshard_sync_user_writes(unit));
}

static PyObject *
unit_alias_params(fp_unit *unit, PyObject *ignored)
{
    return fp_none_unless(fp_unit_each(unit, fp_flat_param_alias));
}

/* The flat parameter whose index is args[0]. NULL with an exception: nargs is not n, or there is no such index. */
static fp_flat_param *
part_of(fp_unit *unit, const char *name, PyObject *const *args, Py_ssize_t nargs, Py_ssize_t n)
{
    int64_t k;
    FP_TRY_NULL(fp_check_nargs(name, nargs, n));
    FP_TRY_NULL(fp_as_int64(args[0], &k));
    if (k < 0 || k >= unit->n_flat_params) {
        PyErr_Format(PyExc_IndexError, "expected the number of a flat parameter below %zd, got %lld",
                     unit->n_flat_params, (long long)k);
        return NULL;
    }
    return &unit->flat_params[k];
}

static PyObject *
unit_lie_in(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs)
{
    fp_flat_param *flat_param = part_of(unit, "lie_in", args, nargs, 4);
    int registered;
    FP_NEED_NULL(flat_param);
    FP_TRY_NULL(fp_as_bool(args[3], &registered));
    PyObject *given = args[1] == Py_None && flat_param->params != NULL ? flat_param->params : args[1];
    PyObject *tensors = fp_as_tuple(given, flat_param->attributes.n, "tensors"); /* owned */
    FP_NEED_NULL(tensors);
    PyObject *const *values = fp_items(tensors);
    int same = fp_torch_lie_in(values, flat_param->geometry, args[2]);
    if (same && registered) {
        const Py_ssize_t other = fp_attributes_find_other(&flat_param->attributes, values, values, 1);
        same = other < 0 ? -1 : other == flat_param->attributes.n;
    }
    Py_DECREF(tensors);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static PyObject *
unit_adopt(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs)
{
    fp_flat_param *flat_param = part_of(unit, "adopt", args, nargs, 3);
    int64_t i;
    FP_NEED_NULL(flat_param);
    FP_TRY_NULL(fp_as_int64(args[1], &i));
    return fp_none_unless(fp_flat_param_adopt(flat_param, (Py_ssize_t)i, args[2]));
}

static PyObject *
unit_compute_in_full(fp_unit *unit, PyObject *argument)
{
    int in_full;
    FP_TRY_NULL(fp_as_bool(argument, &in_full));
    FP_TRY_NULL(fp_unit_check_idle(unit, "change its precision"));
    FP_TRY_NULL(fp_unshard_release(unit));
    FP_TRY_NULL(fp_unshard_show_params(unit));
    unit->gather_pass = -1;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        FP_TRY_NULL(fp_flat_buffer_wait(unit->flat_params[k].flat));
        fp_flat_buffer_compute_in_full(unit->flat_params[k].flat, in_full);
    }
    Py_RETURN_NONE;
}

static PyObject *
unit_average_elsewhere(fp_unit *unit, PyObject *ignored)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_buffer_average_elsewhere(unit->flat_params[k].flat);
    }
    Py_RETURN_NONE;
}

static PyObject *
unit_invalidate(fp_unit *unit, PyObject *ignored)
{
    unit->data_steps = unit->gather_pass = -1;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        unit->flat_params[k].synced = -1;
    }
    return fp_none_unless(fp_unshard_hide_old(unit));
}

static int
is_written(fp_flat_param *flat_param)
{
    return flat_param->views != NULL && fp_flat_buffer_is_written(flat_param->flat, fp_items(flat_param->views));
}

static int
is_frozen(fp_flat_param *flat_param)
{
    return fp_flat_param_is_untracked(flat_param);
}

static int
is_unreduced(fp_flat_param *flat_param)
{
    return flat_param->shown == FP_SHOWN_UNREDUCED;
}

/* A getter's question about one flat parameter. A struct, as C cannot put a function pointer into a closure. */
typedef struct {
    int (*holds)(fp_flat_param *flat_param);
} question;
static question ask_written = {is_written}, ask_frozen = {is_frozen}, ask_unreduced = {is_unreduced};

/* True if the question holds for some flat parameter. */
static PyObject *
unit_any(fp_unit *unit, void *asked)
{
    return PyBool_FromLong(fp_unit_each(unit, ((question *)asked)->holds));
}

static PyObject *
unit_note_user_edits(fp_unit *unit, PyObject *argument)
{
    const char *name = PyUnicode_AsUTF8(unit->name);
    int drops_zeros;
    FP_TRY_NULL(fp_as_bool(argument, &drops_zeros));
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        FP_NEED_NULL(name);
        FP_TRY_NULL(fp_flat_param_sync_shown_grads(&unit->flat_params[k], name, drops_zeros));
    }
    return unit_any(unit, &ask_unreduced);
}

static PyObject *
unit_shows_views(const fp_unit *unit, void *ignored)
{
    return PyBool_FromLong(unit->n_flat_params > 0 && unit->flat_params[0].shows >= FP_SHOWS_VIEWS);
}

static PyObject *
unit_owner_of(const fp_unit *unit, PyObject *view)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        PyObject *param = fp_flat_param_of_view(&unit->flat_params[k], view);
        if (param != NULL) {
            return Py_NewRef(param);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
unit_views(const fp_unit *unit, PyObject *ignored)
{
    PyObject *list = PyList_New(unit->n_flat_params);
    for (Py_ssize_t k = 0; list != NULL && k < unit->n_flat_params; k++) {
        PyObject *views = fp_flat_param_attributes(&unit->flat_params[k]);
        PyList_SET_ITEM(list, k, Py_NewRef(views == NULL ? Py_None : views));
    }
    return list;
}

static PyMethodDef unit_methods[] = {
    {"join", FP_METHOD(unit_join), METH_O,
     "join($self, root, /)\n--\n\nJoin the units that share root, and leave the present root. "
     "RuntimeError while a forward or backward is under way."},
    {"follow", FP_METHOD(unit_follow), METH_FASTCALL,
     "follow($self, which, model_trace, number, sliced, /)\n--\n\n"
     "Tell model_trace, a ModelTrace, of the collectives over one of the groups.\n\n"
     "which: _C.GROUP_SHARD and so on; _C.GROUPS + one of them sets a second ModelTrace of that group. "
     "number: the id of the unit in events; flat parameter k has number + k. "
     "sliced: call the trace several times a second during a wait, too."},
    {"pre_forward", FP_METHOD(fp_forward_pre), METH_NOARGS,
     "pre_forward($self, /)\n--\n\nGather, and give the modules the views. The outermost unit begins a pass."},
    {"post_forward", FP_METHOD(fp_forward_post), METH_O,
     "post_forward($self, output, /)\n--\n\n"
     "Put hooks on the tensors in output, and free the data unless a backward or a setting needs it. Return output."},
    {"abort_forward", FP_METHOD(fp_forward_abort), METH_NOARGS,
     "abort_forward($self, /)\n--\n\n"
     "Call it in place of post_forward(), or after it, if there was an exception. The outermost unit recovers the "
     "model."},
    {"expect_inputs", FP_METHOD(fp_forward_expect_inputs), METH_O,
     "expect_inputs($self, tensors, /)\n--\n\nA forward with these inputs, a list of tensors, begins. "
     "Frozen data is freed when a backward has the gradients of all inputs that require grad, or at the end of the "
     "backward."},
    {"release", FP_METHOD(unit_release), METH_NOARGS,
     "release($self, /)\n--\n\n"
     "Wait for a gather, free the unsharded data, and give the modules the original parameters."},
    {"make_views", FP_METHOD(unit_make_views), METH_NOARGS,
     "make_views($self, /)\n--\n\n"
     "Make views that fit the dtype and device of the shards. Without original parameters the modules get them."},
    {"retire", FP_METHOD(unit_retire), METH_NOARGS,
     "retire($self, /)\n--\n\n"
     "Let the backward of a graph that used the parameters raise RuntimeError. Nothing else may be called afterwards:\n"
     "another unit has the modules."},
    {"put", FP_METHOD(unit_put), METH_O,
     "put($self, views, /)\n--\n\n"
     "Give the modules the views (True) or the original parameters (False), whatever they have now."},
    {"sync_user_writes", FP_METHOD(unit_sync_user_writes), METH_NOARGS,
     "sync_user_writes($self, /)\n--\n\n"
     "Between passes: copy into the shards what users wrote to parameters and views, or put in their place. "
     "Return whether a user had."},
    {"alias_params", FP_METHOD(unit_alias_params), METH_NOARGS,
     "alias_params($self, /)\n--\n\nSet the data of the original parameters to their pieces of the shards."},
    {"lie_in", FP_METHOD(unit_lie_in), METH_FASTCALL,
     "lie_in($self, flat_param, tensors, whole, registered, /)\n--\n\n"
     "Return whether each of tensors, one an original parameter, lies at its place in whole, an unsharded tensor.\n\n"
     "flat_param: an index. tensors: None for the original parameters. "
     "registered: the modules must have them as parameters, too."},
    {"adopt", FP_METHOD(unit_adopt), METH_FASTCALL,
     "adopt($self, flat_param, index, param, /)\n--\n\n"
     "Replace original parameter index of the flat parameter of index flat_param by param. "
     "IndexError, TypeError. The gathered data counts as out of date."},
    {"invalidate", FP_METHOD(unit_invalidate), METH_NOARGS,
     "invalidate($self, /)\n--\n\nThe shards were written: the gathered data counts as out of date."},
    {"compute_in_full", FP_METHOD(unit_compute_in_full), METH_O,
     "compute_in_full($self, in_full, /)\n--\n\n"
     "Between passes: compute and reduce in the dtype of the shards from now on (True), or in the dtypes of the "
     "settings (False)."},
    {"average_elsewhere", FP_METHOD(unit_average_elsewhere), METH_NOARGS,
     "average_elsewhere($self, /)\n--\n\n"
     "Sum gradients over the ranks from now on, and do not average them: a communication hook does it."},
    {"views", FP_METHOD(unit_views), METH_NOARGS,
     "views($self, /)\n--\n\n"
     "Return a list with a tuple for each flat parameter: its views, or the objects that an extension has made of "
     "them. None in place of a tuple before the first gather."},
    {"owner_of", FP_METHOD(unit_owner_of), METH_O,
     "owner_of($self, view, /)\n--\n\n"
     "Return the original parameter whose differentiable view, or object of an extension, this is; None if it is none "
     "of the unit's."},
    {"note_user_edits", FP_METHOD(unit_note_user_edits), METH_O,
     "note_user_edits($self, drops_zeros, /)\n--\n\n"
     "Between passes: read the edits of users to .grad while it shows the accumulated gradient. Return unreduced.\n\n"
     "drops_zeros: drop gradients that were set to zeros in place. All ranks pass the same value, or raise."},
    {"accumulated", FP_METHOD(fp_unit_accumulated), METH_NOARGS,
     "accumulated($self, /)\n--\n\nReturn a list with the accumulated gradient of each flat parameter, or None. "
     "It is 1-D and unsharded; nested: this rank's part, summed over the ranks that share the secondary shard."},
    {"show_accumulated", FP_METHOD(fp_unit_show_accumulated), METH_O,
     "show_accumulated($self, shown, /)\n--\n\n"
     "Between passes: let .grad show the accumulated gradient (True), or the deferred reduced gradient again (False). "
     "Return whether there is an accumulated gradient."},
    {"set_accumulated", FP_METHOD(fp_unit_set_accumulated), METH_FASTCALL,
     "set_accumulated($self, accumulated, frozen_share, /)\n--\n\n"
     "Between passes: replace the accumulated gradients, and do not show them. A refused call changes nothing.\n\n"
     "accumulated: a tensor for each flat parameter, as accumulated() returns it, or None. "
     "frozen_share: for each flat parameter a tuple of bools: the parameter is frozen and has a part in it."},
    {"drive", FP_METHOD(fp_by_hand_drive), METH_FASTCALL,
     "drive($self, leaf, of_shards, of_params, sliced, /)\n--\n\n"
     "Prepare a unit without hooks, whose steps a driver calls one by one. Return the unsharded tensor. Call it "
     "once.\n\nleaf: a FlatParameter, which gets the gradient of the views. "
     "of_shards, of_params: objects that watch the gathers over the two groups. "
     "looks = False is set before a gather. look() is called every 300 ms of a wait, if sliced; explain(message) after "
     "a failed one."},
    {"gather", FP_METHOD(fp_by_hand_gather), METH_O,
     "gather($self, refresh, /)\n--\n\n"
     "By hand: begin to gather from the shards (refresh), or from the secondary shards. "
     "Return the unsharded tensor if it is a new one, because the memory of the last one is borrowed; else None."},
    {"wait", FP_METHOD(fp_by_hand_wait), METH_NOARGS, "wait($self, /)\n--\n\nBy hand: wait for the gather."},
    {"show_views", FP_METHOD(fp_by_hand_show_views), METH_FASTCALL,
     "show_views($self, tensors, may_replace, /)\n--\n\n"
     "By hand: set leaf.data to the unsharded tensor, give the modules its views, and put them into the list "
     "tensors.\n\nmay_replace: make new views if a user has put hooks on them."},
    {"show_params", FP_METHOD(fp_by_hand_show_params), METH_FASTCALL,
     "show_params($self, whole, moves, /)\n--\n\n"
     "By hand: set leaf.data to whole, a 1-D tensor, or if that is None to the shard, and give the modules the "
     "parameters.\n\nmoves: set the data of the parameters to their places in it, too."},
    {"take_written", FP_METHOD(fp_by_hand_take_written), METH_NOARGS,
     "take_written($self, /)\n--\n\nBy hand, after a forward: copy what it wrote to the views into the shard."},
    {"cut_secondary_shard", FP_METHOD(fp_by_hand_cut), METH_NOARGS,
     "cut_secondary_shard($self, /)\n--\n\n"
     "By hand: copy the secondary shard from the gathered values, unless there is one. Return it, or None."},
    {"forget_gathered", FP_METHOD(fp_by_hand_forget), METH_NOARGS,
     "forget_gathered($self, /)\n--\n\nBy hand: the gathered values, and the secondary shard, are out of date."},
    {"versions", FP_METHOD(fp_by_hand_versions), METH_NOARGS,
     "versions($self, /)\n--\n\nBy hand: return a number that changes with each write to the shard that torch counts."},
    {"set_grads_of_views", FP_METHOD(fp_by_hand_set_grads), METH_O,
     "set_grads_of_views($self, grad, /)\n--\n\n"
     "By hand: set .grad of each view to its place in grad, a 1-D unsharded tensor."},
    {"show_sum", FP_METHOD(fp_by_hand_show_sum), METH_O,
     "show_sum($self, sum, /)\n--\n\n"
     "By hand: let .grad show sum, the accumulated gradient; it is not copied. None: leaf.grad shows the reduced "
     "gradient."},
    {"add_reduced", FP_METHOD(fp_by_hand_add_reduced), METH_O,
     "add_reduced($self, reduced, /)\n--\n\n"
     "By hand: add the pieces of reduced, the gradient of the shard, to .grad of the parameters, and let leaf.grad "
     "show it."},
    {NULL, NULL, 0, NULL},
};

/* The offsets of the strings that Python may set. A getter or setter gets one as closure. */
enum { NAME = offsetof(fp_unit, name), REASON = offsetof(fp_unit, reason) };

static PyObject *
unit_get_text(PyObject *self, void *closure)
{
    return Py_NewRef(*(PyObject **)((char *)self + (intptr_t)closure));
}

static int
unit_set_text(PyObject *self, PyObject *text, void *closure)
{
    if (text == NULL || !PyUnicode_Check(text)) {
        return fp_raise(PyExc_TypeError, "expected the %s to be a str, got %.200s",
                        (intptr_t)closure == NAME ? "name" : "reason",
                        text == NULL ? "nothing" : Py_TYPE(text)->tp_name);
    }
    PyObject *shown = fp_as_text(text);
    FP_NEED(shown);
    Py_SETREF(*(PyObject **)((char *)self + (intptr_t)closure), shown);
    return 0;
}

static PyGetSetDef unit_getset[] = {
    {"name", unit_get_text, unit_set_text, "The name of the unit in messages.", (void *)(intptr_t)NAME},
    {"is_written", FP_GETTER(unit_any), NULL,
     "Whether a user has changed a view in place, or its data, since the last sync_user_writes().", &ask_written},
    {"has_frozen", FP_GETTER(unit_any), NULL, "Whether a flat parameter has no parameter that requires grad.",
     &ask_frozen},
    {"unreduced", FP_GETTER(unit_any), NULL,
     "Whether .grad shows an accumulated gradient that must be reduced before an optimizer steps.", &ask_unreduced},
    {"is_gathered", FP_GETTER(fp_by_hand_is_gathered), NULL,
     "By hand: whether the unit is gathered, or its gather is under way.", NULL},
    {"reason", unit_get_text, unit_set_text, "The message of the RuntimeError when freed data is read.",
     (void *)(intptr_t)REASON},
    {"shows_views", FP_GETTER(unit_shows_views), NULL, "Whether the modules have the views now.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef unit_members[] = {
    {"root", _Py_T_OBJECT, offsetof(fp_unit, root), Py_READONLY, "The Root that the unit has joined, or None."},
    {"suspect", Py_T_INT, offsetof(fp_unit, suspect), 0,
     "1: the shard may have been written without a count by torch; the next pass compares it with the gathered "
     "values."},
    {"reduced", _Py_T_OBJECT, offsetof(fp_unit, reduced), 0,
     "None, or reduced(index): called when .grad has the reduced gradient of the flat parameter of this index."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot unit_slots[] = {
    {Py_tp_doc, "Unit(name, flat_params, reshard_after_forward, on_param_replaced, reason)\n--\n\n"
                "One unit: its flat parameters, and its steps in a forward and a backward.\n\n"
                "flat_params: a FlatParamSpec for each flat parameter.\n"
                "on_param_replaced(): called when a user has moved a parameter's data, or replaced a parameter.\n"
                "reason: the message of the RuntimeError when freed data is read."},
    {Py_tp_new, unit_new},
    {Py_tp_dealloc, unit_dealloc},
    {Py_tp_finalize, unit_finalize},
    {Py_tp_traverse, unit_traverse},
    {Py_tp_clear, unit_clear},
    {Py_tp_methods, unit_methods},
    {Py_tp_getset, unit_getset},
    {Py_tp_members, unit_members},
    {0, NULL},
};

PyType_Spec fp_unit_type = FP_TYPE("Unit", fp_unit, Py_TPFLAGS_HAVE_GC, unit_slots);

/* ---- functions of the module ---- */

static PyObject *
note_optimizer_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (!fp_is_of(args[i], unit_dealloc)) {
            return PyErr_Format(PyExc_TypeError, "expected a Unit, got %.200s", Py_TYPE(args[i])->tp_name);
        }
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        fp_root *root = ((fp_unit *)args[i])->root;
        if (root != NULL && !fp_root_in_backward(root)) {
            root->optimizer_steps++;
        }
    }
    fp_optimizer_steps++;
    PyObject *units = fp_unit_list_copy(&full_units);
    int status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        status = fp_unshard_hide_old((fp_unit *)PyTuple_GET_ITEM(units, s));
    }
    Py_XDECREF(units);
    return fp_none_unless(status);
}

static PyObject *
not_steppable(PyObject *module, PyObject *ignored)
{
    return PyLong_FromLongLong(fp_flat_param_not_steppable);
}

static PyObject *
count_registration_hooks(PyObject *module, PyObject *object)
{
    int64_t more;
    FP_TRY_NULL(fp_as_int64(object, &more));
    fp_attributes_own_hooks += more;
    Py_RETURN_NONE;
}

static PyObject *
set_grad(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("set_grad", nargs, 2));
    return fp_none_unless(fp_gradients_set(args[0], args[1]));
}

PyMethodDef fp_unit_methods_of_module[] = {
    {"set_grad", FP_METHOD(set_grad), METH_FASTCALL,
     "set_grad($module, tensor, grad, /)\n--\n\n"
     "Set tensor.grad to grad, a tensor or None, without torch's checks of shape, dtype and device."},
    {"note_optimizer_step", FP_METHOD(note_optimizer_step), METH_FASTCALL,
     "note_optimizer_step($module, /, *units)\n--\n\n"
     "An optimizer that holds parameters of these units has stepped: the gathered data of their models may be out of "
     "date. Units that stay gathered hide such data."},
    {"count_registration_hooks", count_registration_hooks, METH_O,
     "count_registration_hooks($module, more, /)\n--\n\n"
     "Add more to the number of global hooks on parameter registration that are flatparam's. "
     "These need not see the values that C puts into modules."},
    {"not_steppable", not_steppable, METH_NOARGS,
     "not_steppable($module, /)\n--\n\n"
     "Return the number of flat parameters whose .grad an optimizer must not step with: it is not reduced, or has "
     "another dtype."},
    {NULL, NULL, 0, NULL},
};
