/* core/fp_simd.c -- the level in use and its kernel table. */
#include "core/fp_simd.h"

#include <stdatomic.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/fp_cast.h"

static _Atomic int level_in_use = -1; /* -1: fp_simd_get_level() was not called yet */

static const char *const names[FP_SIMD_COUNT] = {"baseline", "avx2", "avx512", "neon"};

/* The kernels of each level; NULL: the level is for another kind of processor. */
static const fp_cast_table *const kernels[FP_SIMD_COUNT] = {
    [FP_SIMD_BASELINE] = &fp_cast_baseline,
#if defined(__x86_64__)
    [FP_SIMD_AVX2] = &fp_cast_avx2,
    [FP_SIMD_AVX512] = &fp_cast_avx512,
#elif defined(__aarch64__)
    [FP_SIMD_NEON] = &fp_cast_neon,
#endif
};

static int
is_level(fp_simd_level level)
{
    return (unsigned)level < FP_SIMD_COUNT;
}

#if defined(__x86_64__)
/* Not __builtin_cpu_supports("f16c"), which Clang 14 refuses. Support by the operating system is checked with AVX2. */
static int
has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

int
fp_simd_supported(fp_simd_level level)
{
#if defined(__x86_64__) /* the compiler's run-time library asks cpuid, and xgetbv for the operating system */
    if (level == FP_SIMD_AVX2) {
        return __builtin_cpu_supports("avx2") != 0 && has_f16c();
    }
    if (level == FP_SIMD_AVX512) {
        return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0;
    }
#endif
    return is_level(level) && kernels[level] != NULL;
}

fp_simd_level
fp_simd_get_level(void)
{
    int level = atomic_load_explicit(&level_in_use, memory_order_relaxed);
    if (level >= 0) {
        return (fp_simd_level)level;
    }
    int best = FP_SIMD_COUNT - 1;
    while (!fp_simd_supported((fp_simd_level)best)) {
        best--; /* ends: every processor has the baseline */
    }
    /* a level that another thread has chosen meanwhile stays */
    return (fp_simd_level)(atomic_compare_exchange_strong(&level_in_use, &level, best) ? best : level);
}

fp_status
fp_simd_set_level(fp_simd_level level)
{
    if (!fp_simd_supported(level)) {
        return FP_EINVAL;
    }
    atomic_store_explicit(&level_in_use, (int)level, memory_order_relaxed);
    return FP_OK;
}

const char *
fp_simd_name(fp_simd_level level)
{
    return is_level(level) ? names[level] : NULL;
}

const fp_cast_table *
fp_cast_current(void)
{
    return kernels[fp_simd_get_level()];
}
