/* core/fp_shard.h -- which elements of a flat parameter belong to which rank. Pure C11: no Python.h, no torch.
 * Sizes are in ELEMENTS. Ranges are half-open: [start, start + numel). Everything here is O(1), allocates nothing and
 * is safe without the GIL. The split is that of torch.chunk, as FlatParamHandle._get_unpadded_shard (torch 2.13) uses
 * it, padded so that all shards are equally long. */
#ifndef FP_SHARD_H
#define FP_SHARD_H

#include <stdint.h>

#include "core/fp_status.h"

typedef struct {
    int64_t start;   /* first element, counted in the unsharded 1-D tensor; the tensor's end for a rank past it */
    int64_t numel;   /* elements that hold data; 0 for a rank past the end */
    int64_t padding; /* elements added at the end so that all shards are equally long */
} fp_shard;

/* The part of a range of the unsharded tensor that one rank holds. */
typedef struct {
    int64_t rank;
    int64_t start;           /* first element, counted in the unsharded tensor */
    int64_t numel;           /* >= 1 */
    int64_t offset_in_shard; /* the same element, counted in the rank's shard */
} fp_rank_piece;

/* The shard of one rank.
 *   numel             elements of the unsharded tensor, >= 1
 *   world_size, rank  ranks that share it, >= 1; 0 <= rank < world_size
 * Returns FP_OK; FP_EINVAL for an argument out of range; FP_EOVERFLOW if world_size padded shards do not fit 64 bits.
 * *out is written only when FP_OK is returned. */
fp_status fp_shard_of_rank(int64_t numel, int64_t world_size, int64_t rank, fp_shard *out);

/* The ranks [*first, *last) that hold elements of the range [begin, end), 0 <= begin <= end <= numel: consecutive ones,
 * none (*first == *last) for an empty range. Results as fp_shard_of_rank. */
fp_status fp_ranks_of_range(int64_t numel, int64_t world_size, int64_t begin, int64_t end, int64_t *first,
                            int64_t *last);

/* What one rank of those holds of [begin, end). FP_EINVAL also when the rank holds nothing of it. */
fp_status fp_piece_of_rank(int64_t numel, int64_t world_size, int64_t begin, int64_t end, int64_t rank,
                           fp_rank_piece *out);

#endif
