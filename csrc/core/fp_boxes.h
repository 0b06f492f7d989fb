/* core/fp_boxes.h -- an element range of an N-D parameter as boxes. Pure C11: no Python.h, no torch.
 * Sizes are in ELEMENTS. Elements are counted in row-major order of the shape; ranges are half-open: [begin, end). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/fp_status.h"

/* The most dimensions a shape may have (torch's limit, too). */
enum { FP_MAX_DIMS = 64 };

/* The most boxes that a range of a shape of ndim dimensions needs: 2 * ndim - 1, and 1 for no dimension. */
static inline size_t
fp_boxes_most(size_t ndim)
{
    return ndim == 0 ? 1 : 2 * ndim - 1;
}

/* Cut a range into few disjoint boxes that tile it exactly, in order of their first element.
 *   shape, ndim     sizes >= 0, ndim <= FP_MAX_DIMS
 *   begin, end      0 <= begin <= end <= product of shape
 *   offsets, sizes  the caller's, room for fp_boxes_most(ndim) * ndim each; box b, dimension d is at [b * ndim + d]
 *   count           how many boxes were written; 0 for an empty range
 * Returns FP_OK; FP_EINVAL for an argument out of range; FP_EOVERFLOW if the product of shape does not fit 64 bits;
 * FP_ENOMEM. After a failure *count is as before, and the arrays hold nothing of use.
 *
 * The staircase, a box for each level at which the range leaves a row, is short, but often not the shortest: [1, 7) of
 * (4, 2) is two columns, not three boxes. A range crosses the dimensions from the first in which its ends differ to the
 * last in which it is not full. For ranges that cross up to three dimensions there are no fewer boxes than these, and
 * nearly always for four and five. Of more, those before the last five are done as in the staircase. */
fp_status fp_boxes_of_range(const int64_t *shape, size_t ndim, int64_t begin, int64_t end, int64_t *offsets,
                            int64_t *sizes, size_t *count);
