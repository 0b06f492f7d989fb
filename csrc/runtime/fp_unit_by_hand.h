/* runtime/fp_unit_by_hand.h -- methods of _C.Unit for a unit without hooks, whose steps a driver calls one by one (LayerZero's
 * handle). The docstrings are in fp_unit.c.
 *
 * The unit has one flat parameter with original parameters, and a root that no other unit shares: no iteration runs, so
 * only the settings of the root are used. The views lie behind a node that gives their gradient to a leaf, a FlatParameter, as
 * autograd gives it to any leaf; no hook calls the unit. fp_unit.state stays SHARDED: the driver decides which data are used.
 * The driver calls from one thread at a time. Before drive() the other methods raise RuntimeError. After an interrupted wait
 * the driver may call fp_by_hand_wait() again. */
#pragma once

#include "runtime/fp_types.h"

PyObject *fp_by_hand_drive(fp_unit *unit, PyObject *const *args,
                           Py_ssize_t nargs); /* leaf, of_shards, of_params, sliced */
PyObject *fp_by_hand_gather(fp_unit *unit, PyObject *refresh);
PyObject *fp_by_hand_wait(fp_unit *unit, PyObject *ignored);
PyObject *fp_by_hand_show_views(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs);  /* tensors, may_replace */
PyObject *fp_by_hand_show_params(fp_unit *unit, PyObject *const *args, Py_ssize_t nargs); /* whole, moves */
PyObject *fp_by_hand_take_written(fp_unit *unit, PyObject *ignored);
PyObject *fp_by_hand_cut(fp_unit *unit, PyObject *ignored);
PyObject *fp_by_hand_forget(fp_unit *unit, PyObject *ignored);
PyObject *fp_by_hand_versions(fp_unit *unit, PyObject *ignored);
PyObject *fp_by_hand_set_grads(fp_unit *unit, PyObject *grad);
PyObject *fp_by_hand_show_sum(fp_unit *unit, PyObject *sum);
PyObject *fp_by_hand_add_reduced(fp_unit *unit, PyObject *reduced);
PyObject *fp_by_hand_is_gathered(fp_unit *unit, void *ignored); /* a getter */
