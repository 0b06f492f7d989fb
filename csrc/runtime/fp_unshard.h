/* runtime/fp_unshard.h -- the unsharded data of a unit: gathered, looked at for changes of users, freed. */
#pragma once

#include "runtime/fp_types.h"

/* Make the views of a flat parameter, if there are none that fit the shard's dtype and device and who requires grad. */
int fp_unshard_make_views(fp_unit *unit, Py_ssize_t index);

/* The only way to another state of a unit's unsharded data. -1 with RuntimeError, and nothing changed, where the core's table
 * has no such move. */
int fp_unshard_move(fp_unit *unit, fp_unit_event event);

int fp_unshard_start(fp_unit *unit);     /* start gathering */
int fp_unshard_make_full(fp_unit *unit); /* gather, unless what is there is of now, and wait */
/* Whether the backward that runs must leave what is gathered: the graph that it records needs it, or one that it goes through
 * and keeps, which was recorded so. */
int fp_unshard_is_for_graph(const fp_unit *unit);
/* Leave what is gathered as it is. steps: fp_optimizer_steps now, where forwards may use it until it is old; -1: none may. */
int fp_unshard_keep(fp_unit *unit, int64_t steps);
/* A forward of the unit is over: what is gathered is freed, unless the backward of that forward or another graph needs it. */
int fp_unshard_end_forward(fp_unit *unit, int awaits_backward);
int fp_unshard_frees_passed(const fp_unit *unit); /* whether the backward that runs frees what it needs no more */
/* It has come to all gradients of a flat parameter: then free that, and forget the copy that it was gathered from if the
 * optimizer steps next. */
int fp_unshard_pass(fp_unit *unit, fp_flat_param *flat_param);
int fp_unshard_prefetch(fp_unit *target);                              /* start gathering what a backward comes to */
int fp_unshard_release_part(fp_unit *unit, fp_flat_param *flat_param); /* free the unsharded data of a flat parameter */
int fp_unshard_release(fp_unit *unit);                                 /* of all */
/* If the shards were changed since, no module shows what stays full, and is old. */
int fp_unshard_hide_old(fp_unit *unit);
int fp_unshard_show_params(fp_unit *unit); /* let the modules have the original parameters */

/* What was written to the views goes into the shard, and so do parameters that were replaced, or whose data were; the
 * latter by Python. 1: some were; 0; -1. */
int fp_unshard_sync_user_writes(fp_unit *unit);
/* The same after a forward. The graph has the values that were written, so it is not refused for them. */
int fp_unshard_take_written_in_forward(fp_unit *unit);
/* Before the backward of a unit: what was written since its forward is known to autograd, or refused. */
int fp_unshard_check_unchanged(fp_unit *unit);
int fp_unshard_take_requires_grad(fp_unit *unit);
