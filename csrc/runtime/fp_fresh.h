/* runtime/fp_fresh.h -- whether a unit is gathered again: does its unsharded data have the current values of the shards?
 * The answer decides about a collective, so all ranks of the group must give the same one. fp_fresh.c lists all that it depends
 * on, and why all ranks know that alike. Functions give 1 or 0 and raise nothing, unless they say more. */
#pragma once

#include "runtime/fp_types.h"

/* 1: the unit is gathered, or its gather is under way, and the data has the current values. In a backward every gathered unit
 * counts: backward needs the values of the forward. -1: an exception in a module's own __getattr__. */
int fp_fresh_is_of_now(const fp_unit *unit);
/* 1: the data, or its gather, belongs to another capture of a CUDA graph: its memory cannot be used. */
int fp_fresh_is_void(const fp_unit *unit);

/* 1: when a forward of the model begins, the ranks ask each other whether this unit is stale. */
int fp_fresh_is_asked(const fp_unit *unit);
/* This rank's answer: 1: its shard has changed since the gather; 0; -1 with an exception. Resets unit->suspect. */
int fp_fresh_is_old(fp_unit *unit);

/* Gathering ahead: to gather a unit while the one before it computes. A forward that writes to a unit's parameters before
 * the unit's turn (a momentum encoder) forbids it for that unit. Each kind of forward, with and without gradients, is
 * watched once. */
int fp_fresh_may_gather_ahead(const fp_unit *unit);
/* The first forward of the unit in this pass begins: note if its shard was written to since the forward of the unit before
 * it; with min_unit_bytes, since the first forward of the pass. */
void fp_fresh_learn(fp_unit *unit);
/* 1: when the next forward of the model begins, the ranks tell each other what they have noted. */
int fp_fresh_is_learned_next(const fp_unit *unit);
/* The ranks have told each other. written: 1 if some rank saw such a write. */
void fp_fresh_end_learning(fp_unit *unit, int written);
/* Watch again from the next forward on. All ranks must call it together. */
void fp_fresh_forget_learned(fp_unit *unit);
/* The unit was gathered ahead. 0, or -1 with StateError if this rank has written to its shard since: the gathered values
 * are old, and the other ranks cannot know that. */
int fp_fresh_check_ahead(const fp_unit *unit);
