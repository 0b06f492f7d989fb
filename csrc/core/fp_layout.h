/* core/fp_layout.h -- where the original parameters lie in a flat parameter. Pure C11: no Python.h, no torch.
 * Sizes are in ELEMENTS unless the name ends in _bytes. Ranges are half-open, except where torch's metadata is given.
 *
 * The layout is that of FlatParamHandle._init_flat_param_and_metadata (torch 2.13). With an alignment (torch's
 * use_orig_params) padding goes before a parameter to start it at a multiple of the alignment, and after the last one
 * to make the total a multiple of the world size. Without, the parameters follow each other, and only the shards are
 * padded. A layout is a list of items in order: parameters and paddings. A 0-dim parameter has one element, as shape
 * (1,). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/fp_status.h"

/* Owns its arrays: filled by fp_layout_init, given back by fp_layout_clear. Nobody else writes to it, so after
 * fp_layout_init several threads may read it. */
typedef struct {
    int64_t world_size;
    int64_t item_bytes;
    int64_t alignment;     /* elements; 0: none */
    int64_t numel;         /* the unsharded flat parameter: parameters and all padding items */
    int64_t numel_params;  /* without padding */
    int64_t shard_numel;   /* every rank's padded shard */
    int64_t padded_numel;  /* shard_numel * world_size: what an all-gather fills */
    size_t num_params;     /* >= 1 */
    size_t num_items;      /* parameters and paddings */
    int64_t *starts;       /* [num_params] first element of each parameter, ascending */
    int64_t *numels;       /* [num_params] as given */
    int64_t *item_numels;  /* [num_items] torch's _numels_with_padding */
    unsigned char *is_pad; /* [num_items] torch's _is_padding_mask: 1 for a padding */
} fp_layout;

/* What a range of the flat parameter, such as a rank's shard, holds of one parameter: torch's _ShardParamInfo. When
 * in_range is 0 the rest is 0. */
typedef struct {
    int in_range;
    int64_t offset;      /* first held element, counted in the range */
    int64_t numel;       /* held elements */
    int64_t start;       /* first held element, counted in the parameter */
    int64_t end_element; /* last held element, counted in the parameter: INCLUSIVE, as torch has it */
} fp_param_part;

/* Lay out n parameters.
 *   numels      elements of each, >= 0; their sum >= 1
 *   blocks      NULL: as torch does. Else shards start at multiples of the alignment (>= 1) and cut no block
 *               (core/fp_atomic.h): parameter i is cut only at multiples of blocks[i] >= 1 elements, counted from its
 *               start. The shards are as short as that allows; the padding at the end reaches to the last of them, so
 *               numel is padded_numel
 *   alignment   elements, >= 0; 0: none
 *   world_size  >= 1
 *   item_bytes  bytes of one element, >= 1
 *   layout      written only when FP_OK is returned; then to be given to fp_layout_clear
 * Returns FP_OK; FP_EINVAL for an argument out of range; FP_EOVERFLOW if the total in bytes might not fit 64 bits,
 * taking each padding as large as the alignment and the world size allow; FP_ENOMEM. O(n), one allocation. */
fp_status fp_layout_init(fp_layout *layout, const int64_t *numels, const int64_t *blocks, size_t n, int64_t alignment,
                         int64_t world_size, int64_t item_bytes);

/* Give back the arrays. Allowed for a zeroed layout and twice. */
void fp_layout_clear(fp_layout *layout);

/* The parameters [*first, *last) that have elements in [begin, end), 0 <= begin <= end: none for an empty range. Like
 * torch, it counts an empty parameter inside the range as one that has. Binary search: O(log n). */
void fp_layout_params_in(const fp_layout *layout, int64_t begin, int64_t end, size_t *first, size_t *last);

/* What [begin, end), 0 <= begin <= end, holds of parameter i < num_params. O(1). */
fp_param_part fp_layout_part(const fp_layout *layout, size_t i, int64_t begin, int64_t end);

/* The range [*begin, *end) of a rank's padded shard; it may reach past the unsharded flat parameter, as torch's does.
 * FP_EINVAL unless 0 <= rank < world_size. */
fp_status fp_layout_shard_range(const fp_layout *layout, int64_t rank, int64_t *begin, int64_t *end);
