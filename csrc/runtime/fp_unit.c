/* runtime/fp_unit.c -- the type _C.Unit: one unit. What a forward and a backward do to it is in fp_forward.c and fp_backward.c. */
#include "runtime/fp_unit.h"

#include <stddef.h>
#include <structmember.h>

#include "core/fp_alloc.h"
#include "runtime/fp_model_trace.h"
#include "runtime/fp_backward.h"
#include "runtime/fp_forward.h"
#include "runtime/fp_iteration.h"
#include "runtime/fp_reduce_order.h"
#include "runtime/fp_root.h"
#include "runtime/fp_unshard.h"

/* ---- construction ---- */

static PyObject *
step_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"name", "parts", "reshard_after_forward", "moved", "reason", NULL};
    PyObject *name, *parts, *moved, *reason;
    int reshard_after_forward;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UO!pOU:Unit", keywords, &name, &PyTuple_Type, &parts,
                                     &reshard_after_forward, &moved, &reason)) {
        return NULL;
    }
    fp_unit *step = (fp_unit *)type->tp_alloc(type, 0);
    if (step == NULL) {
        return NULL;
    }
    PyObject_GC_UnTrack(step); /* nobody finds it before it is complete */
    step->name = Py_NewRef(name);
    step->moved = Py_NewRef(moved);
    step->reason = Py_NewRef(reason);
    step->reshard_after_forward = reshard_after_forward;
    step->task = -1;
    step->position = -1;
    step->parts = fp_calloc((size_t)PyTuple_GET_SIZE(parts), sizeof *step->parts);
    if (step->parts == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    const char *text = PyUnicode_AsUTF8(name);
    step->ref = text == NULL ? NULL : fp_params_ref_new(step, text, &fp_backward_unit_calls);
    if (step->ref == NULL) {
        goto fail;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(parts); k++) {
        step->n_parts++;
        if (fp_flat_param_read(&step->parts[k], PyTuple_GET_ITEM(parts, k)) < 0) {
            goto fail;
        }
        step->sharded = step->sharded || step->parts[k].shard_group != NULL;
        step->copied = step->copied || step->parts[k].copied;
    }
    PyObject_GC_Track(step);
    return (PyObject *)step;
fail:
    Py_DECREF(step);
    return NULL;
}

static int
step_traverse(PyObject *self, visitproc visit, void *arg)
{
    fp_unit *step = (fp_unit *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(step->run);
    Py_VISIT(step->moved);
    Py_VISIT(step->reduced);
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        const int status = fp_flat_param_traverse(&step->parts[k], visit, arg);
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

static int
step_clear(PyObject *self)
{
    fp_unit *step = (fp_unit *)self;
    fp_iteration_leave_root(step);
    Py_CLEAR(step->moved);
    Py_CLEAR(step->reduced);
    return 0; /* parts stay usable for hooks until the end */
}

/* As autograd keeps parameters: a graph that waits for its backward has the unit until it is gone. */
static void
step_finalize(PyObject *self)
{
    fp_unit *step = (fp_unit *)self;
    if (step->ref != NULL && step->run != NULL) {
        (void)fp_params_ref_keep(step->ref, self);
    }
}

static void
step_dealloc(PyObject *self)
{
    fp_unit *step = (fp_unit *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (PyObject_CallFinalizerFromDealloc(self) < 0) {
        return;
    }
    PyObject_GC_UnTrack(self);
    fp_params_ref_drop(step->ref);
    fp_iteration_leave_root(step);
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param_free(&step->parts[k]);
    }
    fp_free(step->parts);
    Py_CLEAR(step->name);
    Py_CLEAR(step->moved);
    Py_CLEAR(step->reduced);
    Py_CLEAR(step->reason);
    Py_CLEAR(step->opaque);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- methods ---- */

static PyObject *
step_join(PyObject *self, PyObject *run_object)
{
    fp_unit *step = (fp_unit *)self;
    if (!fp_root_check(run_object)) {
        PyErr_Format(PyExc_TypeError, "expected a Root, got %.200s", Py_TYPE(run_object)->tp_name);
        return NULL;
    }
    fp_root *run = (fp_root *)run_object;
    if (step->run == run) {
        Py_RETURN_NONE;
    }
    if (step->depth > 0 || (step->run != NULL && step->run->in_backward)) {
        PyErr_Format(PyExc_RuntimeError, "%U cannot join another model in the middle of a pass", step->name);
        return NULL;
    }
    fp_unit **steps = fp_calloc((size_t)run->n_steps + 1, sizeof *steps);
    if (steps == NULL) {
        return PyErr_NoMemory();
    }
    if (fp_reduce_order_join(run, step) < 0) {
        fp_free(steps);
        return NULL;
    }
    fp_iteration_leave_root(step);
    for (Py_ssize_t s = 0; s < run->n_steps; s++) {
        steps[s] = run->steps[s];
    }
    steps[run->n_steps++] = step;
    fp_free(run->steps);
    run->steps = steps;
    step->run = (fp_root *)Py_NewRef(run);
    step->full_pass = step->entered_pass = -1;
    step->keep = 0;
    run->copies = run->copies || step->copied;
    Py_RETURN_NONE;
}

/* follow(which, follower, number, sliced); which: the group that shares the unit, replicates it, shares the copy, refreshes
 * it; and these once more for a further follower that is told of it. */
enum { GROUPS = 4 };
static PyObject *
step_follow(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_unit *step = (fp_unit *)self;
    int64_t which, number;
    int sliced;
    if (fp_check_nargs("follow", nargs, 4) < 0 || fp_as_int64(args[0], &which) < 0 ||
        fp_as_int64(args[2], &number) < 0 || fp_as_bool(args[3], &sliced) < 0) {
        return NULL;
    }
    if (which < 0 || which >= GROUPS * FP_WATCHERS || number < 0 || number > UINT32_MAX - step->n_parts) {
        PyErr_Format(PyExc_ValueError, "expected a group from 0 to 7 and a number of 32 bits, got %lld and %lld",
                     (long long)which, (long long)number);
        return NULL;
    }
    if (!fp_model_trace_check(args[1])) {
        PyErr_Format(PyExc_TypeError, "expected a ModelTrace, got %.200s", Py_TYPE(args[1])->tp_name);
        return NULL;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        const fp_flat_param *part = &step->parts[k];
        fp_group *const groups[] = {part->shard_group, part->replicate_group, part->param_group, part->refresh_group};
        fp_group *group = groups[which % GROUPS];
        if (group != NULL) {
            fp_group_watch(group, (int)(which / GROUPS), args[1], &fp_model_trace_calls, (uint32_t)(number + k),
                           sliced);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
step_pre_forward(PyObject *self, PyObject *ignored)
{
    fp_range *range = fp_range_begin("pre_forward", ((fp_unit *)self)->name);
    PyObject *result = fp_forward_pre(self, ignored);
    fp_range_end(range);
    return result;
}

static PyObject *
step_post_forward(PyObject *self, PyObject *output)
{
    fp_range *range = fp_range_begin("post_forward", ((fp_unit *)self)->name);
    PyObject *result = fp_forward_post(self, output);
    fp_range_end(range);
    return result;
}

static PyObject *
step_release(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    return fp_unshard_release(step) < 0 || fp_unshard_show_params(step) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
step_make_views(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_unshard_make_views(step, k) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* put(views): let the modules have the views, or the original parameters, whatever they have now. */
static PyObject *
step_put(PyObject *self, PyObject *argument)
{
    fp_unit *step = (fp_unit *)self;
    int views;
    if (fp_as_bool(argument, &views) < 0) {
        return NULL;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        if ((views ? part->views : part->params) != NULL &&
            (fp_flat_param_show(part, views) < 0 || fp_flat_param_list_params(part) < 0)) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
step_look_over(PyObject *self, PyObject *ignored)
{
    return fp_unshard_look_over((fp_unit *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* adopt(part, index, param) */
static PyObject *
step_adopt(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_unit *step = (fp_unit *)self;
    int64_t k, i;
    if (fp_check_nargs("adopt", nargs, 3) < 0 || fp_as_int64(args[0], &k) < 0 || fp_as_int64(args[1], &i) < 0) {
        return NULL;
    }
    if (k < 0 || k >= step->n_parts) {
        PyErr_Format(PyExc_IndexError, "expected a part below %zd, got %lld", step->n_parts, (long long)k);
        return NULL;
    }
    return fp_flat_param_adopt(&step->parts[k], (Py_ssize_t)i, args[2]) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
step_is_written(PyObject *self, void *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    int written = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        const fp_flat_param *part = &step->parts[k];
        written =
            written || (part->views != NULL && fp_flat_buffer_is_written(part->flat, fp_flat_param_items(part->views)));
    }
    return PyBool_FromLong(written);
}

static PyObject *
step_compute_in_full(PyObject *self, PyObject *argument)
{
    fp_unit *step = (fp_unit *)self;
    int in_full;
    if (fp_as_bool(argument, &in_full) < 0) {
        return NULL;
    }
    if (step->depth > 0 || (step->run != NULL && step->run->in_backward)) {
        PyErr_Format(PyExc_RuntimeError, "%U cannot change its precision in the middle of a pass", step->name);
        return NULL;
    }
    if (fp_unshard_release(step) < 0 || fp_unshard_show_params(step) < 0) {
        return NULL;
    }
    step->full_pass = -1;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (fp_flat_buffer_wait(step->parts[k].flat) < 0) {
            return NULL;
        }
        fp_flat_buffer_compute_in_full(step->parts[k].flat, in_full);
    }
    Py_RETURN_NONE;
}

static PyObject *
step_average_elsewhere(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_buffer_average_elsewhere(step->parts[k].flat);
    }
    Py_RETURN_NONE;
}

static PyObject *
step_invalidate(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    step->keep = 0;
    step->full_pass = -1;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        step->parts[k].synced = -1;
    }
    Py_RETURN_NONE;
}

static PyObject *
step_doubt(PyObject *self, PyObject *ignored)
{
    ((fp_unit *)self)->doubted = 1;
    Py_RETURN_NONE;
}

static PyObject *
step_has_frozen(PyObject *self, void *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    int frozen = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        frozen = frozen || step->parts[k].untracked;
    }
    return PyBool_FromLong(frozen);
}

static PyObject *
step_is_partly_full(PyObject *self, void *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    int full = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        full = full || fp_flat_buffer_is_allocated(step->parts[k].flat);
    }
    return PyBool_FromLong(full);
}

static PyObject *
step_unreduced(PyObject *self, void *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    int unreduced = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        unreduced = unreduced || step->parts[k].unreduced;
    }
    return PyBool_FromLong(unreduced);
}

static PyObject *
step_settle(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    const char *name = PyUnicode_AsUTF8(step->name);
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (name == NULL || fp_flat_param_settle(&step->parts[k], name) < 0) {
            return NULL;
        }
    }
    return step_unreduced(self, NULL);
}

static PyObject *
step_shows_views(PyObject *self, void *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    return PyBool_FromLong(step->n_parts > 0 && step->parts[0].shows >= FP_SHOWS_VIEWS);
}

static PyObject *
step_views(PyObject *self, PyObject *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    PyObject *list = PyList_New(step->n_parts);
    for (Py_ssize_t k = 0; list != NULL && k < step->n_parts; k++) {
        PyObject *views = step->parts[k].views;
        PyList_SET_ITEM(list, k, Py_NewRef(views == NULL ? Py_None : views));
    }
    return list;
}

static PyObject *
step_read_kept(PyObject *self, PyObject *ignored)
{
    fp_unit *step = (fp_unit *)self;
    PyObject *list = PyList_New(step->n_parts);
    for (Py_ssize_t k = 0; list != NULL && k < step->n_parts; k++) {
        PyObject *kept = fp_flat_buffer_kept(step->parts[k].flat);
        if (kept == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, k, kept);
        }
    }
    return list;
}

static PyObject *
step_kept_bytes(PyObject *self, PyObject *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    int64_t device = 0, host = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        int64_t on_device, on_host;
        fp_flat_buffer_kept_bytes(step->parts[k].flat, &on_device, &on_host);
        device += on_device;
        host += on_host;
    }
    return Py_BuildValue("LL", (long long)device, (long long)host);
}

static PyObject *
step_copies(PyObject *self, PyObject *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    PyObject *list = PyList_New(step->n_parts);
    for (Py_ssize_t k = 0; list != NULL && k < step->n_parts; k++) {
        PyObject *copy = fp_flat_buffer_copy(step->parts[k].flat);
        if (copy == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, k, copy);
        }
    }
    return list;
}

static PyObject *
step_is_full(PyObject *self, void *ignored)
{
    const fp_unit *step = (fp_unit *)self;
    int full = step->n_parts > 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        full = full && fp_flat_buffer_is_allocated(step->parts[k].flat);
    }
    return PyBool_FromLong(full);
}

static PyObject *
step_reason(PyObject *self, void *ignored)
{
    return Py_NewRef(((fp_unit *)self)->reason);
}

static int
step_set_reason(PyObject *self, PyObject *reason, void *ignored)
{
    if (reason == NULL || !PyUnicode_Check(reason)) {
        PyErr_SetString(PyExc_TypeError, "expected reason to be a str");
        return -1;
    }
    Py_XSETREF(((fp_unit *)self)->reason, Py_NewRef(reason));
    return 0;
}

static PyMethodDef step_methods[] = {
    {"join", step_join, METH_O, "join($self, run, /)\n--\n\nBecome a unit of the tree that run is of."},
    {"follow", FP_FASTCALL(step_follow), METH_FASTCALL,
     "follow($self, which, follower, number, sliced, /)\n--\n\nTell a ModelTrace of the collectives over a group: 0 "
     "the "
     "one "
     "that shares the unit, 1 the one that replicates it, 2 the one that shares the copy, 3 the one that refreshes "
     "it;\n4 to 7: the same for a further ModelTrace. "
     "Its parts are called number and on; sliced: tell it also "
     "while one is waited for."},
    {"pre_forward", step_pre_forward, METH_NOARGS,
     "pre_forward($self, /)\n--\n\nGather, and let the modules have the views. The outermost unit begins a pass."},
    {"post_forward", step_post_forward, METH_O,
     "post_forward($self, output, /)\n--\n\nPut hooks on the tensors in output, free what is not kept; returns "
     "output."},
    {"abort_forward", fp_forward_abort, METH_NOARGS,
     "abort_forward($self, /)\n--\n\nInstead of post_forward, or after it, when there was an exception."},
    {"expect_inputs", fp_forward_expect_inputs, METH_NOARGS,
     "expect_inputs($self, /)\n--\n\nA forward whose inputs require grad begins; whether to call inputs_done for it."},
    {"inputs_done", fp_forward_inputs_done, METH_NOARGS,
     "inputs_done($self, /)\n--\n\nThe gradients of its inputs are there: free what is frozen."},
    {"release", step_release, METH_NOARGS,
     "release($self, /)\n--\n\nFree the unsharded data; the modules have their parameters again."},
    {"make_views", step_make_views, METH_NOARGS,
     "make_views($self, /)\n--\n\nMake the views for the shard's dtype and device; with no original parameters, let "
     "the "
     "modules have them."},
    {"put", step_put, METH_O,
     "put($self, views, /)\n--\n\nLet the modules have the views, or the original parameters, whatever they have now."},
    {"look_over", step_look_over, METH_NOARGS,
     "look_over($self, /)\n--\n\nBetween passes: take what users have written to parameters and views, or put in their "
     "place, into the shards."},
    {"adopt", FP_FASTCALL(step_adopt), METH_FASTCALL,
     "adopt($self, part, index, param, /)\n--\n\nLet param be an original parameter, in place of the one there was."},
    {"invalidate", step_invalidate, METH_NOARGS,
     "invalidate($self, /)\n--\n\nThe shard was written: what is gathered is out of date."},
    {"doubt", step_doubt, METH_NOARGS,
     "doubt($self, /)\n--\n\nThe shard may have been written without torch counting it: the next pass compares it with "
     "what it has gathered from."},
    {"compute_in_full", step_compute_in_full, METH_O,
     "compute_in_full($self, in_full, /)\n--\n\nBetween passes: from now on compute and reduce in the shard's "
     "precision, "
     "or again as the parts say."},
    {"average_elsewhere", step_average_elsewhere, METH_NOARGS,
     "average_elsewhere($self, /)\n--\n\nFrom now on gradients are summed over ranks, not averaged: a hook does that."},
    {"views", step_views, METH_NOARGS, "views($self, /)\n--\n\nThe views of each part, None before there are any."},
    {"settle", step_settle, METH_NOARGS,
     "settle($self, /)\n--\n\nBetween passes: what the user has done to the gradients that no_sync has kept counts. "
     "Returns unreduced."},
    {"kept", step_read_kept, METH_NOARGS,
     "kept($self, /)\n--\n\nThe gradient that no_sync has kept for each part, or None: unsharded; nested: this rank's "
     "part of it, added over the ranks that share the parameter."},
    {"kept_bytes", step_kept_bytes, METH_NOARGS,
     "kept_bytes($self, /)\n--\n\nThe bytes of kept gradients on the device, and of their buffers in host memory."},
    {"copies", step_copies, METH_NOARGS,
     "copies($self, /)\n--\n\nThis rank's part of the copy that forward and backward gather from, for each part, or "
     "None."},
    {NULL, NULL, 0, NULL},
};

static PyObject *
step_name(PyObject *self, void *ignored)
{
    return Py_NewRef(((fp_unit *)self)->name);
}

static int
step_set_name(PyObject *self, PyObject *name, void *ignored)
{
    fp_unit *step = (fp_unit *)self;
    if (name == NULL || !PyUnicode_Check(name) || PyUnicode_AsUTF8(name) == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "expected the name to be a str, got %.200s",
                         name == NULL ? "nothing" : Py_TYPE(name)->tp_name);
        }
        return -1;
    }
    Py_SETREF(step->name, Py_NewRef(name));
    return 0;
}

static PyGetSetDef step_getset[] = {
    {"name", step_name, step_set_name, "What messages call the unit.", NULL},
    {"is_full", step_is_full, NULL, "Whether the unsharded data have memory.", NULL},
    {"is_partly_full", step_is_partly_full, NULL, "Whether some of the unsharded data have memory.", NULL},
    {"is_written", step_is_written, NULL,
     "Whether somebody has changed a view in place, or its data, since that was looked over.", NULL},
    {"has_frozen", step_has_frozen, NULL, "Whether some part has no parameter that requires grad.", NULL},
    {"unreduced", step_unreduced, NULL,
     "Whether .grad is what no_sync has kept, and not what an optimizer is to step with.", NULL},
    {"reason", step_reason, step_set_reason, "What is said when freed data is used.", NULL},
    {"shows_views", step_shows_views, NULL, "Whether the modules have the views now.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef step_members[] = {
    {"run", T_OBJECT, offsetof(fp_unit, run), READONLY, "The Root it has joined, or None."},
    {"reduced", T_OBJECT, offsetof(fp_unit, reduced), 0,
     "None, or reduced(index): called when the gradient of a part was reduced and is in .grad."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot step_slots[] = {
    {Py_tp_doc, "Unit(name, parts, reshard_after_forward, moved, reason)\n--\n\n"
                "One unit: its flat parameters, and what happens to them in a forward and a backward.\n\n"
                "parts: a tuple for each flat parameter (see fp_flat_param.c, fp_flat_param_read); moved: called when "
                "a parameter's data\n"
                "is not where it was put; reason: what is said when freed data is used."},
    {Py_tp_new, step_new},
    {Py_tp_dealloc, step_dealloc},
    {Py_tp_finalize, step_finalize},
    {Py_tp_traverse, step_traverse},
    {Py_tp_clear, step_clear},
    {Py_tp_methods, step_methods},
    {Py_tp_getset, step_getset},
    {Py_tp_members, step_members},
    {0, NULL},
};

static PyType_Spec step_spec = {
    .name = "flatparam._C.Unit",
    .basicsize = sizeof(fp_unit),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = step_slots,
};

PyObject *
fp_unit_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &step_spec, NULL);
}

/* ---- functions of the module ---- */

static PyObject *
note_optimizer_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    fp_optimizer_steps++;
    Py_RETURN_NONE;
}

static PyObject *
unfit(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return fp_check_nargs("unfit", nargs, 0) < 0 ? NULL : PyLong_FromLongLong(fp_flat_param_unfit);
}

static PyObject *
note_registration_hook(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (fp_check_nargs("note_registration_hook", nargs, 0) < 0) {
        return NULL;
    }
    fp_attributes_own_hooks++;
    Py_RETURN_NONE;
}

static PyObject *
set_grad(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (fp_check_nargs("set_grad", nargs, 2) < 0 || fp_gradients_set(args[0], args[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef fp_unit_methods_of_module[] = {
    {"set_grad", FP_FASTCALL(set_grad), METH_FASTCALL,
     "set_grad($module, tensor, grad, /)\n--\n\ntensor.grad = grad, also of another shape or dtype than torch allows."},
    {"note_optimizer_step", FP_FASTCALL(note_optimizer_step), METH_FASTCALL,
     "note_optimizer_step($module, *ignored)\n--\n\nWhat a no_sync backward left full is out of date now."},
    {"note_registration_hook", FP_FASTCALL(note_registration_hook), METH_FASTCALL,
     "note_registration_hook($module, /)\n--\n\nA global hook on parameter registration is flatparam's own, and need "
     "not see what C puts into modules."},
    {"unfit", FP_FASTCALL(unfit), METH_FASTCALL,
     "unfit($module, /)\n--\n\nHow many flat parameters show a gradient kept in no_sync that is to be reduced, or of "
     "another dtype than theirs."},
    {NULL, NULL, 0, NULL},
};
