/* runtime/fp_iteration.h -- an iteration of a model, and which thread it runs in. */
#ifndef FP_ITERATION_H
#define FP_ITERATION_H

#include "runtime/fp_types.h"

int fp_iteration_begin(fp_root *run);
/* Forget whatever an iteration that was broken off has left. */
int fp_iteration_recover(fp_root *run);
/* Gather anew, and free, what is out of date of the units that keep a copy. Nothing may be under way. */
int fp_iteration_refresh(fp_root *run);
int fp_iteration_append_order(fp_root *run, fp_unit *step); /* the unit's forward has ended */
int fp_iteration_wait_until_read(fp_root *run); /* shards on the host that the device gathers from may be written to */
void fp_iteration_rest(fp_unit *step); /* the unit is in no backward, awaits none, is not in the order of forwards */
void fp_iteration_leave_root(fp_unit *step); /* take the unit out of its run */

/* Exceptions: the unit is in no run; another thread is in the model. */
int fp_iteration_check_joined(const fp_unit *step);
int fp_iteration_is_elsewhere(const fp_root *run); /* whether another thread than this is in the model */
void fp_iteration_refuse_thread(const fp_unit *step);

/* One thread at a time works on the units in a backward: autograd has a thread for each device. */
void fp_iteration_enter(fp_root *run);
void fp_iteration_leave(fp_root *run);
/* The same for forwards, which matter where one is recomputed. NULL: nothing is locked. */
fp_root *fp_iteration_lock_in_backward(fp_root *run);
void fp_iteration_unlock(fp_root *locked);

#endif
