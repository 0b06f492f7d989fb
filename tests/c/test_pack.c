/* test_pack.c -- all levels give the same bits as the one-element definition in fp_float.h, at every length and offset,
 * write nothing outside the range, and touch no memory outside the segments (the sanitizers look). That the definition
 * is torch's: tests/core/test_core_pack.py. Needs no other library, so that it also runs under an emulator of another
 * processor. */
#include "core/fp_pack.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "core/fp_cast.h"
#include "core/fp_float.h"
#include "core/fp_simd.h"

enum { N = 150 };

/* Any bits: numbers of all sizes, infinities, NaN. */
static void
fill_randomly(unsigned char *to, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        to[i] = (unsigned char)next_random();
    }
}

/* 1 if two elements are the same bits, or both NaN. */
static int
same(const void *a, const void *b, size_t i, fp_dtype dtype)
{
    const size_t bytes = fp_dtype_bytes(dtype);
    const double x = fp_load_f64(a, i, dtype), y = fp_load_f64(b, i, dtype);
    return (isnan(x) && isnan(y)) || memcmp((const char *)a + i * bytes, (const char *)b + i * bytes, bytes) == 0;
}

/* What one element has to be: the arithmetic that fp_pack_opts tells. */
static void
compute(const void *from, fp_dtype from_dtype, void *to, fp_dtype to_dtype, size_t i, const fp_pack_opts *opts)
{
    if (to_dtype == FP_F64) {
        const double cast = fp_load_f64(from, i, from_dtype);
        const volatile double scaled = opts->has_scale ? cast * opts->scale : cast; /* volatile: rounded, not fused */
        fp_store_f64(to, i, to_dtype, opts->accumulate ? fp_load_f64(to, i, to_dtype) + scaled : scaled);
        return;
    }
    const float cast = fp_round_f32(fp_load_f32(from, i, from_dtype), to_dtype);
    const volatile float scaled = opts->has_scale ? cast * (float)opts->scale : cast;
    const float rounded = fp_round_f32(scaled, to_dtype);
    fp_store_f32(to, i, to_dtype, opts->accumulate ? fp_load_f32(to, i, to_dtype) + rounded : rounded);
}

static void
test_pair(fp_dtype from, fp_dtype to, const fp_pack_opts *opts)
{
    const size_t from_bytes = fp_dtype_bytes(from), to_bytes = fp_dtype_bytes(to);
    const size_t n = (size_t)random_below(N), shift = (size_t)random_below(4);
    unsigned char *source = malloc(n * from_bytes + shift + 1); /* exactly as long as needed: ASan guards the ends */
    unsigned char *flat = malloc(n * to_bytes + shift + 1), *expected = malloc(n * to_bytes + shift + 1);
    if (source == NULL || flat == NULL || expected == NULL) {
        abort();
    }
    fill_randomly(source, n * from_bytes + shift + 1);
    fill_randomly(flat, n * to_bytes + shift + 1);
    memcpy(expected, flat, n * to_bytes + shift + 1);
    const size_t begin = (size_t)random_below((int64_t)n + 1),
                 end = begin + (size_t)random_below((int64_t)(n - begin) + 1);
    const int64_t cut = random_below((int64_t)n + 1);
    unsigned char *base = source + 1 + shift; /* odd addresses, too */
    const fp_segment segments[2] = {
        {.data = base, .start = 0, .numel = cut},
        {.data = base + (size_t)cut * from_bytes, .start = cut, .numel = (int64_t)n - cut},
    };
    for (size_t i = begin; i < end; i++) {
        compute(base, from, expected + 1 + shift, to, i, opts);
    }
    CHECK_EQ(fp_pack(segments, 2, from, flat + 1 + shift, to, (int64_t)begin, (int64_t)end, opts), FP_OK);
    for (size_t i = 0; i < n; i++) {
        const int is_same = i >= begin && i < end ? same(flat + 1 + shift, expected + 1 + shift, i, to)
                                                  : memcmp(flat + 1 + shift + i * to_bytes,
                                                           expected + 1 + shift + i * to_bytes, to_bytes) == 0;
        if (!is_same) {
            printf("level %s, %d -> %d, scale %d, accumulate %d, element %zu of %zu\n",
                   fp_simd_name(fp_simd_get_level()), (int)from, (int)to, opts->has_scale, opts->accumulate, i, n);
        }
        CHECK(is_same);
    }
    free(source);
    free(flat);
    free(expected);
}

/* Every 16-bit value, both ways through fp32. */
static void
test_all_halves(void)
{
    static uint16_t halves[65536], back[65536];
    static float wide[65536];
    const fp_segment segment = {.data = halves, .start = 0, .numel = 65536};
    const fp_segment widened = {.data = wide, .start = 0, .numel = 65536};
    for (uint32_t i = 0; i < 65536; i++) {
        halves[i] = (uint16_t)i;
    }
    for (fp_dtype dtype = FP_BF16; dtype <= FP_F16; dtype++) {
        CHECK_EQ(fp_pack(&segment, 1, dtype, wide, FP_F32, 0, 65536, NULL), FP_OK);
        CHECK_EQ(fp_pack(&widened, 1, FP_F32, back, dtype, 0, 65536, NULL), FP_OK);
        for (size_t i = 0; i < 65536; i++) {
            CHECK(same(halves, back, i, dtype)); /* a 16-bit value survives */
        }
    }
}

static void
test_refusals(void)
{
    float data[4] = {1, 2, 3, 4}, flat[8] = {9, 9, 9, 9, 9, 9, 9, 9};
    const fp_segment good[1] = {{.data = data, .start = 2, .numel = 4}};
    const fp_segment bad[][2] = {
        {{data, 4, 2}, {data, 0, 2}},         {{data, 0, 4}, {data, 3, 2}},
        {{data, -1, 4}, {data, 4, 2}},        {{data, 0, -1}, {data, 4, 2}},
        {{data, 1, INT64_MAX}, {data, 4, 2}}, {{data, INT64_MIN, INT64_MAX}, {data, INT64_MIN, INT64_MIN}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_EQ(fp_pack(bad[i], 2, FP_F32, flat, FP_F32, 0, 8, NULL), FP_EINVAL);
        CHECK_EQ(fp_pack_raw(bad[i], 2, 4, flat, 0, 8, NULL), FP_EINVAL);
    }
    CHECK_EQ(fp_pack(NULL, 1, FP_F32, flat, FP_F32, 0, 8, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack(good, 1, FP_F32, NULL, FP_F32, 0, 8, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack(good, 1, FP_F32, NULL, FP_F32, 3, 3, NULL), FP_OK);
    CHECK_EQ(fp_pack(good, 1, (fp_dtype)9, flat, FP_F32, 0, 8, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack(good, 1, FP_F32, flat, (fp_dtype)9, 0, 8, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack(good, 1, FP_F32, flat, FP_F32, -1, 8, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack(good, 1, FP_F32, flat, FP_F32, 8, 7, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack(good, 1, FP_F32, flat, FP_F32, 0, INT64_MAX, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack_raw(good, 1, 0, flat, 0, 8, NULL), FP_EINVAL);
    CHECK_EQ(fp_pack_raw(good, 1, INT64_MAX, flat, 0, 8, NULL), FP_EOVERFLOW);
    for (int i = 0; i < 8; i++) {
        CHECK(flat[i] == 9);
    }
    CHECK_EQ(fp_simd_set_level((fp_simd_level)77), FP_EINVAL);
    CHECK(fp_simd_name((fp_simd_level)77) == NULL);
    CHECK_EQ(fp_simd_supported((fp_simd_level)77), 0);
}

int
main(void)
{
    int levels = 0;
    for (int level = 0; level < FP_SIMD_COUNT; level++) {
        if (!fp_simd_supported((fp_simd_level)level)) {
            CHECK_EQ(fp_simd_set_level((fp_simd_level)level), FP_EINVAL);
            continue;
        }
        levels++;
        CHECK_EQ(fp_simd_set_level((fp_simd_level)level), FP_OK);
        CHECK_EQ(fp_simd_get_level(), level);
        test_all_halves();
        for (int i = 0; i < 16 * 4 * 40; i++) {
            const fp_pack_opts opts = {.has_scale = i & 1, .accumulate = i >> 1 & 1, .scale = 0.7};
            test_pair((fp_dtype)(i >> 2 & 3), (fp_dtype)(i >> 4 & 3), &opts);
        }
    }
    CHECK(levels >= 1);
    test_refusals();
    return check_result();
}
