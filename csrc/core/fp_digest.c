/* core/fp_digest.c -- a digest of memory. */
#include "core/fp_digest.h"

#include <string.h>

enum {
    LANES = FP_DIGEST_LINE / sizeof(uint64_t),
    AHEAD = 16, /* lines that are prefetched: the processor does not foresee such long steps */
};

static const uint64_t MIX = 0x9e3779b97f4a7c15u; /* odd: a multiplication by it loses no bit */

static uint64_t
mixed(uint64_t lane, uint64_t word)
{
    lane = (lane ^ word) * MIX;
    return lane ^ (lane >> 32); /* low bits of a product do not depend on high ones: mix high bits into them */
}

static void
take(uint64_t lanes[LANES], const unsigned char *line)
{
    uint64_t words[LANES];
    memcpy(words, line, sizeof words);
    for (int i = 0; i < LANES; i++) {
        lanes[i] = mixed(lanes[i], words[i]);
    }
}

uint64_t
fp_digest(const void *data, size_t bytes)
{
    const unsigned char *at = data;
    const size_t step = bytes <= FP_DIGEST_WHOLE ? FP_DIGEST_LINE : FP_DIGEST_STEP;
    uint64_t lanes[LANES], digest = bytes;
    for (int i = 0; i < LANES; i++) {
        lanes[i] = (uint64_t)i + 1;
    }
    if (bytes >= FP_DIGEST_LINE) {
        for (size_t done = 0; done <= bytes - FP_DIGEST_LINE; done += step) {
            if (step > FP_DIGEST_LINE && bytes - done > AHEAD * step) {
                __builtin_prefetch(at + done + AHEAD * step);
            }
            take(lanes, at + done);
        }
        take(lanes, at + bytes - FP_DIGEST_LINE);
    }
    else if (bytes > 0) {
        unsigned char line[FP_DIGEST_LINE] = {0};
        memcpy(line, at, bytes);
        take(lanes, line);
    }
    for (int i = 0; i < LANES; i++) {
        digest = mixed(digest, lanes[i]);
    }
    return digest;
}
