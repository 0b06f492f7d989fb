/* core/fp_boxes.c -- a range as the staircase: a box for each level at which the range enters or leaves a row. */
#include "core/fp_boxes.h"

/* rows[d] becomes the product of the sizes after dimension d, *numel the product of all sizes. */
static fp_status
count_rows(const int64_t *shape, size_t ndim, int64_t *rows, int64_t *numel)
{
    int is_empty = 0, overflows = 0;
    *numel = 1;
    for (size_t d = ndim; d-- > 0;) {
        if (shape[d] < 0) {
            return FP_EINVAL;
        }
        rows[d] = *numel;
        is_empty |= shape[d] == 0;
        overflows |= __builtin_mul_overflow(*numel, shape[d] == 0 ? 1 : shape[d], numel);
    }
    *numel = is_empty ? 0 : *numel;
    return overflows && !is_empty ? FP_EOVERFLOW : FP_OK;
}

fp_status
fp_boxes_of_range(const int64_t *shape, size_t ndim, int64_t begin, int64_t end, int64_t *offsets, int64_t *sizes,
                  size_t *count)
{
    int64_t rows[FP_MAX_DIMS], numel;
    if (ndim > FP_MAX_DIMS || (shape == NULL && ndim > 0)) {
        return FP_EINVAL;
    }
    const fp_status status = count_rows(shape, ndim, rows, &numel);
    if (status != FP_OK) {
        return status;
    }
    if (begin < 0 || begin > end || end > numel) {
        return FP_EINVAL;
    }
    *count = 0;
    for (int64_t at = begin; at < end; offsets += ndim, sizes += ndim, (*count)++) {
        size_t level = 0; /* the outermost dimension with a row that begins at `at` and ends in the range */
        while (level < ndim && (at % rows[level] != 0 || rows[level] > end - at)) {
            level++;
        }
        int64_t taken = 1;
        for (size_t d = 0; d < ndim; d++) {
            offsets[d] = at / rows[d] % shape[d];
            sizes[d] = d < level ? 1 : shape[d];
        }
        if (level < ndim) {
            const int64_t in_range = (end - at) / rows[level], in_row = shape[level] - offsets[level];
            sizes[level] = in_range < in_row ? in_range : in_row;
            taken = sizes[level] * rows[level];
        }
        at += taken;
    }
    return FP_OK;
}
