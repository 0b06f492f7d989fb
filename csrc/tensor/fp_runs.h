/* tensor/fp_runs.h -- the parameters of an optimizer that lie side by side, with their gradients and states. Plain C, under the
 * rules of fp_torch.h. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

/* Find the runs of an optimizer's step. A run: consecutive parameters that have a gradient. Each parameter begins where the one
 * before it ends, in one storage; so do their gradients, their states and the elements of their steps. Their steps are equal. A
 * parameter that differs in one of these begins another run. Nothing is kept between calls, so nothing can be out of date.
 *
 * params: a list; state: the optimizer's, param -> dict; keys: a tuple of the states' names. steps: 1: Adam's states, and the
 * first of keys is the number of the step; 0: SGD's. Torch counts the first step of a run on.
 * Returns a new tuple (params, grads, one list for each key, others, apart), with a 1-D tensor for each run of several
 * parameters, and the given tensor for one alone. others, by run: SGD's: how many parameters it has; Adam's: a 1-D tensor of the
 * steps of all but its first parameter, None if it has no others. Without joins, and while one of torch's modes is on, each run
 * has one parameter.
 * apart: the parameters that torch's fused kernel would step wrongly or refuse: complex ones, those whose gradient or state lies in
 * memory in another order, SGD's of bf16 and fp16 on the host, and SGD's without momentum yet.
 * None: torch has to step (a gradient is sparse, or a state is no tensor). False: a state of Adam is missing. With packs,
 * a list of lists of parameters: these lie side by side and have one step, but their states are scattered. After these three,
 * nothing has changed. */
PyObject *fp_runs_find(PyObject *params, PyObject *state, PyObject *keys, int steps, int joins, int packs);

FP_END_C
