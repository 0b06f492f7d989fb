/* runtime/fp_reduction.h -- the reductions of a backward: start one for a unit, and take the result of the units before.
 * At most two units have reductions under way: root->reducing, and root->halfway with its second reduction, over replicas.
 * They are called in a backward, under the lock of the root. Functions give 0, or -1 with an exception: then the backward ends,
 * and fp_iteration_recover() drops all reductions. */
#pragma once

#include "runtime/fp_types.h"

/* Start to reduce one flat parameter: its packed gradients, or its accumulated gradient and gradients (borrowed; NULL:
 * none). how_far: FP_REDUCE_*, see fp_flat_buffer_start_reduce(). Then go on with the reductions of the units before. */
int fp_reduction_start(fp_unit *unit, fp_flat_param *flat_param, const fp_gradients *gradients, int how_far);
/* Start to reduce all packed flat parameters of a unit, in one call of the group's backend if it can join them. Then go on
 * with the reductions of the units before. None is packed: 0 at once. */
int fp_reduction_start_packed(fp_unit *unit);
/* Start the second reductions, over replicas, of halfway and reducing: no unit comes after them. */
int fp_reduction_start_halves(fp_root *root);
/* Wait for the reductions of a flat parameter, add the result to .grad of its owners, and call unit->reduced. Nothing is
 * under way: 0 at once. */
int fp_reduction_finish(fp_unit *unit, fp_flat_param *flat_param);
