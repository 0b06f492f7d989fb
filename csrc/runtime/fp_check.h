/* runtime/fp_check.h -- the invariants of the structs, asserted in pairs: where a value is made, and where it is used.
 *
 * A build with FP_CHECK (`make check-build`) has the checks. If an invariant does not hold, the check prints it with the unit
 * and the place, and aborts the process. In other builds these functions do nothing. The caller holds the GIL, and in a
 * backward the lock of the root. where: the place, for the message. */
#pragma once

#include "runtime/fp_types.h"

#ifdef FP_CHECK
void fp_unit_check(const fp_unit *unit, const char *where);  /* and its flat parameters */
void fp_units_check(const fp_root *root, const char *where); /* the root, and all its units */
/* After a backward, when no forward or backward is under way. */
void fp_idle_check(const fp_root *root, const char *where);
#else
#define fp_unit_check(unit, where) ((void)0)
#define fp_units_check(root, where) ((void)0)
#define fp_idle_check(root, where) ((void)0)
#endif
