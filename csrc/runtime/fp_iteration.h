/* runtime/fp_iteration.h -- an iteration of a model: its forwards and the backward after them; the user's thread for which it
 * runs; the recovery after an interruption. Functions that return int give 0, or -1 with an exception, unless they say more. */
#pragma once

#include "runtime/fp_types.h"

/* The outermost forward begins a pass. Recovers first if the last backward was interrupted. Issues the all-reduces of
 * fp_consensus_before_forward(). */
int fp_iteration_begin(fp_root *root);
/* Set root->through_python to 1 if collectives must go through Python, because always_python is 1 or a user has replaced a
 * watched function; else to 0. */
int fp_iteration_look_for_replaced(fp_root *root);
/* Undo everything that an interrupted iteration has left. No collective: other ranks may not come. Afterwards every unit is
 * IDLE and SHARDED, modules have the original parameters, and reductions under way are dropped. After a backward the
 * accumulated gradient is dropped too, as it has a part of that backward's gradients. All units are recovered, also after
 * an error; then the first error is raised. */
int fp_iteration_recover(fp_root *root);
/* Gather the stale units with a secondary shard from the shards, and free them again. Forget which units are not gathered
 * ahead. A collective call, which the caller makes while no forward or backward is under way. */
int fp_iteration_refresh(fp_root *root);
int fp_iteration_append_order(fp_root *root,
                              fp_unit *unit); /* the unit's forward has ended: append it to root->order */
/* Wait until the device has read the shards that lie on the host (CPU offload), so that users may write to them. */
int fp_iteration_wait_until_read(fp_root *root);
/* A backward has ended: forget the unit's place in root->order, which the caller empties, and count the backward. The unit
 * becomes IDLE, or FORWARD while a forward of it is under way. */
int fp_iteration_end_backward(fp_unit *unit);
void fp_iteration_leave_root(
    fp_unit *unit); /* take the unit out of its root, whose reference is dropped; it may have none */

int fp_iteration_check_joined(const fp_unit *unit); /* RuntimeError if the unit is in no root */

/* The only way to another fp_pass_state of a unit. Also counts the forwards under way, in the unit and in the root. -1 with
 * RuntimeError that names the unit, and nothing changed, if another thread is in the iteration, or if the table of
 * core/fp_state.c has no such move. fp_iteration_check() only asks. */
int fp_iteration_move(fp_unit *unit, fp_pass_event event);
int fp_iteration_check(const fp_unit *unit, fp_pass_event event);
/* 1: this thread may not begin anything: another thread is in an iteration, or a recovery or refresh runs; else 0. */
int fp_iteration_is_elsewhere(const fp_root *root);
int fp_iteration_check_thread(const fp_unit *unit); /* RuntimeError if fp_iteration_is_elsewhere() */

/* Take and give back the root's lock: in a backward autograd has a thread for each device, and one at a time works on the
 * units. The lock is reentrant, and keeps the root alive. The GIL is given up while a thread waits for it. */
void fp_iteration_enter(fp_root *root);
void fp_iteration_leave(fp_root *root); /* NULL is allowed */
/* Take the lock for a forward, if a backward is under way that recomputes this forward. Returns the argument for
 * fp_iteration_leave(): the root, or NULL if there is no backward. */
fp_root *fp_iteration_enter_in_backward(fp_root *root);
