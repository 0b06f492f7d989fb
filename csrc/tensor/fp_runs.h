/* tensor/fp_runs.h -- find the parameters of an optimizer that lie side by side in memory, with their gradients and states:
 * torch's fused kernel steps them as one tensor. flatparam/optim.py calls this before it steps a group (`_C.runs`). Start to
 * read at StepRuns::append(). Plain C, under the rules of fp_torch.h. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

/* Find the runs of an optimizer's step. A run: consecutive parameters that have a gradient. Each parameter begins where the one
 * before it ends, in one storage; so do their gradients, their states and the elements of their steps. Their steps are equal. A
 * parameter that differs in one of these begins another run. Nothing is kept between calls, so nothing can be out of date.
 *
 * Arguments:
 *   params  a list, the parameters of one group
 *   state   the optimizer's: param -> dict
 *   keys    a tuple: the names of the states; at most 4
 *   steps   1: an Adam, and the first of keys is the number of steps; 0: SGD
 *   joins   0: each run has one parameter; so it has while one of torch's modes is on
 *   packs   1: if states could lie side by side and do not, return lists of their parameters (below)
 *
 * Returns one of these, a new reference:
 *   tuple  (params, grads, one list for each key, others, apart). An item of the first lists: a 1-D tensor over the memory of a
 *          run, or the given tensor if the run has one parameter. The version counters of a run's parameters are increased, but
 *          for the first one's, which the step itself increases.
 *            steps   of Adam: the tensor of the first parameter alone. Torch adds 1 to it, and the caller copies it to others
 *            others  of Adam: 1-D, the steps of the run's further parameters, None: there are none; of SGD: the number of
 *                    parameters of the run
 *            apart   parameters that torch's fused kernel would step wrongly or refuse: complex ones; those whose gradient or
 *                    state lies in memory in another order; SGD's of bf16 and fp16 on the host; SGD's that lack one of keys
 *   list   with packs: lists of parameters that lie side by side and have equal steps, and whose states are scattered
 *   None   torch has to step: a gradient is sparse, a state is no tensor, or a parameter's entry in state is no dict
 *   False  a state of Adam is missing
 *   NULL   an exception is set: TypeError or ValueError for an argument
 * All but the tuple change nothing. */
PyObject *fp_runs_find(PyObject *params, PyObject *state, PyObject *keys, int steps, int joins, int packs);

FP_END_C
