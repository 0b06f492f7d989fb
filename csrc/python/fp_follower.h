/* python/fp_follower.h -- the heap type _C.Follower: one model at an Order, which those of a group may share. */
#ifndef FP_FOLLOWER_H
#define FP_FOLLOWER_H

#include "bridge/fp_engine.h"
#include "python/fp_module.h"

/* New reference; NULL with an exception set. */
PyObject *fp_follower_type_new(PyObject *module);
int fp_follower_check(PyObject *object); /* whether it is one */

extern const fp_group_calls fp_follower_calls; /* with a Follower as watcher */

/* The following are of a Follower. A pass begins, its backward has ended, keeping its gradients or not. */
void fp_follower_begin_pass(PyObject *follower);
void fp_follower_end_backward(PyObject *follower, int keeps);

#endif
