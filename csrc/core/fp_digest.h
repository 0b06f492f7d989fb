/* core/fp_digest.h -- a digest of memory. Ranks exchange digests to compare the values of parameters and buffers. It is not
 * cryptographic, and depends on the byte order of the machine. Pure C11: no Python.h, no torch. Nothing is allocated; safe
 * without the GIL. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
    FP_DIGEST_LINE = 64,     /* bytes that are read together */
    FP_DIGEST_STEP = 8192,   /* bytes from one line that is read to the next, in large runs */
    FP_DIGEST_WHOLE = 16384, /* runs of at most so many bytes are read whole */
};

/* The digest of `bytes` bytes from data on. A run of more than FP_DIGEST_WHOLE bytes is not read whole, but the first line of
 * each FP_DIGEST_STEP bytes and the last line. So the digest reads a part of every difference of FP_DIGEST_STEP +
 * FP_DIGEST_LINE bytes in a row, and may miss a shorter one. It costs a percent of a copy. data may be NULL if bytes is 0;
 * it need not be aligned. */
uint64_t fp_digest(const void *data, size_t bytes);
