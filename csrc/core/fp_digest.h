/* core/fp_digest.h -- whether ranks have the same values: a digest of memory, not for adversaries. Pure C11: no Python.h,
 * no torch. Allocates nothing, safe without the GIL. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
    FP_DIGEST_LINE = 64,     /* bytes that are read together */
    FP_DIGEST_STEP = 8192,   /* bytes from one line that is read to the next, in large runs */
    FP_DIGEST_WHOLE = 16384, /* runs of at most so many bytes are read whole */
};

/* A digest of a run of memory: of all of it, or, in a large one, of the first line of each FP_DIGEST_STEP bytes and of
 * the last line. So a difference of FP_DIGEST_STEP + FP_DIGEST_LINE bytes in a row is always seen, and one of a page or
 * less perhaps, for a percent of what copying takes. data may be NULL if bytes is 0; it need not be aligned. */
uint64_t fp_digest(const void *data, size_t bytes);
