/* runtime/fp_consensus.h -- the consensus of the ranks about units, by all-reduces of flags over each group. At most two when a
 * forward of the model begins: which units are stale, and which are never gathered ahead. One in a backward: which units with
 * a secondary shard get a gradient. They are about units that are in the model (fp_members.h).
 *
 * Functions give 0, or -1 with an exception. A rank that fails before an all-reduce still takes part in it and sets its error
 * slot; then all ranks raise. fp_root.consensus has the all-reduces of the backward under way. */
#pragma once

#include "runtime/fp_types.h"

/* Copy users' writes into the shards (fp_unshard_sync_user_writes). Then agree which units are stale: all ranks make their next
 * gather from the shards. One rank may see a change that others do not see, and ranks that gather over different groups, or
 * not at all, would wait for each other forever. Agree also which units are never gathered ahead. No collective is issued if
 * no unit is asked about (fp_fresh_is_asked, fp_fresh_is_learned_next), which all ranks know alike. */
int fp_consensus_before_forward(fp_root *root);

/* A backward begins: start the all-reduces that tell which units with a secondary shard get a gradient on this rank. Does not
 * wait. */
int fp_consensus_on_gradients(fp_root *root);
/* Wait for these all-reduces. Afterwards `wanted` of each flat parameter is valid, and gradients that users have cleared on
 * other ranks are cleared here. A second call does nothing. */
int fp_consensus_read(fp_root *root);
/* The backward ends: fp_consensus_read(), raise the error that this rank or another one has noted, and drop the exchanges. */
int fp_consensus_end(fp_root *root);
/* The backward was interrupted: drop the exchanges and the noted error. No wait. */
void fp_consensus_drop(fp_root *root);
int fp_consensus_traverse(const fp_root *root, visitproc visit, void *arg); /* for the garbage collector */

/* Take the exception that is set. fp_consensus_end() raises it on this rank, and an error that names unit on the other ranks.
 * Only the first exception of a backward is noted. Note it before fp_consensus_on_gradients(), or the other ranks do not get
 * it. */
void fp_consensus_note_error(fp_root *root, const fp_unit *unit);
