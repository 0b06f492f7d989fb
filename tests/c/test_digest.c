/* test_digest.c -- digests differ where memory differs, read nothing beyond it, and see every long difference. */
#include "core/fp_digest.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

/* Runs that are read whole: every bit counts, and where it is. */
static void
test_small(size_t bytes)
{
    unsigned char *run = calloc(1, bytes), *other = malloc(bytes); /* exact: the sanitizer sees a byte too many */
    const uint64_t zeros = fp_digest(run, bytes);
    uint64_t before = zeros;
    for (size_t i = 0; i < bytes; i += bytes > 200 ? 97 : 1) {
        run[i] ^= 0x80;
        CHECK(fp_digest(run, bytes) != zeros);
        CHECK(fp_digest(run, bytes) != before);
        before = fp_digest(run, bytes);
        memcpy(other, run, bytes);
        CHECK_EQ(fp_digest(other, bytes), before);
        run[i] ^= 0x80;
    }
    CHECK_EQ(fp_digest(run, bytes), zeros);
    free(run);
    free(other);
}

/* Two signs flipped, as far apart as may be: they do not cancel each other. */
static void
test_signs(size_t bytes)
{
    unsigned char *run = calloc(1, bytes);
    const uint64_t zeros = fp_digest(run, bytes);
    for (size_t i = 7; i + FP_DIGEST_LINE < bytes; i += FP_DIGEST_LINE) {
        run[i] ^= 0x80;
        run[i + FP_DIGEST_LINE] ^= 0x80;
        CHECK(fp_digest(run, bytes) != zeros);
        run[i] ^= 0x80;
        run[i + FP_DIGEST_LINE] ^= 0x80;
    }
    free(run);
}

/* Larger ones: a difference of a step and a line is seen wherever it begins. */
static void
test_large(size_t bytes)
{
    const size_t length = FP_DIGEST_STEP + FP_DIGEST_LINE;
    unsigned char *run = calloc(1, bytes);
    const uint64_t zeros = fp_digest(run, bytes);
    for (size_t i = 0; i + length <= bytes; i += 89) {
        memset(run + i, 1, length);
        CHECK(fp_digest(run, bytes) != zeros);
        memset(run + i, 0, length);
    }
    run[bytes - 1] = 1;
    CHECK(fp_digest(run, bytes) != zeros);
    free(run);
}

int
main(void)
{
    for (size_t bytes = 1; bytes < 200; bytes++) {
        test_small(bytes);
    }
    test_small(FP_DIGEST_WHOLE);
    test_signs(4096);
    test_large(FP_DIGEST_WHOLE + 1000);
    test_large(100000);
    CHECK(fp_digest(NULL, 0) != fp_digest("", 1));
    return check_result();
}
