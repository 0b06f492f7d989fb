/* core/fp_layout.c -- offsets, paddings and totals of a flat parameter. */
#include "core/fp_layout.h"

#include <string.h>

#include "core/fp_alloc.h"
#include "core/fp_atomic.h"

/* Elements to add to numel for a multiple of unit (>= 1). */
static int64_t
padding_to(int64_t numel, int64_t unit)
{
    return (unit - numel % unit) % unit;
}

/* Append an item at the layout's end; an empty padding is left out, as torch does. */
static void
add_item(fp_layout *layout, int64_t numel, unsigned char is_pad)
{
    if (numel == 0 && is_pad) {
        return;
    }
    layout->item_numels[layout->num_items] = numel;
    layout->is_pad[layout->num_items] = is_pad;
    layout->num_items++;
    layout->numel += numel;
}

/* Allocate the arrays for n parameters, as one block that layout->starts points to. At most one padding goes before
 * each parameter and one after the last. */
static fp_status
allocate(fp_layout *layout, size_t n)
{
    if (n > (SIZE_MAX / sizeof(int64_t) - 4) / 5) {
        return FP_EOVERFLOW;
    }
    const size_t most_items = 2 * n + 1;
    const size_t words = 2 * n + most_items + most_items / sizeof(int64_t) + 1;
    layout->starts = fp_calloc(words, sizeof(int64_t));
    if (layout->starts == NULL) {
        return FP_ENOMEM;
    }
    layout->numels = layout->starts + n;
    layout->item_numels = layout->numels + n;
    layout->is_pad = (unsigned char *)(layout->item_numels + most_items);
    return FP_OK;
}

/* Check the arguments, and that even with the most padding no size in bytes can overflow. */
static fp_status
check_sizes(const int64_t *numels, const int64_t *blocks, size_t n, int64_t alignment, int64_t world_size,
            int64_t item_bytes)
{
    if (numels == NULL || n < 1 || alignment < (blocks != NULL) || world_size < 1 || item_bytes < 1) {
        return FP_EINVAL;
    }
    int64_t sum = 0, room = INT64_MAX / item_bytes;
    for (size_t i = 0; i < n; i++) {
        if (numels[i] < 0 || (blocks != NULL && blocks[i] < 1)) {
            return FP_EINVAL;
        }
        if (numels[i] > room || alignment > room - numels[i]) {
            return FP_EOVERFLOW;
        }
        room -= numels[i] + alignment;
        sum |= numels[i];
    }
    if (sum == 0) {
        return FP_EINVAL;
    }
    return world_size > room ? FP_EOVERFLOW : FP_OK;
}

/* Append parameter i at the layout's end. */
static void
add_param(fp_layout *made, size_t i, int64_t numel)
{
    made->starts[i] = made->numel;
    made->numels[i] = numel;
    made->numel_params += numel;
    add_item(made, numel, 0);
}

/* Lay out the parameters one after the other, as torch does. It works on a copy of the layout, which stays in registers. */
static void
follow_each_other(fp_layout *layout, const int64_t *numels)
{
    fp_layout made = *layout;
    for (size_t i = 0; i < made.num_params; i++) {
        if (made.alignment > 0) {
            add_item(&made, padding_to(made.numel, made.alignment), 1);
        }
        add_param(&made, i, numels[i]);
    }
    if (made.alignment > 0) {
        add_item(&made, padding_to(made.numel, made.world_size), 1);
    }
    made.shard_numel = 1 + (made.numel - 1) / made.world_size;
    made.padded_numel = made.shard_numel * made.world_size;
    *layout = made;
}

/* Lay out the parameters in shards that cut no block. */
static fp_status
cut_no_block(fp_layout *made, const int64_t *numels, const int64_t *blocks)
{
    const size_t n = made->num_params;
    int64_t *steps = made->item_numels; /* this memory is not in use yet */
    for (size_t i = 0; i < n; i++) {
        steps[i] = fp_atomic_step(numels[i], blocks[i], made->alignment);
    }
    const fp_atomic atomic = {.numels = numels,
                              .steps = steps,
                              .n = n,
                              .alignment = made->alignment,
                              .world_size = made->world_size,
                              .most_padded = INT64_MAX / made->item_bytes};
    const fp_status status = fp_atomic_shard_numel(&atomic, &made->shard_numel);
    if (status != FP_OK) {
        return status;
    }
    fp_atomic_starts(&atomic, made->shard_numel, made->starts);
    for (size_t i = 0; i < n; i++) {
        add_item(made, made->starts[i] - made->numel, 1);
        add_param(made, i, numels[i]);
    }
    made->padded_numel = made->shard_numel * made->world_size;
    add_item(made, made->padded_numel - made->numel, 1);
    return FP_OK;
}

fp_status
fp_layout_init(fp_layout *layout, const int64_t *numels, const int64_t *blocks, size_t n, int64_t alignment,
               int64_t world_size, int64_t item_bytes)
{
    fp_layout made = {.world_size = world_size, .item_bytes = item_bytes, .alignment = alignment, .num_params = n};
    fp_status status = check_sizes(numels, blocks, n, alignment, world_size, item_bytes);
    status = status == FP_OK ? allocate(&made, n) : status;
    if (status == FP_OK && blocks != NULL) {
        status = cut_no_block(&made, numels, blocks);
    }
    else if (status == FP_OK) {
        follow_each_other(&made, numels);
    }
    if (status != FP_OK) {
        fp_layout_clear(&made);
        return status;
    }
    *layout = made;
    return FP_OK;
}

void
fp_layout_clear(fp_layout *layout)
{
    fp_free(layout->starts);
    memset(layout, 0, sizeof *layout);
}

/* The first parameter whose end is past position (by_end), or that starts at or after it. */
static size_t
search(const fp_layout *layout, int64_t position, int by_end)
{
    size_t low = 0, high = layout->num_params;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int64_t start = layout->starts[middle];
        const int is_past = by_end ? start + layout->numels[middle] > position : start >= position;
        if (is_past) {
            high = middle;
        }
        else {
            low = middle + 1;
        }
    }
    return low;
}

void
fp_layout_params_in(const fp_layout *layout, int64_t begin, int64_t end, size_t *first, size_t *last)
{
    const size_t from = search(layout, begin, 1);
    const size_t to = begin < end ? search(layout, end, 0) : from;
    *first = from;
    *last = to > from ? to : from;
}

fp_param_part
fp_layout_part(const fp_layout *layout, size_t i, int64_t begin, int64_t end)
{
    const int64_t start = layout->starts[i], stop = start + layout->numels[i];
    fp_param_part part = {0};
    if (begin >= end || stop <= begin || start >= end) {
        return part;
    }
    part.in_range = 1;
    part.offset = start > begin ? start - begin : 0;
    part.start = start > begin ? 0 : begin - start;
    part.end_element = (stop < end ? stop : end) - 1 - start;
    part.numel = part.end_element - part.start + 1;
    return part;
}

fp_status
fp_layout_shard_range(const fp_layout *layout, int64_t rank, int64_t *begin, int64_t *end)
{
    if (rank < 0 || rank >= layout->world_size) {
        return FP_EINVAL;
    }
    *begin = rank * layout->shard_numel;
    *end = *begin + layout->shard_numel;
    return FP_OK;
}
