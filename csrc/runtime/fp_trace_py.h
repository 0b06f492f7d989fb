/* runtime/fp_trace_py.h -- two heap types. _C.CollectiveTrace: the collectives over one group in the order of this process.
 * _C.ModelTrace: where the passes of one model begin in a CollectiveTrace, which several models over one group may share. */
#pragma once

#include "core/fp_trace.h"
#include "tensor/fp_channel.h"
#include "python/fp_args.h"

extern PyType_Spec fp_trace_type, fp_model_trace_type;

fp_trace *fp_trace_of(PyObject *object);          /* borrowed from a CollectiveTrace; NULL with TypeError */
int fp_model_trace_check(PyObject *object);       /* 1: object is a ModelTrace; 0 */
extern const fp_group_calls fp_model_trace_calls; /* for fp_group_watch() with a ModelTrace */

/* Tell a ModelTrace that a pass begins; that the backward of the pass has ended. keeps: 1 if no_sync() has accumulated its
 * gradients. They cannot fail. */
void fp_model_trace_begin_pass(PyObject *trace);
void fp_model_trace_end_backward(PyObject *trace, int keeps);
