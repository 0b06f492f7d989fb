/* runtime/fp_unshard.h -- the unsharded data of a unit: its views, its gathers, the writes of users to it, its end.
 *
 * fp_unit.state is the state of this data: fp_unit_state in core/fp_state.h. Gathers of one group are issued in one order on
 * all ranks, so callers start them where control flow is the same on all ranks. Functions give 0, or -1 with an exception,
 * unless they say more. Waits for a collective give up the GIL. */
#pragma once

#include "runtime/fp_types.h"

/* Make the views of flat parameter number index, unless there are views that fit the shard's dtype and device, and fit
 * which owners require grad. The data is not gathered by this. */
int fp_unshard_make_views(fp_unit *unit, Py_ssize_t index);

/* ValueError if a user has freed or resized the storage that a gather reads or writes. */
int fp_unshard_check_memory(const fp_unit *unit);
/* The only way to another state of a unit's unsharded data. -1 with RuntimeError, and nothing changed, where the core's table
 * has no such move. */
int fp_unshard_move(fp_unit *unit, fp_unit_event event);

/* Start to gather each flat parameter that needs it, and do not wait. Outside of a backward, writes of users go into the
 * shards first; with a secondary shard the consensus has copied them. After a failure the unit is PARTLY gathered, and another
 * call in the same pass starts the others. */
int fp_unshard_start(fp_unit *unit);
/* 1: the unit has fewer unsharded bytes than root->min_unit_bytes, and no secondary shard. */
int fp_unshard_is_small(const fp_unit *unit);
enum { FP_MOST_TOGETHER = 64 }; /* units that one collective gathers */
/* Start to gather a unit; if it is small, the small units that follow it too, as one collective, until they have
 * root->min_unit_bytes or are FP_MOST_TOGETHER. find_next(unit, &next): the unit after this one; NULL: none may be gathered
 * now. On failure, the gathers that have begun go on; on the CPU none has. */
int fp_unshard_start_small(fp_unit *first, int (*find_next)(const fp_unit *unit, fp_unit **next));
/* Gather unless the data has the current values (fp_fresh_is_of_now), and wait: UNSHARDED then. After an interrupted wait
 * another call waits again; after a failed gather it gathers again. */
int fp_unshard_make_full(fp_unit *unit);
/* 1: the backward that runs must not free the data: it records a graph (create_graph), or keeps a graph that was recorded
 * so. */
int fp_unshard_is_for_graph(const fp_unit *unit);
/* Keep the data after this pass. steps: fp_optimizer_steps now: state KEPT; -1: KEPT_FOR_GRAPH. */
int fp_unshard_keep(fp_unit *unit, int64_t steps);
/* A forward of the unit is over. Free the data unless awaits_backward is 1 or a graph needs it, and show the original
 * parameters. A sharded unit that awaits its backward and is not resharded goes on showing its views. */
int fp_unshard_end_forward(fp_unit *unit, int awaits_backward);
/* 1: the backward that runs frees the data of a unit when it has its gradients. 0: a graph or no_sync keeps it. */
int fp_unshard_frees_passed(const fp_unit *unit);
/* Backward has all gradients of this flat parameter: free its data if fp_unshard_frees_passed(). If gradients are
 * synchronized, an optimizer steps next, so its data does not become the secondary shard. */
int fp_unshard_pass(fp_unit *unit, fp_flat_param *flat_param);
/* Start to gather a unit to which backward comes next, if it awaits its backward and is not gathered. */
int fp_unshard_prefetch(fp_unit *target);
/* Free the data of one flat parameter, or of all. -1: a wait was interrupted, and that flat parameter is unchanged; or its
 * gather has failed, and its data is freed. Later flat parameters are unchanged. */
int fp_unshard_release_part(fp_unit *unit, fp_flat_param *flat_param);
int fp_unshard_release(fp_unit *unit);
/* For units that stay gathered: if the shards have changed since the gather, reading the data raises an error from now on. */
int fp_unshard_hide_old(fp_unit *unit);
int fp_unshard_show_params(fp_unit *unit); /* give the modules the original parameters, if there are any */

/* Between passes: copy what users wrote to the views into the shard; let Python take back parameters that users replaced,
 * or gave other data. 1: something was changed; 0: nothing; -1. */
int fp_unshard_sync_user_writes(fp_unit *unit);
/* After a forward: copy what it wrote to the views into the shard. The graph has these values, so it is not refused for
 * them. -1 with StateError if the forward has replaced a parameter, which is put back. */
int fp_unshard_take_written_in_forward(fp_unit *unit);
/* Before the backward of a unit. -1 with StateError if its parameters were replaced since the forward, or changed while a graph
 * has saved them. If they were changed otherwise, autograd refuses graphs that need the old values. */
int fp_unshard_check_unchanged(fp_unit *unit);
/* A frozen view that the user let require grad: see fp_flat_param_take_requires_grad(). */
int fp_unshard_take_requires_grad(fp_unit *unit);
