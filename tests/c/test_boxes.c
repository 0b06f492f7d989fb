/* test_boxes.c -- boxes tile each range exactly; limits of 64 bits. */
#include "core/fp_boxes.h"

#include <string.h>

#include "check.h"

enum { MOST_ELEMENTS = 1024, MOST_NUMBERS = 2 * FP_MAX_DIMS * FP_MAX_DIMS };

static int64_t offsets[MOST_NUMBERS], sizes[MOST_NUMBERS];

/* Mark the elements of a box; returns 0 if one is outside the shape. */
static int
mark(const int64_t *shape, size_t ndim, const int64_t *offset, const int64_t *size, unsigned char *covered)
{
    int64_t index[FP_MAX_DIMS];
    memcpy(index, offset, ndim * sizeof *index);
    for (;;) {
        int64_t element = 0;
        for (size_t d = 0; d < ndim; d++) {
            if (index[d] < 0 || index[d] >= shape[d]) {
                return 0;
            }
            element = element * shape[d] + index[d];
        }
        covered[element]++;
        size_t d = ndim;
        while (d > 0 && ++index[d - 1] == offset[d - 1] + size[d - 1]) {
            index[d - 1] = offset[d - 1];
            d--;
        }
        if (d == 0) {
            return 1;
        }
    }
}

static void
test_range(const int64_t *shape, size_t ndim, int64_t numel, int64_t begin, int64_t end)
{
    unsigned char covered[MOST_ELEMENTS] = {0};
    size_t count = 99;
    CHECK_EQ(fp_boxes_of_range(shape, ndim, begin, end, offsets, sizes, &count), FP_OK);
    CHECK(count <= fp_boxes_most(ndim));
    for (size_t b = 0; b < count; b++) {
        CHECK(mark(shape, ndim, offsets + b * ndim, sizes + b * ndim, covered));
    }
    for (int64_t e = 0; e < numel; e++) {
        CHECK_EQ(covered[e], e >= begin && e < end);
    }
}

static void
test_random(void)
{
    int64_t shape[6], numel = 1;
    const size_t ndim = 1 + (size_t)random_below(6);
    for (size_t d = 0; d < ndim; d++) {
        shape[d] = 1 + random_below(ndim > 4 ? 3 : 5);
        numel *= shape[d];
    }
    for (int i = 0; i < 20; i++) {
        const int64_t begin = random_below(numel + 1);
        test_range(shape, ndim, numel, begin, begin + random_below(numel + 1 - begin));
    }
}

static void
test_limits(void)
{
    const int64_t shape[2] = {4, 2}, huge[2] = {INT64_MAX, 2}, negative[1] = {-1}, empty[3] = {INT64_MAX, 0, INT64_MAX};
    int64_t many[FP_MAX_DIMS + 1];
    size_t count = 99;
    for (int d = 0; d <= FP_MAX_DIMS; d++) {
        many[d] = 1;
    }
    CHECK_EQ(fp_boxes_of_range(shape, 2, -1, 3, offsets, sizes, &count), FP_EINVAL);
    CHECK_EQ(fp_boxes_of_range(shape, 2, 3, 2, offsets, sizes, &count), FP_EINVAL);
    CHECK_EQ(fp_boxes_of_range(shape, 2, 0, 9, offsets, sizes, &count), FP_EINVAL);
    CHECK_EQ(fp_boxes_of_range(negative, 1, 0, 0, offsets, sizes, &count), FP_EINVAL);
    CHECK_EQ(fp_boxes_of_range(NULL, 1, 0, 0, offsets, sizes, &count), FP_EINVAL);
    CHECK_EQ(fp_boxes_of_range(many, FP_MAX_DIMS + 1, 0, 0, offsets, sizes, &count), FP_EINVAL);
    CHECK_EQ(fp_boxes_of_range(huge, 2, 0, 1, offsets, sizes, &count), FP_EOVERFLOW);
    CHECK_EQ(count, 99);
    CHECK_EQ(fp_boxes_of_range(shape, 2, 1, 7, offsets, sizes, &count), FP_OK);
    CHECK_EQ(count, 3);
    CHECK_EQ(fp_boxes_of_range(empty, 3, 0, 0, offsets, sizes, &count), FP_OK);
    CHECK_EQ(count, 0);
    CHECK_EQ(fp_boxes_of_range(NULL, 0, 0, 1, offsets, sizes, &count), FP_OK);
    CHECK_EQ(count, 1);
    CHECK_EQ(fp_boxes_of_range(many, FP_MAX_DIMS, 0, 1, offsets, sizes, &count), FP_OK);
    CHECK_EQ(count, 1);
    CHECK_EQ(fp_boxes_of_range(huge, 1, 5, INT64_MAX, offsets, sizes, &count), FP_OK);
    CHECK_EQ(sizes[0], INT64_MAX - 5);
}

int
main(void)
{
    for (int i = 0; i < 300; i++) {
        test_random();
    }
    test_limits();
    return check_result();
}
