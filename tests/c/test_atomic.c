/* test_atomic.c -- shards that cut no block: as long as a search that tries every length and place says. */
#include "core/fp_layout.h"

#include "check.h"

enum { MOST_PARAMS = 5 };

/* Whether parameter i may lie at [at, at + numel). */
static int
may_lie(int64_t at, int64_t numel, int64_t block, int64_t shard)
{
    for (int64_t e = 1; e < numel; e++) { /* cut before element e */
        if ((at + e) % shard == 0 && e % block != 0) {
            return 0;
        }
    }
    return 1;
}

static int
fits(const int64_t *numels, const int64_t *blocks, size_t n, int64_t alignment, int64_t world_size, int64_t shard)
{
    int64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        while (at % alignment != 0 || !may_lie(at, numels[i], blocks[i], shard)) {
            if (++at > world_size * shard) {
                return 0;
            }
        }
        at += numels[i];
    }
    return at <= world_size * shard;
}

static void
test_random(void)
{
    int64_t numels[MOST_PARAMS], blocks[MOST_PARAMS];
    const size_t n = (size_t)(1 + random_below(MOST_PARAMS));
    const int64_t alignment = 1 + random_below(4), world_size = 1 + random_below(5);
    numels[0] = 1;
    for (size_t i = 0; i < n; i++) {
        blocks[i] = 1 + random_below(9);
        numels[i] = (i == 0) + blocks[i] * random_below(7) + random_below(2);
    }
    int64_t shard = alignment;
    while (!fits(numels, blocks, n, alignment, world_size, shard)) {
        shard += alignment;
    }
    fp_layout layout;
    CHECK_EQ(fp_layout_init(&layout, numels, blocks, n, alignment, world_size, 4), FP_OK);
    CHECK_EQ(layout.shard_numel, shard);
    CHECK_EQ(layout.numel, shard * world_size);
    CHECK_EQ(layout.padded_numel, shard * world_size);
    int64_t at = 0;
    size_t param = 0;
    for (size_t item = 0; item < layout.num_items; item++) {
        if (!layout.is_pad[item]) {
            CHECK_EQ(layout.starts[param], at);
            CHECK_EQ(layout.item_numels[item], numels[param]);
            CHECK_EQ(at % alignment, 0);
            CHECK(may_lie(at, numels[param], blocks[param], shard));
            param++;
        }
        at += layout.item_numels[item];
    }
    CHECK_EQ(param, n);
    CHECK_EQ(at, layout.numel);
    fp_layout_clear(&layout);
}

static void
test_limits(void)
{
    const int64_t one = 1, zero = 0, half = INT64_MAX / 2, numels[2] = {half / 4, half / 4};
    fp_layout layout = {.numel = -7};
    CHECK_EQ(fp_layout_init(&layout, &one, &zero, 1, 1, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &one, &one, 1, 0, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &one, &one, 1, 1, 0, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &zero, &one, 1, 1, 1, 1), FP_EINVAL);
    CHECK_EQ(fp_layout_init(&layout, &half, &half, 1, 1, 8, 1), FP_EOVERFLOW); /* eight shards of all of it */
    CHECK_EQ(fp_layout_init(&layout, &half, &half, 1, 1, 1, 1), FP_EOVERFLOW);
    CHECK_EQ(fp_layout_init(&layout, numels, numels, 2, 1, 8, 1), FP_EOVERFLOW);
    fp_alloc_fail_at(1);
    CHECK_EQ(fp_layout_init(&layout, &one, &one, 1, 1, 1, 1), FP_ENOMEM);
    CHECK_EQ(layout.numel, -7);
    CHECK_EQ(fp_layout_init(&layout, numels, numels, 2, 1, 2, 1), FP_OK);
    CHECK_EQ(layout.shard_numel, half / 4);
    fp_layout_clear(&layout);
}

/* Every length from an even split on would be tried: the search goes on in bigger steps, and ends near the least, with
 * which the second parameter goes behind the first one into the fourth shard. */
static void
test_long_search(void)
{
    const int64_t numels[4] = {10000000, 3000000, 3000000, 3000000}, blocks[4] = {1, 3000000, 3000000, 3000000};
    const int64_t least = 3250000;
    fp_layout layout;
    CHECK_EQ(fp_layout_init(&layout, numels, blocks, 4, 1, 6, 4), FP_OK);
    CHECK(layout.shard_numel >= least && layout.shard_numel <= least + least / 4096 + 1);
    CHECK_EQ(layout.starts[1], numels[0]);
    CHECK_EQ(layout.starts[2], 4 * layout.shard_numel);
    CHECK_EQ(layout.starts[3], 5 * layout.shard_numel);
    fp_layout_clear(&layout);
}

int
main(void)
{
    for (int i = 0; i < 3000; i++) {
        test_random();
    }
    test_limits();
    test_long_search();
    return check_result();
}
