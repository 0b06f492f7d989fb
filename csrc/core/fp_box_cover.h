/* core/fp_box_cover.h -- the fewest boxes that tile a range of a grid in lexicographic order, by exact search.
 * Pure C11: no Python.h, no torch. Internal to the core: fp_boxes.c is the only user. */
#ifndef FP_BOX_COVER_H
#define FP_BOX_COVER_H

#include <stddef.h>
#include <stdint.h>

#include "core/fp_status.h"

/* What the search takes on: ranges of up to FP_TILING_DIMS dimensions, and how many cells it visits before it gives up
 * (about 20 ms). */
enum { FP_TILING_DIMS = 5, FP_TILING_MOST = 2 * FP_TILING_DIMS - 1, FP_TILING_WORK = 4000000 };

/* A range of a grid: all x with first <= x <= last in lexicographic order, both inclusive. */
typedef struct {
    size_t ndim;          /* 1 to FP_TILING_DIMS */
    const int64_t *shape; /* sizes >= 1 */
    const int64_t *first; /* first[0] < last[0] */
    const int64_t *last;
    size_t first_level; /* the last dimension in which first is not 0; 0 if there is none */
    size_t last_level;  /* the last dimension in which last is not at its maximum; 0 if there is none */
} fp_box_cover_range;

/* A box of it: lower <= x < upper in every dimension. */
typedef struct {
    int64_t lower[FP_TILING_DIMS];
    int64_t upper[FP_TILING_DIMS];
} fp_box_cover_box;

/* Look for a tiling with fewer than limit boxes, 1 <= limit <= FP_TILING_MOST. *count gets the size of the smallest,
 * and boxes its boxes, in no order; 0 when there is none, or the search gave up. FP_OK or FP_ENOMEM. */
fp_status fp_box_cover_search(const fp_box_cover_range *range, size_t limit, fp_box_cover_box *boxes, size_t *count);

#endif
