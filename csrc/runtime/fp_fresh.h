/* runtime/fp_fresh.h -- whether what is gathered has the values of now, or is gathered again. fp_fresh.c lists all that this depends
 * on, and why all ranks of a group know it alike. */
#pragma once

#include "runtime/fp_types.h"

/* Whether what is gathered has the values of now. */
int fp_fresh_is_of_now(const fp_unit *unit);
/* Whether nothing of it, or its gather, can be used, as it is of another capture of a CUDA graph. */
int fp_fresh_is_void(const fp_unit *unit);

/* Whether ranks ask each other, when a forward of the model begins, if the unit is old; and what this rank says: 1, 0, -1. */
int fp_fresh_is_asked(const fp_unit *unit);
int fp_fresh_is_old(fp_unit *unit);

/* Whether the unit may be gathered while the one before it computes. */
int fp_fresh_may_gather_ahead(const fp_unit *unit);
/* A forward comes to the unit, for the first time in it: note what was written since it came to the unit before. */
void fp_fresh_learn(fp_unit *unit);
/* Whether ranks ask each other, when the next forward begins, if the unit was written to before its turn; and what they have said. */
int fp_fresh_is_learned_next(const fp_unit *unit);
void fp_fresh_end_learning(fp_unit *unit, int written);
void fp_fresh_forget_learned(fp_unit *unit);
/* StateError if the unit, which was gathered ahead, was written to since on this rank. */
int fp_fresh_check_ahead(const fp_unit *unit);
