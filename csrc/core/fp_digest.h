/* core/fp_digest.h -- a digest of memory, by which ranks compare their values. It is not cryptographic. Pure C11: no Python.h,
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
 * the last line. So the digest always sees a difference of FP_DIGEST_STEP + FP_DIGEST_LINE bytes in a row, and a shorter one
 * by chance. It costs a percent of a copy. data may be NULL if bytes is 0; it need not be aligned. */
uint64_t fp_digest(const void *data, size_t bytes);
