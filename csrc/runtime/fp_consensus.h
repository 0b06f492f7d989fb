/* runtime/fp_consensus.h -- what the ranks tell each other of units: what is gathered and old when a forward begins, and of units
 * with a secondary shard once a backward which gradients there are. */
#pragma once

#include "runtime/fp_types.h"

/* Agree on which units the next pass gathers from the shards: what a rank sees of its own shards may be less than what
 * has changed, and ranks that gather over different groups, or not at all, would wait for each other for ever. Parameters that
 * were moved are taken back before; where a rank cannot, all ranks raise. Also on which units are never gathered ahead. Without
 * a collective where no unit is asked about (fp_fresh.h). */
int fp_consensus_before_forward(fp_root *root);

/* Tell which units get a gradient in the backward that begins. Each flat parameter's wanted and wanted_accumulated are known, and what
 * other ranks have cleared is, once fp_consensus_read has returned. */
int fp_consensus_on_gradients(fp_root *root);
int fp_consensus_read(fp_root *root);  /* at once if it was read */
int fp_consensus_end(fp_root *root);   /* -1: an error of this rank or another */
void fp_consensus_drop(fp_root *root); /* the backward was broken off */
int fp_consensus_traverse(const fp_root *root, visitproc visit, void *arg);

/* The exception that is set becomes what all ranks raise when this backward ends, in the name of unit. */
void fp_consensus_note_error(fp_root *root, const fp_unit *unit);
