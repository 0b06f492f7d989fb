/* runtime/fp_trace_py.h -- the heap types _C.CollectiveTrace, the collectives over one group in the order of this process, and
 * _C.ModelTrace, one model at a CollectiveTrace, which those of a group may share. */
#pragma once

#include "core/fp_trace.h"
#include "tensor/fp_channel.h"
#include "python/fp_args.h"

extern PyType_Spec fp_trace_type, fp_model_trace_type;

fp_trace *fp_trace_of(PyObject *object);          /* of a CollectiveTrace, borrowed; NULL with TypeError */
int fp_model_trace_check(PyObject *object);       /* whether it is a ModelTrace */
extern const fp_group_calls fp_model_trace_calls; /* with a ModelTrace as watcher */

/* The following are of a ModelTrace. A pass begins; its backward has ended, keeping its gradients or not. */
void fp_model_trace_begin_pass(PyObject *trace);
void fp_model_trace_end_backward(PyObject *trace, int keeps);
