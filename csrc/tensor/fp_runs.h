/* tensor/fp_runs.h -- the parameters of an optimizer that lie side by side, with their gradients and states. Plain C, under the
 * rules of fp_torch.h. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

/* Find the runs of an optimizer's step. A run: consecutive parameters with a gradient, each of which begins where the one
 * before it ends, in one storage, as do their gradients, their states and the elements of their steps; the steps are equal. A
 * parameter that differs in any of it begins another run. It keeps nothing between calls, so nothing can be out of date.
 *
 * params: a list; state: the optimizer's, param -> dict; keys: a tuple of the states' names; steps: whether the first of them
 * is the number of the step, as Adam has it; without, they are SGD's. A run's other steps than the first grow by advance; torch
 * counts the first.
 * Returns a new tuple (params, grads, one list for each key, counts, apart), with a 1-D tensor for each run of several
 * parameters, and the given tensor for one alone; counts: how many parameters each has. While one of torch's modes is on, each
 * run has one. apart: the parameters that torch's fused kernel would step wrongly or refuse: complex ones, those whose gradient
 * or state lies in memory in another order, SGD's of bf16 and fp16 on the host, and SGD's without momentum yet.
 * None: torch has to step (a gradient is sparse, or a state is no tensor). False: a state of Adam is missing. With packs,
 * a list of lists of parameters: these lie side by side and have one step, but their states are scattered. After these three,
 * nothing has changed. */
PyObject *fp_runs_find(PyObject *params, PyObject *state, PyObject *keys, int steps, double advance, int packs);

FP_END_C
