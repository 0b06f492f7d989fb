/* runtime/fp_reduce_order.h -- the order in which a backward reduces the units with a secondary shard. It does not depend
 * on which gradients this rank has.
 *
 * Ranks may not all come to the same units: one rank may not use a parameter, or the output of a unit. So reductions
 * follow an order that all ranks have alike: the reverse of the order in which the units' first forwards began. Each unit
 * has one turn in a backward:
 *
 *   when    backward reaches a unit whose forward ended before this unit's first forward began. Autograd runs nodes in reverse
 *           order of the forward, so the unit has all its gradients by then
 *   what    its flat parameters are reduced if some rank has a gradient (fp_consensus.h). A rank that has none sends zeros
 *   gather  units that this rank's backward passes over are gathered at the same places as on the other ranks
 *
 * fp_root.cursor is the place of backward in root->order, fp_root.reduce_order_at the index of the unit with the next turn, and
 * fp_flat_param.reduce_slot the state of a flat parameter. Called in a backward, under the lock of the root. Functions that
 * return int give 0, or -1 with an exception, unless they say more; after -1 the recovery calls fp_reduce_order_forget(). */
#pragma once

#include "runtime/fp_types.h"

int fp_reduce_order_begin(fp_root *root); /* a backward begins: sort the units, start the consensus on gradients */
int fp_reduce_order_end(fp_root *root);   /* it ends: give all units their turn, raise errors of other ranks */
void fp_reduce_order_forget(
    fp_root *root); /* no turn is left, and no slot is taken: after an error, and before a backward */

/* The only way to another slot state. -1 with RuntimeError, and nothing changed, where the core's table has no such move. */
int fp_reduce_order_move(const fp_unit *unit, fp_flat_param *flat_param, fp_reduce_slot_event event);

/* Backward comes to a unit: give their turn to the units before it. 1: this unit's turn is over, so it is not gathered. */
int fp_reduce_order_reach(fp_unit *unit);
/* 1: the gradients of this flat parameter have come, and wait for its unit's turn: the caller packs them, then flushes. 0:
 * the unit has no secondary shard, or its turn is over: the caller reduces them at once. */
int fp_reduce_order_has(const fp_unit *unit, const fp_flat_param *flat_param);
/* Give their turn to all units that have it when backward is at this index of root->order; -1: to all that are left. */
int fp_reduce_order_flush(fp_root *root, Py_ssize_t cursor);
/* Start copying the accumulated gradients of the next two units from host memory: the next gradients are added to them. */
int fp_reduce_order_start_reload(fp_root *root);

int fp_reduce_order_join(fp_root *root, fp_unit *unit); /* before units is changed */
void fp_reduce_order_leave(fp_root *root, const fp_unit *unit);
