/* python/fp_order_py.h -- the heap type _C.Order: the collectives over one group, in the order of this process. */
#ifndef FP_ORDER_PY_H
#define FP_ORDER_PY_H

#include "bridge/fp_engine.h"
#include "python/fp_module.h"

/* New reference; NULL with an exception set. */
PyObject *fp_order_type_new(PyObject *module);
int fp_order_check(PyObject *object); /* whether it is one */

/* The following are of an Order. An event comes; one is waited for, again; one has failed; whether those under
 * way may never end. */
int fp_order_note_event(PyObject *order, uint64_t event, int new_pass);
int fp_order_note_wait(PyObject *order);
int fp_order_note_failure(PyObject *order, const char *message);
int fp_order_is_broken(PyObject *order);

#endif
