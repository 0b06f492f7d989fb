/* runtime/fp_trace_py.h -- the heap type _C.CollectiveTrace: the collectives over one group, in the order of this process. */
#ifndef FP_TRACE_PY_H
#define FP_TRACE_PY_H

#include "tensor/fp_channel.h"
#include "python/fp_args.h"

extern PyType_Spec fp_trace_type;
int fp_trace_check(PyObject *object); /* whether it is one */

/* The following are of a CollectiveTrace. An event comes; one is waited for, again; one has failed; whether those under
 * way may never end. */
int fp_trace_note_event(PyObject *trace, uint64_t event, int new_pass);
int fp_trace_note_wait(PyObject *trace);
int fp_trace_note_failure(PyObject *trace, const char *message);
int fp_trace_is_broken(PyObject *trace);

#endif
