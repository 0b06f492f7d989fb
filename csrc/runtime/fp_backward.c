/* runtime/fp_backward.c -- the callbacks of autograd for a unit and for the model:
 *
 *   fp_backward_come_to   a hook on a unit's output: its gradient is there. Gathers the unit
 *   gradients_ready       the node behind a unit's views: all their gradients are there. Frees the unit, reduces the gradients
 *   before_accumulation   a hook on a parameter: autograd is about to add to .grad, past the views
 *   param_gradient        the same where nothing is sharded: the unit takes the gradient
 *   inputs_done           the gradients of a forward's inputs are there. Frees frozen flat parameters
 *   finish                the end of the backward, once for the model
 *
 * The first callback of a backward asks the engine to call finish. Units with a secondary shard are reduced in an order that
 * does not depend on the gradients of this rank (fp_reduce_order.c). */
#include "runtime/fp_backward.h"

#include "runtime/fp_check.h"
#include "runtime/fp_iteration.h"
#include "runtime/fp_members.h"
#include "runtime/fp_trace_py.h"
#include "runtime/fp_reduce_order.h"
#include "runtime/fp_reduction.h"
#include "runtime/fp_unshard.h"

/* If this is the first callback of a backward: recover from a backward that raised, note the settings of this one, and let the
 * reduce order begin. Else do nothing. RuntimeError for another thread. */
static int
begin_backward(fp_unit *unit)
{
    fp_root *root = unit->root;
    FP_TRY(fp_iteration_check_thread(unit));
    if (fp_root_in_backward(root) && fp_graph_is_running(root->ref)) {
        return 0;
    }
    if (fp_root_in_backward(root) && fp_iteration_recover(root) < 0) { /* the backward before it raised */
        return -1;
    }
    FP_TRY(fp_graph_at_end(root->ref));
    if (fp_graph_grad_enabled()) {
        root->phase = FP_PHASE_RECORDS;
    }
    else {
        root->phase = fp_graph_is_retained() ? FP_PHASE_RETAINS : FP_PHASE_FREES;
    }
    root->caller = fp_graph_caller();
    fp_members_forget(root);
    return fp_reduce_order_begin(root);
}

/* Raise if a graph that an earlier backward has recorded needs parameter values that were changed since. Nodes of that
 * graph may have run before any hook of the unit, so autograd cannot refuse them. */
static int
check_accumulated(const fp_unit *unit)
{
    for (Py_ssize_t k = 0; unit->for_graph && k < unit->n_flat_params; k++) {
        if (fp_flat_param_versions(&unit->flat_params[k]) != unit->flat_params[k].versions) {
            return fp_raise(
                PyExc_RuntimeError,
                "%U: its parameters were changed between a backward with create_graph=True and the backward of its "
                "gradients, which needs the old values: step the optimizer, or write to parameters, after both",
                unit->name);
        }
    }
    return 0;
}

/* Start to gather the unit that backward comes to next: the one before this unit in the post-forward order. With a reduce
 * order the cursor counts, if it is further: units to which no gradient came were passed over. */
static int
prefetch_backward(fp_unit *unit)
{
    fp_root *root = unit->root;
    const Py_ssize_t at = root->reduce_order.n > 0 && root->cursor < unit->position ? root->cursor : unit->position;
    const Py_ssize_t next = at - 1;
    return next < 0 || next >= root->order.n || root->order.items[next] == NULL
               ? 0
               : fp_unshard_prefetch(root->order.items[next]);
}

/* 1: this backward has come to the unit. */
static int
has_come(const fp_unit *unit)
{
    return unit->pass == FP_PASS_BACKWARD || unit->pass == FP_PASS_RECOMPUTING;
}

static int
before_backward_of(fp_unit *unit, uint64_t began)
{
    fp_root *root = unit->root;
    const int task = fp_graph_task();
    FP_TRY(begin_backward(unit));
    fp_unit_check(unit, "pre_backward");
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_buffer_run_after(unit->flat_params[k].flat, began);
    }
    if (has_come(unit) && unit->task == task && unit->state == FP_UNIT_UNSHARDED) {
        return 0; /* a further output of the same forward */
    }
    const int passed = fp_reduce_order_reach(unit);
    if (passed != 0) {
        return passed < 0 ? -1 : 0;
    }
    FP_TRY(fp_iteration_move(unit, FP_PASS_BEGIN_BACKWARD));
    unit->task = task;
    FP_TRY(check_accumulated(unit));
    FP_TRY(fp_unshard_check_unchanged(unit));
    FP_TRY(fp_unshard_make_full(unit));
    FP_TRY(fp_reduce_order_start_reload(root));
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        const int hidden = unit->flat_params[k].shows == FP_SHOWS_PARAMS;
        if (hidden && fp_flat_param_show_views(&unit->flat_params[k]) < 0) { /* a checkpoint may recompute a part */
            return -1;
        }
    }
    return (root->prefetch & FP_PREFETCH_PRE) ? prefetch_backward(unit) : 0;
}

/* The part of a callback that works on units, under the root's lock. It keeps the unit and the root alive. */
typedef struct {
    fp_unit *unit;
    fp_root *root;
    fp_range *range;
} backward_section;

/* Take the root's lock. what: the name of the section for profilers. */
static backward_section
begin_section(fp_unit *unit, const char *what)
{
    Py_INCREF(unit);
    fp_iteration_enter(unit->root);
    return (backward_section){.unit = unit, .root = unit->root, .range = fp_range_begin(what, unit->name)};
}

/* Give the lock back, and return status. */
static int
end_section(backward_section ours, int status)
{
    fp_range_end(ours.range);
    fp_iteration_leave(ours.root);
    Py_DECREF(ours.unit);
    return status;
}

/* Check before taking the lock: a user hook that holds the lock may be waiting for this thread, which would be a deadlock. */
static int
check_may_begin_section(const fp_unit *unit)
{
    FP_TRY(fp_iteration_check_joined(unit));
    return fp_iteration_check_thread(unit);
}

int
fp_backward_come_to(void *object, uint64_t began)
{
    FP_TRY(check_may_begin_section(object));
    const backward_section ours = begin_section(object, "pre_backward");
    const int status = before_backward_of(ours.unit, began);
    fp_unit_check(ours.unit, "the end of pre_backward");
    return end_section(ours, status);
}

/* 1: another flat parameter of the unit will get gradients in this backward, and the group's backend can reduce all in one
 * call. */
static int
waits_for_others(const fp_unit *unit, const fp_flat_param *flat_param)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        const fp_flat_param *other = &unit->flat_params[k];
        if (other != flat_param && other->reduce_slot == FP_REDUCE_SLOT_OPEN && !fp_flat_param_is_untracked(other) &&
            fp_flat_buffer_is_reached(other->flat)) {
            return fp_unit_can_join(unit, FP_JOIN_REDUCTIONS);
        }
    }
    return 0;
}

/* Pack the gradients of a flat parameter, and move its slot. */
static int
pack(fp_unit *unit, fp_flat_param *flat_param, fp_gradients *gradients, fp_reduce_slot_event event)
{
    FP_TRY(fp_reduction_finish(unit, flat_param)); /* a reduction of another graph in this backward */
    FP_TRY(fp_flat_buffer_pack(flat_param->flat, gradients, flat_param->shard));
    return fp_reduce_order_move(unit, flat_param, event);
}

/* Reduce the gradients of a flat parameter that has no place in the reduce order, together with the others of its unit:
 * pack them while others are to come, and start the reductions with the last one. */
static int
reduce_now(fp_unit *unit, fp_flat_param *flat_param, fp_gradients *gradients)
{
    const int first = flat_param->reduce_slot == FP_REDUCE_SLOT_OPEN; /* of this backward */
    const int waits = unit->n_flat_params > 1 && first ? waits_for_others(unit, flat_param) : 0;
    FP_TRY(waits);
    if (!first && fp_reduction_start_packed(unit) < 0) {
        return -1;
    }
    int is_last = 0; /* of several */
    for (Py_ssize_t k = 0; first && k < unit->n_flat_params; k++) {
        is_last = is_last || fp_flat_buffer_is_packed(unit->flat_params[k].flat);
    }
    if (!waits && !is_last) {
        FP_TRY(fp_reduce_order_move(unit, flat_param, FP_REDUCE_SLOT_PASS));
        return fp_reduction_start(unit, flat_param, gradients, FP_REDUCE_ALL);
    }
    FP_TRY(pack(unit, flat_param, gradients, FP_REDUCE_SLOT_PASS));
    return waits ? 0 : fp_reduction_start_packed(unit);
}

/* The gradients of a flat parameter have come. Free the unsharded data, then one of these:
 *   no_sync, or more graph tasks come to the unit   add to the accumulated gradient
 *   the unit has a place in the reduce order        pack, and reduce when its turn comes
 *   else                                            reduce now */
static int
gradients_ready_of(fp_unit *unit, fp_flat_param *flat_param, fp_gradients *gradients)
{
    fp_root *root = unit->root;
    FP_TRY(begin_backward(unit)); /* no output had a hook where the loss comes from inside */
    FP_TRY(check_accumulated(unit));
    fp_unit_check(unit, "post_backward");
    /* A reentrant checkpoint runs a part of the unit as another graph task: more gradients will come. */
    const int more = has_come(unit) && unit->task != fp_graph_task();
    const int reduces = fp_root_synchronizes(root) || fp_flat_param_is_nested(flat_param);
    if (flat_param->params != NULL &&
        fp_gradients_drop_frozen(gradients, flat_param->owners.params, flat_param->owners.n) < 0) {
        return -1;
    }
    FP_TRY(fp_flat_param_note_user_edits(flat_param, PyUnicode_AsUTF8(unit->name), 0));
    if (!more && fp_unshard_pass(unit, flat_param) < 0) {
        return -1;
    }
    if (!more && (root->prefetch & FP_PREFETCH_POST) && prefetch_backward(unit) < 0) {
        return -1;
    }
    if (!reduces || more) {
        FP_TRY(fp_flat_buffer_accumulate(flat_param->flat, gradients, flat_param->shard));
        if (more && flat_param->reduce_slot != FP_REDUCE_SLOT_PACKED) {
            return 0;
        }
        return fp_reduce_order_move(unit, flat_param, more ? FP_REDUCE_SLOT_EXPECT : FP_REDUCE_SLOT_PACK);
    }
    if (fp_reduce_order_has(unit, flat_param)) {
        FP_TRY(pack(unit, flat_param, gradients, FP_REDUCE_SLOT_PACK));
        return fp_reduce_order_flush(root, root->cursor);
    }
    if (!fp_unit_has_secondary_shard(unit)) {
        return reduce_now(unit, flat_param, gradients);
    }
    FP_TRY(fp_reduce_order_move(unit, flat_param, FP_REDUCE_SLOT_PASS));
    return fp_reduction_start(unit, flat_param, gradients,
                              fp_root_synchronizes(root) ? FP_REDUCE_ALL : FP_REDUCE_INNER);
}

static int
gradients_ready(void *object, int index, fp_gradients *gradients)
{
    FP_TRY(check_may_begin_section(object));
    const backward_section ours = begin_section(object, "post_backward");
    const int status = gradients_ready_of(ours.unit, &ours.unit->flat_params[index], gradients);
    fp_unit_check(ours.unit, "the end of post_backward");
    return end_section(ours, status);
}

/* A loss uses parameters directly (a penalty on weights), and autograd is about to add to their .grad. Take the
 * accumulated gradient out of .grad, so that autograd adds to the reduced gradient, or to none. */
static int
before_accumulation(void *object, int index)
{
    fp_unit *unit = object;
    fp_flat_param *flat_param = &unit->flat_params[index];
    if (unit->root == NULL || flat_param->shown == FP_SHOWN_REDUCED) {
        return unit->root == NULL ? 0 : fp_flat_param_check_grads(flat_param, PyUnicode_AsUTF8(unit->name));
    }
    FP_TRY(check_may_begin_section(unit));
    const backward_section ours = begin_section(unit, "before_accumulation");
    int status = begin_backward(unit);
    if (status == 0) {
        status = fp_flat_param_note_user_edits(flat_param, PyUnicode_AsUTF8(unit->name), 0);
    }
    return end_section(ours, status);
}

/* Where nothing is sharded, a parameter can be used outside of its unit's forward (a layer that reads the weight of
 * another one, a penalty on weights). Its gradient is added to the accumulated gradient, which the end of the backward
 * reduces. 1: the unit has taken it; 0: autograd adds it to .grad; -1. */
static int
param_gradient(void *object, int index, Py_ssize_t i, fp_gradients *gradients)
{
    fp_unit *unit = object;
    fp_flat_param *flat_param = &unit->flat_params[index];
    if (unit->root == NULL) {
        return 0;
    }
    FP_TRY(check_may_begin_section(unit));
    const int hooks = fp_graph_has_hooks(flat_param->owners.params[i]);
    if (hooks > 0) {
        PyErr_Format(PyExc_ValueError,
                     "%U: parameter `%U` has hooks, and is used outside of the forward of its unit, so they would be "
                     "called before and after its gradient is reduced: remove them, or wrap the module that uses it "
                     "with the one that has it",
                     unit->name, flat_param->attributes.items[i].name);
    }
    if (hooks != 0) {
        return -1;
    }
    const backward_section ours = begin_section(unit, "param_gradient");
    int status = begin_backward(unit);
    if (status == 0) {
        status = fp_flat_param_note_user_edits(flat_param, PyUnicode_AsUTF8(unit->name), 0);
    }
    if (status == 0) {
        status = fp_flat_buffer_accumulate(flat_param->flat, gradients, flat_param->shard);
    }
    return end_section(ours, status < 0 ? -1 : 1);
}

/* Free the frozen flat parameters, and show their parameters. */
static int
release_frozen(fp_unit *unit)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        if (fp_flat_param_is_untracked(flat_param)) {
            FP_TRY(fp_unshard_release_part(unit, flat_param));
            FP_TRY(fp_flat_param_show_params(flat_param));
        }
    }
    return 0;
}

/* The gradients of a forward's inputs are there, so this forward does not need its frozen parameters any more. They are freed
 * with the last such forward. when: unit->backwards at that forward. How often a backward comes to a retained or recorded
 * graph is unknown; then the end of the backward frees them. */
static int
inputs_done(void *object, int64_t when)
{
    fp_unit *unit = object;
    const int is_again = when != unit->backwards || unit->pending == 0;
    unit->pending -= !is_again;
    if (is_again || unit->pending > 0 || unit->for_graph || unit->root == NULL || !fp_root_in_backward(unit->root) ||
        !fp_unshard_frees_passed(unit) || fp_unit_is_in_forward(unit) || fp_iteration_is_elsewhere(unit->root)) {
        return 0;
    }
    fp_root *entered = fp_iteration_enter_in_backward(unit->root);
    const int status = release_frozen(unit);
    fp_iteration_leave(entered);
    return status;
}

/* 1: gradients of its parameters that do not come from views are reduced. Where parameters are sharded they are not: such
 * a gradient is that of this rank's shard alone. */
static int
takes_from_outside(const fp_flat_param *flat_param)
{
    return flat_param->params != NULL && fp_flat_param_plan(flat_param)->primary.n == 1 &&
           fp_flat_param_plan(flat_param)->replicate_group != NULL;
}

/* Put hooks on the owners of flat parameter k. takes: param_gradient() may take their gradients. */
static int
watch(const fp_unit *unit, Py_ssize_t k, int takes)
{
    const fp_param_pieces *owners = &unit->flat_params[k].owners;
    return fp_graph_watch(owners->params, owners->n, unit->ref, (int)k, takes);
}

int
fp_backward_watch(const fp_unit *unit)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        if (takes_from_outside(&unit->flat_params[k]) && watch(unit, k, 1) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The backward ends: reduce the gradients of a flat parameter that are still accumulated, from earlier micro-batches or from
 * further graph tasks of this backward. */
static int
reduce_accumulated(fp_unit *unit, fp_flat_param *flat_param)
{
    const int all = fp_root_synchronizes(unit->root);
    if (fp_flat_buffer_has_accumulated(flat_param->flat) || fp_flat_buffer_has_unreduced(flat_param->flat)) {
        FP_TRY(fp_members_drop_removed(unit));
    }
    if (all && fp_flat_buffer_has_accumulated(flat_param->flat)) {
        FP_TRY(
            fp_flat_param_note_user_edits(flat_param, PyUnicode_AsUTF8(unit->name), 0)); /* it may drop the gradient */
    }
    if (all ? fp_flat_buffer_has_accumulated(flat_param->flat) : fp_flat_buffer_has_unreduced(flat_param->flat)) {
        FP_TRY(fp_reduction_start(unit, flat_param, NULL, all ? FP_REDUCE_ALL : FP_REDUCE_INNER));
        FP_TRY(fp_reduction_finish(unit, flat_param));
    }
    return 0;
}

/* The backward ends for one unit. Finish its reductions, reduce the gradients that are still accumulated, show an
 * accumulated gradient in .grad, then free the unsharded data, or keep it for no_sync or for a recorded graph. */
static int
finish_step_of(fp_unit *unit)
{
    fp_root *root = unit->root;
    fp_unit_check(unit, "the end of backward");
    FP_TRY(fp_iteration_end_backward(unit));
    FP_TRY(fp_reduction_start_packed(unit));
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        FP_TRY(fp_reduction_finish(unit, flat_param));
        FP_TRY(reduce_accumulated(unit, flat_param));
        FP_TRY(fp_flat_buffer_wait_copies(flat_param->flat));
        if (flat_param->shown == FP_SHOWN_REDUCED && fp_flat_buffer_has_accumulated(flat_param->flat)) {
            FP_TRY(watch(unit, k, takes_from_outside(flat_param)));
            FP_TRY(fp_flat_param_show_accumulated(flat_param, PyUnicode_AsUTF8(unit->name)));
        }
    }
    const int in_forward = fp_unit_is_in_forward(unit); /* that forward has called this backward, and goes on */
    unit->for_graph = fp_unshard_is_for_graph(unit) && fp_unit_is_full(unit);
    unit->recorded = unit->for_graph ? root->optimizer_steps : unit->recorded;
    const int in_no_sync = !fp_root_synchronizes(root) && !unit->reshard_after_forward;
    if (unit->for_graph || (in_no_sync && fp_unit_is_full(unit))) {
        FP_TRY(fp_unshard_keep(unit, in_no_sync ? fp_optimizer_steps : -1));
    }
    else if (unit->state != FP_UNIT_SHARDED && !in_forward && fp_unshard_release(unit) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; fp_root_synchronizes(root) && k < unit->n_flat_params; k++) { /* an optimizer steps next */
        const fp_flat_param *flat_param =
            &unit->flat_params[k]; /* an optimizer may write to its shard without torch counting it */
        if (fp_flat_param_has_secondary_shard(flat_param) && !fp_flat_param_is_untracked(flat_param) &&
            fp_flat_buffer_forget_values(flat_param->flat) < 0) {
            return -1;
        }
    }
    int shown = 0;
    if (!in_forward) {
        shown = unit->for_graph
                    ? fp_unit_each(unit, fp_flat_param_list_params) /* the next one may recompute a forward */
                    : fp_unshard_show_params(unit);
    }
    return shown < 0 ? -1 : fp_unshard_take_requires_grad(unit);
}

static int
finish_step(fp_root *root, fp_unit *unit)
{
    if (unit->root != root) {
        return 0; /* code that ran for other units has let it join another model */
    }
    fp_range *range = fp_range_begin("end of backward", unit->name);
    const int status = finish_step_of(unit);
    fp_range_end(range);
    return status;
}

/* Give all units the turns that are left, and end the backward for each of them. */
static int
finish_steps(fp_root *root)
{
    FP_TRY(fp_reduce_order_end(root));
    FP_TRY(fp_reduction_start_halves(root));
    return fp_root_each(root, finish_step);
}

static int
hide_old(fp_root *root, fp_unit *unit)
{
    return unit->root == root ? fp_unshard_hide_old(unit) : 0;
}

/* The end of a backward, called by the engine. After an error it stays under way, and the next forward or backward recovers. */
static int
finish(void *root_pointer, uint64_t ignored)
{
    fp_root *root = root_pointer;
    fp_iteration_enter(root);
    int status = finish_steps(root);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(root->model_traces); i++) {
        fp_model_trace_end_backward(PyTuple_GET_ITEM(root->model_traces, i), !fp_root_synchronizes(root));
    }
    root->order.n = 0;
    root->reducing = root->halfway = NULL;
    if (status == 0) {
        status = fp_iteration_wait_until_read(root); /* else the recovery does */
    }
    if (status == 0) {
        root->phase = FP_PHASE_OPEN;
        fp_idle_check(root, "the end of backward");
        status = root->reduce_order.n > 0 ? fp_root_each(root, hide_old) : 0; /* optimizers may have stepped */
    }
    fp_iteration_leave(root);
    return status;
}

const fp_unit_callbacks fp_backward_unit_calls = {
    .before_backward = fp_backward_come_to,
    .gradients_ready = gradients_ready,
    .before_accumulation = before_accumulation,
    .inputs_done = inputs_done,
    .param_gradient = param_gradient,
};
const fp_unit_callbacks fp_backward_root_calls = {.before_backward = finish};
