/* runtime/fp_fresh.c -- whether a unit is gathered again. A gather is a collective, so all ranks of the group must decide
 * alike. The decision depends on these inputs and no others:
 *
 *   input                                    why all ranks know it alike
 *   ---------------------------------------  ---------------------------------------------------------------------------
 *   state, pass and gather_pass of the unit  control flow: which units forward and backward come to, in which order. If
 *                                            that differs between ranks, the collective trace (fp_trace.c) tells all
 *   root->phase, root->blocks                control flow: all ranks call no_sync() and backward()
 *   reshard_after_forward, sharded, groups   settings, compared when the unit was made
 *   requires_grad (untracked)                control flow; if ranks differ, the event of the reduction tells them
 *   root->optimizer_steps                    steps of optimizers that hold a parameter of some unit of the model. An
 *                                            optimizer also holds parameters that have no element on this rank. Steps in
 *                                            a backward do not count: an optimizer in backward steps on the ranks that
 *                                            have a gradient. Optimizers of other models, threads and probes do not count
 *   unit->stale                              asked: one all-reduce when a forward begins, for units with a secondary shard
 *                                            (ZERO_1, LAYER_ZERO) and units that no_sync has left gathered. If one rank
 *                                            sees a change, all ranks gather. A change is: another version of its pieces,
 *                                            a replaced or written tensor, a step of any optimizer (it may write to shards
 *                                            that it does not hold), load_state_dict(), refresh(); after train() or
 *                                            eval() other values
 *   unit->ahead: LEARNED, WRITTEN             asked: one all-reduce when a forward begins after the first one of a unit,
 *                                            with and without gradients. refresh() forgets it on all ranks
 *   which units are in the model             control flow: all ranks add and remove the same modules (fp_members.h)
 *   the capture of a CUDA graph (is_void)    control flow: all ranks capture the same calls
 *   device, root->prefetch, min_unit_bytes   settings, compared when the unit was made
 *
 * These are no inputs, as one rank alone may see them: versions and addresses of tensors that no rank asks about; steps of
 * other optimizers; other units in the process; objects that garbage collection has not freed yet.
 *
 * A forward may write to a unit's parameters before the unit's turn (a momentum encoder). Such a unit must not be gathered
 * ahead. The first forward gathers no unit ahead, and finds such units. If a later forward writes to another unit, the rank
 * that sees it raises: the other ranks cannot know of the write before they compute. */
#include "runtime/fp_fresh.h"

static int
is_void(fp_flat_param *flat_param)
{
    return fp_flat_buffer_is_void(flat_param->flat);
}

int
fp_fresh_is_void(const fp_unit *unit)
{
    return fp_unit_each(unit, is_void);
}

static int
is_captured(const fp_unit *unit)
{
    return unit->n_flat_params > 0 && fp_flat_buffer_is_captured(unit->flat_params[0].flat);
}

/* For a unit that is not sharded. No other rank gathers it, so this rank decides by all that it sees. */
static int
is_of_now_here(const fp_unit *unit)
{
    const int is_ahead = unit->state == FP_UNIT_GATHERING && unit->gather_pass == unit->root->pass;
    int fresh = unit->data_steps == fp_optimizer_steps && (is_ahead || unit->state == FP_UNIT_KEPT);
    for (Py_ssize_t k = 0; fresh > 0 && k < unit->n_flat_params; k++) {
        fresh = fp_flat_param_is_as_gathered(&unit->flat_params[k]);
    }
    return fresh;
}

static int
trains_as_gathered(const fp_unit *unit)
{
    int same = 1;
    for (Py_ssize_t k = 0; same && k < unit->n_flat_params; k++) {
        same = fp_flat_param_trains_as_gathered(&unit->flat_params[k]);
    }
    return same;
}

int
fp_fresh_is_of_now(const fp_unit *unit)
{
    const fp_root *root = unit->root;
    const int is_of_this_pass = unit->gather_pass == root->pass;
    if (!fp_unit_is_full(unit) || fp_fresh_is_void(unit)) {
        return 0;
    }
    if (fp_root_in_backward(root)) {
        return 1;
    }
    if (fp_unit_has_secondary_shard(unit)) {
        return unit->stale != FP_STALE_YES && is_of_this_pass; /* in a later pass requires_grad may have changed */
    }
    if (is_of_this_pass && unit->state == FP_UNIT_UNSHARDED) {
        return 1;
    }
    if (!fp_unit_is_sharded(unit)) {
        return is_of_now_here(unit);
    }
    if (unit->state == FP_UNIT_KEPT) {
        return unit->stale != FP_STALE_YES;
    }
    if (unit->state == FP_UNIT_KEPT_FOR_GRAPH || !is_of_this_pass) {
        return 0;
    }
    return unit->gather_steps == root->optimizer_steps && trains_as_gathered(unit);
}

/* ---- asked when a forward begins ---- */

int
fp_fresh_is_asked(const fp_unit *unit)
{
    return fp_unit_has_secondary_shard(unit) ||
           (fp_unit_is_sharded(unit) && unit->state == FP_UNIT_KEPT && !is_captured(unit));
}

/* This rank's answer for one flat parameter: 1: its values have changed since the gather, as far as versions and steps tell. */
static int
is_old(const fp_unit *unit, const fp_flat_param *flat_param)
{
    if (!fp_unit_has_secondary_shard(unit)) {
        return unit->data_steps != fp_optimizer_steps || !fp_flat_param_counts_as_gathered(flat_param);
    }
    return !fp_flat_buffer_has_values(flat_param->flat) || flat_param->synced != fp_flat_param_versions(flat_param) ||
           (!fp_flat_param_is_untracked(flat_param) && flat_param->synced_steps != fp_optimizer_steps);
}

int
fp_fresh_is_old(fp_unit *unit)
{
    const int suspect = unit->suspect;
    int old = 0;
    unit->suspect = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        old = old || is_old(unit, &unit->flat_params[k]);
    }
    for (Py_ssize_t k = 0; suspect && old == 0 && k < unit->n_flat_params; k++) {
        const int matches = fp_flat_buffer_has_values_of(unit->flat_params[k].flat, unit->flat_params[k].shard);
        old = matches < 0 ? -1 : !matches;
    }
    return old;
}

/* ---- gathered ahead ---- */

static unsigned
mode_of_forward(void)
{
    return fp_graph_grad_enabled() ? FP_AHEAD_OBSERVED_RECORDING : FP_AHEAD_OBSERVED_NOT_RECORDING;
}

/* 1: ranks have told each other about forwards of the kind that runs now, or the unit needs no such watch. */
static int
is_learned(const fp_unit *unit)
{
    return !fp_unit_is_sharded(unit) || fp_unit_has_secondary_shard(unit) ||
           (unit->ahead & (mode_of_forward() << 2)) != 0;
}

int
fp_fresh_may_gather_ahead(const fp_unit *unit)
{
    return is_learned(unit) && !(unit->ahead & FP_AHEAD_WRITTEN);
}

/* A number that changes with each write to the unit's shards that torch counts, and with each optimizer step. */
static int64_t
writes_to(const fp_unit *unit)
{
    int64_t sum = unit->root->optimizer_steps;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        sum += fp_flat_param_versions(&unit->flat_params[k]);
    }
    return sum;
}

void
fp_fresh_learn(fp_unit *unit)
{
    const fp_root *root = unit->root;
    if (is_learned(unit)) {
        return;
    }
    unit->ahead |= mode_of_forward();
    if (unit->seen_writes >= 0 && unit->seen_writes != writes_to(unit)) {
        unit->ahead |= FP_AHEAD_SAW_WRITES;
    }
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        fp_unit *other = root->units.items[s];
        /* Small units are gathered before units that come before them, so a write after the first of these counts. */
        if (other->entry < 0 && !is_learned(other) && (root->min_unit_bytes == 0 || other->seen_writes < 0)) {
            other->seen_writes = writes_to(other);
        }
    }
}

int
fp_fresh_is_learned_next(const fp_unit *unit)
{
    return (unit->ahead & FP_AHEAD_OBSERVED & ~(unit->ahead >> 2)) != 0 && !is_captured(unit);
}

void
fp_fresh_end_learning(fp_unit *unit, int written)
{
    unit->ahead |= (unit->ahead & FP_AHEAD_OBSERVED) << 2;
    unit->ahead |= written ? FP_AHEAD_WRITTEN : 0;
}

void
fp_fresh_forget_learned(fp_unit *unit)
{
    unit->ahead = 0;
}

int
fp_fresh_check_ahead(const fp_unit *unit)
{
    int same = 1;
    for (Py_ssize_t k = 0; same && k < unit->n_flat_params; k++) {
        same = unit->flat_params[k].versions == fp_flat_param_versions(&unit->flat_params[k]);
    }
    if (!same) {
        return fp_raise(
            fp_get_state(PyType_GetModule(Py_TYPE(unit)))->StateError,
            "%U: its parameters were written to in this forward, after it was gathered for its turn, which no "
            "forward before has done. Write to them before the model's forward, or call refresh() of the model "
            "on all ranks before the first forward that does it: then it is gathered after that",
            unit->name);
    }
    return 0;
}
