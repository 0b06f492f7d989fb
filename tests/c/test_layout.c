/* test_layout.c -- offsets, paddings, totals and parts of a range, against counting element by element. */
#include "core/fp_layout.h"

#include <string.h>

#include "check.h"

enum { MOST_PARAMS = 8, MOST_ELEMENTS = 4096 };

/* Lay out with a loop that knows nothing but the rules; owner[e] is the parameter of element e, or -1. */
static int64_t
lay_out_slowly(const int64_t *numels, size_t n, int64_t alignment, int64_t world_size, int *owner)
{
    int64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        while (alignment > 0 && at % alignment != 0) {
            owner[at++] = -1;
        }
        for (int64_t e = 0; e < numels[i]; e++) {
            owner[at++] = (int)i;
        }
    }
    while (alignment > 0 && at % world_size != 0) {
        owner[at++] = -1;
    }
    return at;
}

static void
check_items(const fp_layout *layout, const int *owner)
{
    int64_t at = 0;
    size_t param = 0;
    for (size_t item = 0; item < layout->num_items; item++) {
        CHECK(layout->item_numels[item] > 0 || !layout->is_pad[item]);
        if (!layout->is_pad[item]) {
            CHECK_EQ(layout->starts[param], at);
            CHECK_EQ(layout->numels[param], layout->item_numels[item]);
        }
        for (int64_t e = 0; e < layout->item_numels[item]; e++) {
            CHECK_EQ(owner[at + e], layout->is_pad[item] ? -1 : (int)param);
        }
        at += layout->item_numels[item];
        param += !layout->is_pad[item];
    }
    CHECK_EQ(at, layout->numel);
    CHECK_EQ(param, layout->num_params);
}

/* Every parameter's part of [begin, end), found by looking at each element. */
static void
check_range(const fp_layout *layout, const int *owner, int64_t begin, int64_t end)
{
    size_t first, last;
    fp_layout_params_in(layout, begin, end, &first, &last);
    for (size_t i = 0; i < layout->num_params; i++) {
        int64_t numel = 0, offset = 0;
        for (int64_t e = end - 1; e >= begin; e--) {
            if (e < layout->numel && owner[e] == (int)i) {
                numel++;
                offset = e - begin;
            }
        }
        const fp_param_part part = fp_layout_part(layout, i, begin, end);
        if (layout->numels[i] > 0) {
            CHECK_EQ(part.in_range, numel > 0);
            CHECK_EQ(i >= first && i < last, numel > 0);
        }
        CHECK_EQ(part.numel, numel);
        if (numel > 0) {
            CHECK_EQ(part.offset, offset);
            CHECK_EQ(part.start, begin + offset - layout->starts[i]);
            CHECK_EQ(part.end_element, part.start + numel - 1);
        }
    }
}

static void
test_random(void)
{
    static int owner[MOST_ELEMENTS];
    int64_t numels[MOST_PARAMS];
    const size_t n = 1 + (size_t)random_below(MOST_PARAMS);
    const int64_t alignment = random_below(9), world_size = 1 + random_below(20);
    fp_layout layout;
    memset(owner, 0xFF, sizeof owner);
    for (size_t i = 0; i < n; i++) {
        numels[i] = random_below(i == 0 ? 1 : 4) == 0 ? 1 : random_below(30);
    }
    numels[0] = numels[0] > 0 ? numels[0] : 1;
    const int64_t numel = lay_out_slowly(numels, n, alignment, world_size, owner);
    CHECK_EQ(fp_layout_init(&layout, numels, NULL, n, alignment, world_size, 4), FP_OK);
    CHECK_EQ(layout.numel, numel);
    CHECK_EQ(layout.shard_numel, (numel + world_size - 1) / world_size);
    CHECK_EQ(layout.padded_numel, layout.shard_numel * world_size);
    check_items(&layout, owner);
    for (int64_t rank = 0; rank < world_size; rank++) {
        int64_t begin = 0, end = 0;
        CHECK_EQ(fp_layout_shard_range(&layout, rank, &begin, &end), FP_OK);
        CHECK_EQ(begin, rank * layout.shard_numel);
        check_range(&layout, owner, begin, end);
    }
    for (int i = 0; i < 20; i++) {
        const int64_t begin = random_below(numel + 1);
        check_range(&layout, owner, begin, begin + random_below(numel + 1 - begin));
    }
    CHECK_EQ(fp_layout_shard_range(&layout, -1, &numels[0], &numels[0]), FP_EINVAL);
    CHECK_EQ(fp_layout_shard_range(&layout, world_size, &numels[0], &numels[0]), FP_EINVAL);
    fp_layout_clear(&layout);
    fp_layout_clear(&layout);
}

static void
test_limits(void)
{
    const int64_t one = 1, zero = 0, negative = -1, half = INT64_MAX / 2;
    const int64_t halves[3] = {half, half, half};
    fp_layout layout = {.numel = -7};
    CHECK_EQ(fp_layout_init(&layout, &one, NULL, 0, 0, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, NULL, NULL, 1, 0, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &zero, NULL, 1, 0, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &negative, NULL, 1, 0, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &one, NULL, 1, -1, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &one, NULL, 1, 0, 0, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &one, NULL, 1, 0, 1, 0), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, 3, 0, 1, 1), FP_EOVERFLOW);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, 1, 0, 1, 4), FP_EOVERFLOW);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, 2, 4, 1, 1), FP_EOVERFLOW);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, 1, 0, INT64_MAX, 1), FP_EOVERFLOW);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, 1, INT64_MAX, 1, 1), FP_EOVERFLOW);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, SIZE_MAX, 0, 1, 1), FP_EOVERFLOW);
    fp_alloc_fail_at(1);
    CHECK_EQ(fp_layout_init(&layout, &one, NULL, 1, 0, 1, 1), FP_ENOMEM);
    CHECK_EQ(layout.numel, -7);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, 1, 16, 64, 2), FP_EOVERFLOW);
    CHECK_EQ(fp_layout_init(&layout, halves, NULL, 1, 16, 64, 1), FP_OK);
    CHECK_EQ(layout.padded_numel, layout.shard_numel * 64);
    CHECK(layout.padded_numel >= half);
    fp_layout_clear(&layout);
}

int
main(void)
{
    for (int i = 0; i < 500; i++) {
        test_random();
    }
    test_limits();
    return check_result();
}
