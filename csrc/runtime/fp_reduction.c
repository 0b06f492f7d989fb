/* runtime/fp_reduction.c -- the reductions of a backward; see fp_reduction.h. A unit's reduction runs while backward
 * computes the next unit. When the next unit's reduction starts, the second reductions of the unit before start, or its
 * result is taken. A "half" is the second reduction, over replicas. */
#include "runtime/fp_reduction.h"

int
fp_reduction_finish(fp_unit *unit, fp_flat_param *flat_param)
{
    fp_reduced reduced;
    const int done =
        fp_flat_buffer_finish_reduce(flat_param->flat, flat_param->shard, fp_unit_collectives(unit), &reduced);
    if (done <= 0) {
        return done;
    }
    const int status = fp_flat_param_add_reduced(flat_param, &reduced, PyUnicode_AsUTF8(unit->name));
    Py_DECREF(reduced.tensor);
    if (status < 0 || unit->reduced == NULL || unit->reduced == Py_None) {
        return status;
    }
    return fp_drop_result(PyObject_CallFunction(unit->reduced, "n", (Py_ssize_t)(flat_param - unit->flat_params)));
}

/* Start the second reductions of a unit (NULL: none), several in one call. 1: there was one; 0: there was none; -1. */
static int
start_halves(fp_unit *unit)
{
    int halves = 0, status = 0;
    for (Py_ssize_t k = 0; unit != NULL && k < unit->n_flat_params; k++) {
        halves += fp_flat_buffer_awaits_replicas(unit->flat_params[k].flat);
    }
    if (halves == 0) {
        return 0;
    }
    const int together = halves > 1 ? fp_unit_begin_together(unit, FP_JOIN_REPLICAS) : 0;
    FP_TRY(together);
    for (Py_ssize_t k = 0; status == 0 && k < unit->n_flat_params; k++) {
        const fp_flat_param *flat_param = &unit->flat_params[k];
        if (fp_flat_buffer_awaits_replicas(flat_param->flat)) {
            status = fp_flat_buffer_advance_reduce(flat_param->flat, flat_param->shard, fp_unit_collectives(unit));
        }
    }
    if (together > 0) {
        status = fp_unit_end_together(unit, FP_JOIN_REPLICAS, status);
    }
    return status < 0 ? -1 : 1;
}

int
fp_reduction_start_halves(fp_root *root)
{
    FP_TRY(start_halves(root->halfway));
    return start_halves(root->reducing) < 0 ? -1 : 0;
}

/* Go on with the reductions of a unit (NULL: none): start the second ones if there are any, else finish them. */
static int
advance(fp_unit *unit)
{
    Py_XINCREF(unit);
    const int halves = start_halves(unit);
    int status = halves < 0 ? -1 : 0;
    for (Py_ssize_t k = 0; unit != NULL && halves == 0 && status == 0 && k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        const int done = fp_flat_buffer_advance_reduce(flat_param->flat, flat_param->shard, fp_unit_collectives(unit));
        status = done > 0 ? fp_reduction_finish(unit, flat_param) : done;
    }
    Py_XDECREF(unit);
    return status;
}

/* Go on with the reductions that started before those of this unit. */
static int
advance_previous(fp_unit *unit)
{
    fp_root *root = unit->root;
    if (root->reducing == NULL || root->reducing == unit) {
        return 0;
    }
    if (root->halfway != unit && advance(root->halfway) < 0) {
        return -1;
    }
    return advance(root->reducing);
}

/* Start one reduction, and nothing else. */
static int
start(fp_unit *unit, fp_flat_param *flat_param, const fp_gradients *gradients, int how_far)
{
    fp_flat_buffer_note_trained(flat_param->flat, flat_param->owners.params, flat_param->owners.n);
    unit->root->counts[FP_COUNT_REDUCTIONS]++;
    return fp_flat_buffer_start_reduce(flat_param->flat, gradients, flat_param->shard, fp_unit_collectives(unit),
                                       how_far);
}

/* Reductions of this unit have started: go on with those before, and note the unit as the last one. */
static int
follow(fp_unit *unit)
{
    fp_root *root = unit->root;
    FP_TRY(advance_previous(unit));
    if (root->reducing != unit) {
        root->halfway = root->reducing;
        root->reducing = unit;
    }
    return 0;
}

int
fp_reduction_start(fp_unit *unit, fp_flat_param *flat_param, const fp_gradients *gradients, int how_far)
{
    FP_TRY(fp_reduction_finish(unit, flat_param)); /* a reduction of another graph in this backward */
    if (how_far == FP_REDUCE_OUTER) {              /* the reductions before go over the same group */
        FP_TRY(advance_previous(unit));
        FP_TRY(advance(unit));
    }
    FP_TRY(start(unit, flat_param, gradients, how_far));
    return follow(unit);
}

int
fp_reduction_start_packed(fp_unit *unit)
{
    Py_ssize_t packed = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        packed += fp_flat_buffer_is_packed(unit->flat_params[k].flat);
    }
    if (packed == 0) {
        return 0;
    }
    const int together = packed == 1 ? 0 : fp_unit_begin_together(unit, FP_JOIN_REDUCTIONS);
    FP_TRY(together);
    int status = 0;
    for (Py_ssize_t k = 0; status == 0 && k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        if (fp_flat_buffer_is_packed(flat_param->flat)) {
            status = start(unit, flat_param, NULL, FP_REDUCE_ALL);
        }
    }
    if (together > 0) {
        status = fp_unit_end_together(unit, FP_JOIN_REDUCTIONS, status);
    }
    return status < 0 ? -1 : follow(unit);
}
