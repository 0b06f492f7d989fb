/* core/fp_pack.c -- walk the segments of a flat buffer, or the part of them in a range. */
#include "core/fp_pack.h"

#include <string.h>

#include "core/fp_cast.h"

/* The end of a segment of a valid list: it does not overflow. */
static int64_t
end_of(const fp_segment *segment)
{
    return segment->start + segment->numel;
}

/* The first segment that ends after position, or that is not valid: binary search, O(log n). */
static size_t
first_after(const fp_segment *segments, size_t n, int64_t position)
{
    size_t low = 0, high = n;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int64_t start = segments[middle].start, numel = segments[middle].numel;
        if (start < 0 || numel < 0 || start > position || numel > position - start) {
            high = middle;
        }
        else {
            low = middle + 1;
        }
    }
    return low;
}

/* The checks of fp_pack and fp_pack_raw. Finds the segments [*first, *last) that meet [begin, end), and checks them. */
static fp_status
find_segments(const fp_segment *segments, size_t n, const void *flat, int64_t begin, int64_t end, size_t *first,
              size_t *last)
{
    if ((segments == NULL && n > 0) || begin < 0 || begin > end || (flat == NULL && begin < end)) {
        return FP_EINVAL;
    }
    int64_t previous_end = 0;
    size_t i = *first = first_after(segments, n, begin);
    for (; i < n; i++) {
        const fp_segment *segment = &segments[i];
        if (segment->start < previous_end || segment->numel < 0 || segment->start > INT64_MAX - segment->numel) {
            return FP_EINVAL;
        }
        if (segment->start >= end) {
            break;
        }
        previous_end = end_of(segment);
    }
    *last = i;
    return FP_OK;
}

/* Write n copies of the item; all bytes zero when item is NULL. */
static void
fill_items(char *to, size_t n, const void *item, size_t item_bytes)
{
    size_t any_bit = 0;
    for (size_t i = 0; item != NULL && i < item_bytes; i++) {
        any_bit |= ((const unsigned char *)item)[i];
    }
    if (n == 0) {
        return;
    }
    if (any_bit == 0) {
        memset(to, 0, n * item_bytes);
        return;
    }
    memcpy(to, item, item_bytes);
    for (size_t done = 1; done < n;) { /* doubling: each copy repeats all items written before */
        const size_t more = done <= n - done ? done : n - done;
        memcpy(to + done * item_bytes, to, more * item_bytes);
        done += more;
    }
}

/* The way in which a walk moves the elements of one segment: by kernel, or as bytes if kernel is NULL. */
typedef struct {
    fp_cast_kernel kernel;
    double scale;
    size_t segment_bytes; /* of one element */
    size_t flat_bytes;
    const void *fill_item; /* the value of a gap; NULL: zero bytes */
    int leave_gaps;        /* gaps and NULL segments are not written */
} mover;

static void
move(const mover *how, const void *from, void *to, size_t n)
{
    if (how->kernel != NULL) {
        how->kernel(from, to, n, how->scale);
    }
    else if (from != to) {
        memcpy(to, from, n * how->segment_bytes);
    }
}

/* Write [begin, end) of flat from the segments [first, last), which are valid and all meet the range or are empty. */
static void
walk_pack(const mover *how, const fp_segment *segments, size_t first, size_t last, char *flat, int64_t begin,
          int64_t end)
{
    int64_t position = begin;
    for (size_t i = first; i < last; i++) {
        const fp_segment *segment = &segments[i];
        const int64_t from = segment->start > position ? segment->start : position;
        const int64_t to = end_of(segment) < end ? end_of(segment) : end;
        if (from >= to) {
            continue;
        }
        if (!how->leave_gaps) {
            fill_items(flat + (size_t)position * how->flat_bytes, (size_t)(from - position), how->fill_item,
                       how->flat_bytes);
        }
        if (segment->data != NULL) {
            move(how, (const char *)segment->data + (size_t)(from - segment->start) * how->segment_bytes,
                 flat + (size_t)from * how->flat_bytes, (size_t)(to - from));
        }
        else if (!how->leave_gaps) {
            memset(flat + (size_t)from * how->flat_bytes, 0, (size_t)(to - from) * how->flat_bytes);
        }
        position = to;
    }
    if (!how->leave_gaps) {
        fill_items(flat + (size_t)position * how->flat_bytes, (size_t)(end - position), how->fill_item,
                   how->flat_bytes);
    }
}

/* The kernel for a cast with opts; NULL if a copy of bytes is enough. The dtypes are valid. */
static fp_cast_kernel
kernel_for(fp_dtype from, fp_dtype to, const fp_pack_opts *opts)
{
    const int op = (opts->has_scale ? FP_OP_SCALE : 0) | (opts->accumulate ? FP_OP_ADD : 0);
    return from == to && op == 0 ? NULL : (*fp_cast_current())[from][to][op];
}

/* 1 when elements [0, end) of these sizes have byte offsets that fit. */
static int
fits(int64_t end, size_t item_bytes)
{
    return item_bytes > 0 && (uint64_t)end <= (uint64_t)PTRDIFF_MAX / item_bytes;
}

fp_status
fp_pack(const fp_segment *segments, size_t n, fp_dtype segment_dtype, void *flat, fp_dtype flat_dtype, int64_t begin,
        int64_t end, const fp_pack_opts *opts)
{
    const fp_pack_opts plain = {0};
    const size_t segment_bytes = fp_dtype_bytes(segment_dtype), flat_bytes = fp_dtype_bytes(flat_dtype);
    size_t first, last;

    const fp_status status = find_segments(segments, n, flat, begin, end, &first, &last);
    if (status != FP_OK || !fits(end, segment_bytes) || !fits(end, flat_bytes)) {
        return FP_EINVAL;
    }
    if (begin == end) {
        return FP_OK;
    }
    opts = opts == NULL ? &plain : opts;
    const mover how = {
        .kernel = kernel_for(segment_dtype, flat_dtype, opts),
        .scale = opts->scale,
        .segment_bytes = segment_bytes,
        .flat_bytes = flat_bytes,
        .leave_gaps = opts->accumulate,
    };
    walk_pack(&how, segments, first, last, flat, begin, end);
    return FP_OK;
}

fp_status
fp_pack_raw(const fp_segment *segments, size_t n, int64_t item_bytes, void *flat, int64_t begin, int64_t end,
            const void *fill_item)
{
    size_t first, last;
    const fp_status status = find_segments(segments, n, flat, begin, end, &first, &last);
    if (status != FP_OK || item_bytes < 1) {
        return FP_EINVAL;
    }
    if (!fits(end, (size_t)item_bytes)) {
        return FP_EOVERFLOW;
    }
    const mover how = {.segment_bytes = (size_t)item_bytes, .flat_bytes = (size_t)item_bytes, .fill_item = fill_item};
    if (begin < end) {
        walk_pack(&how, segments, first, last, flat, begin, end);
    }
    return FP_OK;
}
