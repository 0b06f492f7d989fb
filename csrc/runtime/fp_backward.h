/* runtime/fp_backward.h -- what autograd calls of a unit and of a model. */
#pragma once

#include "runtime/fp_types.h"

extern const fp_unit_callbacks fp_backward_unit_calls, fp_backward_root_calls;
/* The backward that runs in this thread comes to unit, a fp_unit, and to a graph of a forward that began then. */
int fp_backward_come_to(void *unit, uint64_t began);
/* Have gradients of the unit's parameters that do not come from its views reduced too, where nothing is sharded. -1: error. */
int fp_backward_watch(const fp_unit *unit);
