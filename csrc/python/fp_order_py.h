/* python/fp_order_py.h -- the heap type _C.Order: the collectives over one group, in the order of this process. */
#ifndef FP_ORDER_PY_H
#define FP_ORDER_PY_H

#include "bridge/fp_engine.h"
#include "python/fp_module.h"

/* New reference; NULL with an exception set. */
PyObject *fp_order_type_new(PyObject *module);
int fp_order_check(PyObject *object); /* whether it is one */

extern const fp_group_calls fp_order_calls; /* with an Order as watcher */

/* The following are of an Order. A pass begins, its backward has ended, keeping its gradients or not. */
void fp_order_begin_pass(PyObject *order);
void fp_order_end_backward(PyObject *order, int keeps);

#endif
