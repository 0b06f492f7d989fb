/* runtime/fp_backward.h -- the callbacks that autograd calls for a unit and for a model in a backward. They run in any
 * thread of autograd, with the GIL held, and take the root's lock while they work. They give 0, or -1 with an exception,
 * which backward() raises. After that fp_root_in_backward(root) stays 1, and the next forward or backward recovers the model. */
#pragma once

#include "runtime/fp_types.h"

extern const fp_unit_callbacks fp_backward_unit_calls, fp_backward_root_calls;
/* Gather the unit, as the gradient of one of its outputs is there. unit: a fp_unit. began: fp_graph_now() when the forward
 * began that gave this output. A call for a further output of the same forward does nothing. */
int fp_backward_come_to(void *unit, uint64_t began);
/* Put hooks on the unit's parameters where nothing is sharded: their gradients that do not come from the unit's views (a
 * penalty on weights, a shared layer) are reduced with the others. May be called again. */
int fp_backward_watch(const fp_unit *unit);
