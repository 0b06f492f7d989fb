/* python/fp_agree.h -- what the ranks tell each other of units that keep a copy: once a forward and once a backward. */
#ifndef FP_AGREE_H
#define FP_AGREE_H

#include "python/fp_pass.h"

/* Agree on which units the next pass gathers from the shards: what a rank sees of its own masters may be less than what
 * has changed, and ranks that gather over different groups would wait for each other for ever. Parameters that were moved
 * are taken back before; where a rank cannot, all ranks raise. */
int fp_agree_on_stale(fp_run *run);

/* Tell which units get a gradient in the backward that begins. Each part's wanted and wanted_kept are known, and what
 * other ranks have cleared is, once fp_agree_read has returned. */
int fp_agree_on_gradients(fp_run *run);
int fp_agree_read(fp_run *run);  /* at once if it was read */
int fp_agree_end(fp_run *run);   /* -1: an error of this rank or another */
void fp_agree_drop(fp_run *run); /* the backward was broken off */
int fp_agree_traverse(const fp_run *run, visitproc visit, void *arg);

/* The exception that is set becomes what all ranks raise when this backward ends, in the name of step. */
void fp_agree_note_error(fp_run *run, const fp_step *step);

#endif
