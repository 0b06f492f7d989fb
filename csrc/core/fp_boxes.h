/* core/fp_boxes.h -- an element range of an N-D parameter as boxes, for checkpoints: a file has N-D tensors, and a shard has
 * a range of elements. Pure C11: no Python.h, no torch. Nothing is allocated; safe without the GIL.
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
 * Returns FP_OK; FP_EINVAL for an argument out of range; FP_EOVERFLOW if the product of shape does not fit 64 bits. After a
 * failure *count and the arrays are as before.
 *
 * The elements of each box are consecutive, and follow those of the box before: the staircase. No other cut of the range into
 * consecutive runs has fewer boxes. Boxes of elements that are not consecutive may be fewer: [1, 7) of (4, 2)
 * is three boxes here, and could be two columns. */
fp_status fp_boxes_of_range(const int64_t *shape, size_t ndim, int64_t begin, int64_t end, int64_t *offsets,
                            int64_t *sizes, size_t *count);
