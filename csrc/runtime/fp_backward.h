/* runtime/fp_backward.h -- the callbacks that autograd calls for a unit and for a model in a backward. They run in any
 * thread of autograd, with the GIL held, and take the root's lock while they work. They give 0, param_gradient also 1, or -1
 * with an exception, which backward() raises. After that fp_root_in_backward(root) stays 1, and the next forward or backward
 * recovers the model.
 *
 *   in a backward                               callback                          what it does
 *   the gradient of an output is there          before_backward of the unit       gathers the unit
 *   all gradients of the unit's views are       gradients_ready of the unit       packs them, starts to reduce, frees the unit
 *   the gradients of a forward's inputs are     inputs_done of the unit           frees frozen data
 *   the graph task of the user ends             before_backward of the root       finishes reductions; all units are IDLE */
#pragma once

#include "runtime/fp_types.h"

extern const fp_unit_callbacks fp_backward_unit_calls, fp_backward_root_calls; /* for a fp_unit; for a fp_root */
/* Gather the unit, as the gradient of one of its outputs is there. unit: a fp_unit. began: fp_graph_now() at the begin of the
 * forward that returned this output. A call for a further output of the same forward does nothing. Begins the backward of the
 * model if it is the first call in it. */
int fp_backward_come_to(void *unit, uint64_t began);
/* Put hooks on the parameters of flat parameters that are replicated and not sharded: their gradients that do not come from
 * the unit's views (a penalty on weights, a shared layer) are then reduced with the others. May be called again. */
int fp_backward_watch(const fp_unit *unit);
