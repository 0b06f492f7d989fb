/* core/fp_boxes.c -- the staircase of a range, or the smaller tiling that fp_box_cover finds. */
#include "core/fp_boxes.h"

#include <stdlib.h>
#include <string.h>

#include "core/fp_box_cover.h"

/* A range that is not empty, by the coordinates of its first and last element. Dimensions [0, from) are those in which
 * the two agree, dimensions [to, ndim) those below both levels, in which every box is complete. */
typedef struct {
    size_t ndim;
    const int64_t *shape;
    int64_t first[FP_MAX_DIMS];
    int64_t last[FP_MAX_DIMS];
    size_t from, to;
    size_t first_level; /* the last dimension in which first is not 0, at least from */
    size_t last_level;  /* the last dimension in which last is not at its maximum, at least from */
} grid_range;

/* Where boxes go: the caller's arrays. */
typedef struct {
    size_t ndim;
    int64_t *offsets, *sizes;
    size_t count;
} box_list;

static void
coordinates(int64_t element, const int64_t *shape, size_t ndim, int64_t *out)
{
    for (size_t d = ndim; d-- > 0;) {
        out[d] = element % shape[d];
        element /= shape[d];
    }
}

static void
describe(grid_range *range, const int64_t *shape, size_t ndim, int64_t begin, int64_t end)
{
    range->ndim = ndim;
    range->shape = shape;
    coordinates(begin, shape, ndim, range->first);
    coordinates(end - 1, shape, ndim, range->last);
    range->from = 0;
    while (range->from < ndim && range->first[range->from] == range->last[range->from]) {
        range->from++;
    }
    range->first_level = range->last_level = range->from;
    for (size_t d = range->from; d < ndim; d++) {
        if (range->first[d] != 0) {
            range->first_level = d;
        }
        if (range->last[d] != shape[d] - 1) {
            range->last_level = d;
        }
    }
    const size_t level = range->first_level > range->last_level ? range->first_level : range->last_level;
    range->to = level < ndim ? level + 1 : ndim;
}

/* Append the box that equals `at` above level, is [low, high) there and complete below; nothing if it is empty. */
static void
add_box(box_list *list, const grid_range *range, const int64_t *at, size_t level, int64_t low, int64_t high)
{
    int64_t *offset = list->offsets + list->count * list->ndim, *size = list->sizes + list->count * list->ndim;
    if (low >= high) {
        return;
    }
    for (size_t d = 0; d < list->ndim; d++) {
        offset[d] = d < level ? at[d] : d == level ? low : 0;
        size[d] = d < level ? 1 : d == level ? high - low : range->shape[d];
    }
    list->count++;
}

/* One box for each level between the first element and a full slab, one for the slabs, one for each level back down. */
static void
add_staircase(box_list *list, const grid_range *range)
{
    const size_t from = range->from;
    for (size_t d = range->first_level; d > from; d--) {
        add_box(list, range, range->first, d, range->first[d] + (d < range->first_level), range->shape[d]);
    }
    add_box(list, range, range->first, from, range->first[from] + (range->first_level > from),
            range->last[from] + 1 - (range->last_level > from));
    for (size_t d = from + 1; d <= range->last_level; d++) {
        add_box(list, range, range->last, d, 0, range->last[d] + (d == range->last_level));
    }
}

static int
by_lower_corner(const void *a, const void *b)
{
    const fp_box_cover_box *x = a, *y = b;
    for (size_t d = 0; d < FP_TILING_DIMS; d++) {
        if (x->lower[d] != y->lower[d]) {
            return x->lower[d] < y->lower[d] ? -1 : 1;
        }
    }
    return 0;
}

/* Replace the staircase by a smaller tiling, if there is one. */
static fp_status
shrink(box_list *list, const grid_range *range)
{
    fp_box_cover_box boxes[FP_TILING_MOST];
    size_t count;
    const size_t crossed = range->to - range->from;
    memset(boxes, 0, sizeof boxes);
    if (list->count <= 2 || crossed > FP_TILING_DIMS) { /* a range that is no box needs two */
        return FP_OK;
    }
    const fp_box_cover_range part = {
        .ndim = crossed,
        .shape = range->shape + range->from,
        .first = range->first + range->from,
        .last = range->last + range->from,
        .first_level = range->first_level - range->from,
        .last_level = range->last_level - range->from,
    };
    const fp_status status = fp_box_cover_search(&part, list->count, boxes, &count);
    if (status != FP_OK || count == 0) {
        return status;
    }
    qsort(boxes, count, sizeof *boxes, by_lower_corner);
    list->count = 0;
    for (size_t b = 0; b < count; b++) {
        add_box(list, range, range->first, range->from, 0, 1); /* the dimensions above and below those searched */
        for (size_t d = 0; d < crossed; d++) {
            const size_t at = b * list->ndim + range->from + d;
            list->offsets[at] = boxes[b].lower[d];
            list->sizes[at] = boxes[b].upper[d] - boxes[b].lower[d];
        }
    }
    return FP_OK;
}

/* The product of the sizes. */
static fp_status
product(const int64_t *shape, size_t ndim, int64_t *out)
{
    int64_t numel = 1;
    int is_empty = 0;
    for (size_t d = 0; d < ndim; d++) {
        if (shape[d] < 0) {
            return FP_EINVAL;
        }
        is_empty |= shape[d] == 0;
    }
    for (size_t d = 0; d < ndim && !is_empty; d++) {
        if (numel > INT64_MAX / shape[d]) {
            return FP_EOVERFLOW;
        }
        numel *= shape[d];
    }
    *out = is_empty ? 0 : numel;
    return FP_OK;
}

fp_status
fp_boxes_of_range(const int64_t *shape, size_t ndim, int64_t begin, int64_t end, int64_t *offsets, int64_t *sizes,
                  size_t *count)
{
    grid_range range;
    box_list list = {.ndim = ndim, .offsets = offsets, .sizes = sizes};
    int64_t numel;
    if (ndim > FP_MAX_DIMS || (shape == NULL && ndim > 0)) {
        return FP_EINVAL;
    }
    fp_status status = product(shape, ndim, &numel);
    if (status != FP_OK) {
        return status;
    }
    if (begin < 0 || begin > end || end > numel) {
        return FP_EINVAL;
    }
    if (begin < end && ndim == 0) {
        list.count = 1;
    }
    else if (begin < end) {
        describe(&range, shape, ndim, begin, end);
        if (range.from == ndim) { /* one element */
            add_box(&list, &range, range.first, ndim - 1, range.first[ndim - 1], range.first[ndim - 1] + 1);
        }
        else {
            add_staircase(&list, &range);
            status = shrink(&list, &range);
        }
    }
    if (status == FP_OK) {
        *count = list.count;
    }
    return status;
}
