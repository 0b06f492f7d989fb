/* test_shard.c -- shards are torch.chunk's, tile the tensor, and know where each element is; limits of 64 bits. */
#include "core/fp_shard.h"

#include "check.h"

/* The elements of one rank, counted one by one: chunks of ceil(numel / world_size). */
static void
test_small(int64_t numel, int64_t world_size)
{
    const int64_t chunk = (numel + world_size - 1) / world_size;
    int64_t next = 0;
    for (int64_t rank = 0; rank < world_size; rank++) {
        fp_shard shard;
        int64_t held = 0;
        for (int64_t element = 0; element < numel; element++) {
            held += element / chunk == rank;
        }
        CHECK_EQ(fp_shard_of_rank(numel, world_size, rank, &shard), FP_OK);
        CHECK_EQ(shard.start, next);
        CHECK_EQ(shard.numel, held);
        CHECK_EQ(shard.numel + shard.padding, chunk);
        next += shard.numel;
    }
    CHECK_EQ(next, numel);
}

static void
test_ranges(int64_t numel, int64_t world_size)
{
    const int64_t chunk = (numel + world_size - 1) / world_size;
    for (int64_t begin = 0; begin <= numel; begin++) {
        for (int64_t end = begin; end <= numel; end++) {
            int64_t first, last, element = begin;
            CHECK_EQ(fp_ranks_of_range(numel, world_size, begin, end, &first, &last), FP_OK);
            for (int64_t rank = first; rank < last; rank++) {
                fp_rank_piece piece;
                CHECK_EQ(fp_piece_of_rank(numel, world_size, begin, end, rank, &piece), FP_OK);
                CHECK_EQ(piece.rank, rank);
                CHECK_EQ(piece.start, element);
                CHECK(piece.numel >= 1);
                CHECK_EQ(piece.start / chunk, rank);
                CHECK_EQ((piece.start + piece.numel - 1) / chunk, rank);
                CHECK_EQ(piece.offset_in_shard, piece.start % chunk);
                element += piece.numel;
            }
            CHECK_EQ(element, end);
        }
    }
}

static void
test_limits(void)
{
    fp_shard shard = {.start = -7};
    fp_rank_piece piece;
    int64_t a, b;
    CHECK_EQ(fp_shard_of_rank(0, 1, 0, &shard), FP_EINVAL);
    CHECK_EQ(fp_shard_of_rank(1, 0, 0, &shard), FP_EINVAL);
    CHECK_EQ(fp_shard_of_rank(1, 1, 1, &shard), FP_EINVAL);
    CHECK_EQ(fp_shard_of_rank(1, 1, -1, &shard), FP_EINVAL);
    CHECK_EQ(fp_shard_of_rank(INT64_MAX, 1, 0, &shard), FP_EOVERFLOW);
    CHECK_EQ(fp_shard_of_rank(INT64_MIN, INT64_MIN, INT64_MIN, &shard), FP_EINVAL);
    CHECK_EQ(shard.start, -7);
    CHECK_EQ(fp_shard_of_rank(INT64_MAX - 4096, 4096, 4095, &shard), FP_OK);
    CHECK_EQ(shard.start + shard.numel, INT64_MAX - 4096);
    CHECK_EQ(fp_shard_of_rank(1, INT64_MAX - 1, INT64_MAX - 2, &shard), FP_OK);
    CHECK_EQ(shard.numel, 0);
    CHECK_EQ(shard.start, 1);
    CHECK_EQ(fp_ranks_of_range(10, 2, 5, 4, &a, &b), FP_EINVAL);
    CHECK_EQ(fp_ranks_of_range(10, 2, -1, 4, &a, &b), FP_EINVAL);
    CHECK_EQ(fp_ranks_of_range(10, 2, 0, 11, &a, &b), FP_EINVAL);
    CHECK_EQ(fp_ranks_of_range(0, 2, 0, 0, &a, &b), FP_EINVAL);
    CHECK_EQ(fp_piece_of_rank(10, 2, 0, 5, 1, &piece), FP_EINVAL);
    CHECK_EQ(fp_piece_of_rank(10, 2, 0, 11, 1, &piece), FP_EINVAL);
}

int
main(void)
{
    for (int64_t numel = 1; numel <= 40; numel++) {
        for (int64_t world_size = 1; world_size <= 45; world_size++) {
            test_small(numel, world_size);
        }
    }
    for (int64_t world_size = 1; world_size <= 20; world_size++) {
        test_ranges(17, world_size);
    }
    test_limits();
    return check_result();
}
