/* runtime/fp_iteration.h -- an iteration of a model, and which thread it runs in. */
#pragma once

#include "runtime/fp_types.h"

int fp_iteration_begin(fp_root *root);
/* Forget whatever an iteration that was broken off has left. What fails for one unit is raised when all are done. */
int fp_iteration_recover(fp_root *root);
/* Gather anew, and free, what is out of date of the units with a secondary shard. Nothing may be under way. */
int fp_iteration_refresh(fp_root *root);
int fp_iteration_append_order(fp_root *root, fp_unit *unit); /* the unit's forward has ended */
int fp_iteration_wait_until_read(fp_root *root); /* shards on the host that the device gathers from may be written to */
/* The backward is over: the unit awaits none and is not in the order of forwards. */
int fp_iteration_rest(fp_unit *unit);
void fp_iteration_leave_root(fp_unit *unit); /* take the unit out of its root */

int fp_iteration_check_joined(const fp_unit *unit); /* RuntimeError: the unit is in no root */

/* The only way to another state of a unit in an iteration, for the threads that fp_iteration.c names. -1 with RuntimeError
 * that names the unit, and nothing changed, from another thread or where the core's table has no such move. */
int fp_iteration_move(fp_unit *unit, fp_pass_event event);
int fp_iteration_check(const fp_unit *unit, fp_pass_event event); /* the same, without the move */
/* Whether the model is in an iteration of another thread, or in a recovery; RuntimeError then. */
int fp_iteration_is_elsewhere(const fp_root *root);
int fp_iteration_check_thread(const fp_unit *unit);

/* One thread at a time works on the units in a backward: autograd has a thread for each device. */
void fp_iteration_enter(fp_root *root);
void fp_iteration_leave(fp_root *root); /* NULL is allowed */
/* To enter with a forward, which matters where one is recomputed. What is to be left; NULL: nothing. */
fp_root *fp_iteration_enter_in_backward(fp_root *root);
