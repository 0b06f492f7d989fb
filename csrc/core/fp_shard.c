/* core/fp_shard.c -- the split of a flat parameter over ranks. */
#include "core/fp_shard.h"

static int64_t
min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Elements of every rank's padded shard. */
static fp_status
shard_numel_of(int64_t numel, int64_t world_size, int64_t *out)
{
    if (numel < 1 || world_size < 1) {
        return FP_EINVAL;
    }
    if (numel > INT64_MAX - world_size) {
        return FP_EOVERFLOW;
    }
    *out = 1 + (numel - 1) / world_size; /* rounded up; times world_size it is less than numel + world_size */
    return FP_OK;
}

fp_status
fp_shard_of_rank(int64_t numel, int64_t world_size, int64_t rank, fp_shard *out)
{
    int64_t shard_numel;
    const fp_status status = shard_numel_of(numel, world_size, &shard_numel);
    if (status != FP_OK) {
        return status;
    }
    if (rank < 0 || rank >= world_size) {
        return FP_EINVAL;
    }
    const int64_t start = min64(rank * shard_numel, numel);
    const int64_t held = min64(shard_numel, numel - start);
    *out = (fp_shard){.start = start, .numel = held, .padding = shard_numel - held};
    return FP_OK;
}

fp_status
fp_ranks_of_range(int64_t numel, int64_t world_size, int64_t begin, int64_t end, int64_t *first, int64_t *last)
{
    int64_t shard_numel;
    const fp_status status = shard_numel_of(numel, world_size, &shard_numel);
    if (status != FP_OK) {
        return status;
    }
    if (begin < 0 || begin > end || end > numel) {
        return FP_EINVAL;
    }
    *first = begin / shard_numel;
    *last = begin == end ? *first : (end - 1) / shard_numel + 1;
    return FP_OK;
}

fp_status
fp_piece_of_rank(int64_t numel, int64_t world_size, int64_t begin, int64_t end, int64_t rank, fp_rank_piece *out)
{
    int64_t first, last;
    fp_shard shard;
    fp_status status = fp_ranks_of_range(numel, world_size, begin, end, &first, &last);
    if (status != FP_OK) {
        return status;
    }
    if (rank < first || rank >= last) {
        return FP_EINVAL;
    }
    status = fp_shard_of_rank(numel, world_size, rank, &shard);
    if (status != FP_OK) {
        return status;
    }
    const int64_t start = begin > shard.start ? begin : shard.start;
    const int64_t stop = min64(end, shard.start + shard.numel);
    *out = (fp_rank_piece){.rank = rank, .start = start, .numel = stop - start, .offset_in_shard = start - shard.start};
    return FP_OK;
}
