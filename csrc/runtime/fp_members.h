/* runtime/fp_members.h -- which units are in the model now: those that its outermost module leads to through its child modules.
 * All ranks run one program, so they add and remove the same modules, and know alike which units are in the model. They do not
 * know alike which removed units are still alive: one rank may have a reference, or a cycle that it has not collected yet. So
 * whatever decides about a collective asks here, and not which units root->units has. A removed unit
 *   is in no consensus. If it runs all the same (a module in a plain list), it counts as stale
 *   is not gathered ahead
 *   loses the gradients that no_sync has kept, in the next backward in which it did not run: no rank reduces them
 *
 * The modules are looked at only where a unit is asked about, at most once in a forward and once in a backward. All units are
 * in the model if the root has no module (a driver's units), and once that module is freed. */
#pragma once

#include "runtime/fp_types.h"

void fp_members_forget(fp_root *root); /* a forward or backward begins: modules may have been added or removed */

/* 1: the unit, which has a root, is in the model; 0: it was removed; -1 with an exception. */
int fp_members_has(const fp_unit *unit);
/* 1: it is in the model, or its forward has run in this pass; 0; -1. */
int fp_members_takes_part(const fp_unit *unit);
/* If other ranks would have to reduce with this one, and the unit does not take part: drop its accumulated gradients, and
 * return 1. Else 0; -1. */
int fp_members_drop_removed(fp_unit *unit);
