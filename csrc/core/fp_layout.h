/* core/fp_layout.h -- the places of the original parameters in a flat parameter. Pure C11: no Python.h, no torch.
 * Sizes are in ELEMENTS unless the name ends in _bytes. Ranges are half-open, except for end_element, as torch has it.
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

/* It owns its arrays: fp_layout_init() allocates them, fp_layout_clear() frees them. No other function writes to it, so
 * several threads may read it in between. _C.Layout embeds one. */
typedef struct {
    int64_t world_size;
    int64_t item_bytes;
    int64_t alignment;     /* parameters start at multiples of it; 0: anywhere */
    int64_t numel;         /* of the unsharded flat parameter: parameters and all padding items */
    int64_t numel_params;  /* of the parameters, without padding */
    int64_t shard_numel;   /* of every rank's shard, with padding */
    int64_t padded_numel;  /* shard_numel * world_size: the numel of an all-gather's output */
    size_t num_params;     /* >= 1 */
    size_t num_items;      /* parameters and paddings */
    int64_t *starts;       /* [num_params] first element of each parameter, ascending */
    int64_t *numels;       /* [num_params] as given */
    int64_t *item_numels;  /* [num_items] torch's _numels_with_padding */
    unsigned char *is_pad; /* [num_items] torch's _is_padding_mask: 1 for a padding */
} fp_layout;

/* The elements of one parameter that lie in a range of the flat parameter, such as a rank's shard: torch's
 * _ShardParamInfo. */
typedef struct {
    int in_range;        /* 0: no element lies in the range, all fields are 0. An empty parameter inside it has 1 */
    int64_t offset;      /* the first of these elements, counted in the range */
    int64_t numel;       /* how many there are */
    int64_t start;       /* the first of them, counted in the parameter */
    int64_t end_element; /* the last of them, counted in the parameter: INCLUSIVE, as torch has it */
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
 * taking each padding as large as the alignment and the world size allow; FP_ENOMEM. One allocation. O(n); with blocks
 * O(n) for each length that is tried (fp_atomic_shard_numel). */
fp_status fp_layout_init(fp_layout *layout, const int64_t *numels, const int64_t *blocks, size_t n, int64_t alignment,
                         int64_t world_size, int64_t item_bytes);

/* Free the arrays and zero the layout. A zeroed layout is allowed, so a second call is, too. */
void fp_layout_clear(fp_layout *layout);

/* Find the parameters [*first, *last) that have elements in [begin, end), 0 <= begin <= end; none for an empty range. As in
 * torch, a parameter without elements counts if it lies inside the range. Binary search: O(log n). */
void fp_layout_params_in(const fp_layout *layout, int64_t begin, int64_t end, size_t *first, size_t *last);

/* The elements of parameter i < num_params that lie in [begin, end), 0 <= begin <= end. O(1). */
fp_param_part fp_layout_part(const fp_layout *layout, size_t i, int64_t begin, int64_t end);

/* Write the range [*begin, *end) of a rank's padded shard; as in torch, it may reach past numel. FP_EINVAL, and nothing
 * written, unless 0 <= rank < world_size. */
fp_status fp_layout_shard_range(const fp_layout *layout, int64_t rank, int64_t *begin, int64_t *end);
