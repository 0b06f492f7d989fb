/* python/fp_line.h -- in which order a backward reduces the units that keep a copy, whoever has gradients of them.
 *
 * Ranks may not all come to the same units: one does not use a parameter, or the output of a unit. So reductions do not
 * follow gradients but a line that all ranks make alike, the units by the beginning of their forwards, last first. A unit's
 * turn comes when backward reaches a unit whose forward had ended before its own began: by then it has all the gradients
 * that it gets here, as autograd runs nodes in the reverse order of the forward. Who has none sends zeros, if some rank
 * has one (see fp_agree.h). Gathers that a rank's backward passes over are made up for at the same places. */
#ifndef FP_LINE_H
#define FP_LINE_H

#include "python/fp_pass.h"

int fp_line_begin(fp_run *run); /* a backward begins */
int fp_line_end(fp_run *run);
void fp_line_forget(fp_run *run);

/* Backward comes to a unit. 1: it has passed it before, and needs nothing of it. */
int fp_line_reach(fp_step *step);
/* The gradients of a part are there: whether they wait for their turn; then pack and flush. */
int fp_line_has(const fp_step *step, const fp_part *part);
int fp_line_flush(fp_run *run, Py_ssize_t cursor);
/* Start the copies from host memory of what the next gradients are added to. */
int fp_line_bring_back(fp_run *run);

int fp_line_join(fp_run *run, fp_step *step); /* the run has room for it in steps already */
void fp_line_leave(fp_run *run, const fp_step *step);

#endif
