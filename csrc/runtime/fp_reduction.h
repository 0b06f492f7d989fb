/* runtime/fp_reduction.h -- the reductions of a backward. */
#pragma once

#include "runtime/fp_types.h"

/* Start reducing what was packed or kept of a flat parameter, and gradients (NULL: none); see fp_flat_buffer_start_reduce. */
int fp_reduction_start(fp_unit *unit, fp_flat_param *flat_param, const fp_gradients *gradients, int how_far);
/* The same for all of a unit that are packed, if any are, in one call of the group's backend where that knows how. */
int fp_reduction_start_packed(fp_unit *unit);
int fp_reduction_start_halves(fp_root *root); /* over replicas, of what was started last */
/* Wait for what is being reduced of a flat parameter, if anything is: it becomes the gradient. */
int fp_reduction_finish(fp_unit *unit, fp_flat_param *flat_param);
