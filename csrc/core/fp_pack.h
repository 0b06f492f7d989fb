/* core/fp_pack.h -- N segments into one flat buffer, with cast, scale and accumulation in one pass over memory.
 * Pure C11: no Python.h, no torch. No threads, no allocation, no locks: safe without the GIL, and several threads may
 * work on disjoint element ranges of one flat buffer at the same time.
 * Positions and sizes are in ELEMENTS unless the name ends in _bytes. Ranges are half-open: [begin, end).
 *
 * A list of segments is valid when every start and numel is >= 0, start + numel fits int64_t, and each segment starts
 * at or after the end of the one before it. Elements of the flat buffer that no segment covers are gaps. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/fp_dtype.h"
#include "core/fp_status.h"

/* One piece of a flat buffer that has memory of its own. The core borrows data for the call. */
typedef struct {
    const void *data; /* numel contiguous elements, no alignment needed. NULL: zeros; when accumulating, nothing */
    int64_t start;    /* first element of the piece, counted in the flat buffer */
    int64_t numel;    /* elements of the piece; 0 is allowed */
} fp_segment;

/* How fp_pack computes; {0} is a plain cast with zeros in the gaps.
 * With T the destination's type, t = T(source); if has_scale, t = T(t * scale); the result is T(destination + t) when
 * accumulating, else t. Each step rounds to nearest even into T, like torch's to(), mul_() and add_(): bf16 and fp16
 * are multiplied and added in fp32, with scale rounded to fp32; fp64 casts to bf16 and fp16 by way of fp32. A NaN stays
 * a NaN (which one is not defined). */
typedef struct {
    double scale;
    int has_scale;  /* 0: scale is not looked at */
    int accumulate; /* add to the destination instead of overwriting it; gaps are left alone */
} fp_pack_opts;

/* Compute elements [begin, end) of a flat buffer from segments.
 *   segments, n  valid, sorted by start; may reach beyond [begin, end), those parts are not touched
 *   flat         base of the whole flat buffer (element 0), of which only [begin, end) is written
 *   opts         NULL: plain cast, zeros in the gaps
 * A segment whose data IS its own place in flat, with the same type, is allowed; any other overlap is not.
 * Returns FP_OK, or FP_EINVAL (a NULL where data is needed, not a type, begin < 0, begin > end, end too large for byte
 * offsets, segments that meet [begin, end) invalid) with nothing written. O(log n + segments in the range + elements). */
fp_status fp_pack(const fp_segment *segments, size_t n, fp_dtype segment_dtype, void *flat, fp_dtype flat_dtype,
                  int64_t begin, int64_t end, const fp_pack_opts *opts);

/* fp_pack for elements of any type, copied as item_bytes raw bytes each.
 *   item_bytes  >= 1; end * item_bytes must fit ptrdiff_t, else FP_EOVERFLOW
 *   fill_item   item_bytes bytes that are written into every gap element; NULL: zero bytes
 * NULL segments become zero bytes. Returns FP_OK, FP_EINVAL or FP_EOVERFLOW with nothing written. */
fp_status fp_pack_raw(const fp_segment *segments, size_t n, int64_t item_bytes, void *flat, int64_t begin, int64_t end,
                      const void *fill_item);
