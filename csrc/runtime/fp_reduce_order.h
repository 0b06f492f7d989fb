/* runtime/fp_reduce_order.h -- in which order a backward reduces the units with a secondary shard, whoever has gradients of them.
 *
 * Ranks may not all come to the same units: one does not use a parameter, or the output of a unit. So reductions do not
 * follow gradients but an order that all ranks make alike, the units by the beginning of their forwards, last first. A unit's
 * turn comes when backward reaches a unit whose forward had ended before its own began: by then it has all the gradients
 * that it gets here, as autograd runs nodes in the reverse order of the forward. Who has none sends zeros, if some rank
 * has one (see fp_consensus.h). Gathers that a rank's backward passes over are made up for at the same places. */
#pragma once

#include "runtime/fp_types.h"

int fp_reduce_order_begin(fp_root *root); /* a backward begins */
int fp_reduce_order_end(fp_root *root);
void fp_reduce_order_forget(fp_root *root);

/* The only way to another turn. -1 with RuntimeError, and nothing changed, where the core's table has no such move. */
int fp_reduce_order_move(const fp_unit *unit, fp_flat_param *flat_param, fp_reduce_slot_event event);

/* Backward comes to a unit. 1: it has passed it before, and needs nothing of it. */
int fp_reduce_order_reach(fp_unit *unit);
/* The gradients of a flat parameter are there: whether they wait for their turn; then pack and flush. */
int fp_reduce_order_has(const fp_unit *unit, const fp_flat_param *flat_param);
int fp_reduce_order_flush(fp_root *root, Py_ssize_t cursor);
/* Start the copies from host memory of what the next gradients are added to. */
int fp_reduce_order_start_reload(fp_root *root);

int fp_reduce_order_join(fp_root *root, fp_unit *unit); /* the root has room for it in units already */
void fp_reduce_order_leave(fp_root *root, const fp_unit *unit);
