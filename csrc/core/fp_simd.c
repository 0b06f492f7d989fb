/* core/fp_simd.c -- the level in use and its kernel table. */
#include "core/fp_simd.h"

#include <stdatomic.h>

#include "core/fp_cast.h"

static _Atomic int forced_level = -1; /* -1: none was chosen, use the best */

int
fp_simd_supported(fp_simd_level level)
{
    switch (level) {
        case FP_SIMD_BASELINE:
            return 1;
#if defined(__x86_64__)
        case FP_SIMD_AVX2: /* the compiler's run-time library asks cpuid, and xgetbv for the operating system */
            return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
        case FP_SIMD_AVX512:
            return __builtin_cpu_supports("avx512f") != 0;
        case FP_SIMD_NEON:
            return 0;
#elif defined(__aarch64__)
        case FP_SIMD_NEON:
            return 1;
        case FP_SIMD_AVX2:
        case FP_SIMD_AVX512:
            return 0;
#else
        case FP_SIMD_AVX2:
        case FP_SIMD_AVX512:
        case FP_SIMD_NEON:
            return 0;
#endif
    }
    return 0;
}

fp_simd_level
fp_simd_get_level(void)
{
    const int forced = atomic_load_explicit(&forced_level, memory_order_relaxed);
    if (forced >= 0) {
        return (fp_simd_level)forced;
    }
    for (int level = FP_SIMD_COUNT - 1; level > 0; level--) {
        if (fp_simd_supported((fp_simd_level)level)) {
            return (fp_simd_level)level;
        }
    }
    return FP_SIMD_BASELINE;
}

fp_status
fp_simd_set_level(fp_simd_level level)
{
    if (!fp_simd_supported(level)) {
        return FP_EINVAL;
    }
    atomic_store_explicit(&forced_level, (int)level, memory_order_relaxed);
    return FP_OK;
}

const char *
fp_simd_name(fp_simd_level level)
{
    switch (level) {
        case FP_SIMD_BASELINE:
            return "baseline";
        case FP_SIMD_AVX2:
            return "avx2";
        case FP_SIMD_AVX512:
            return "avx512";
        case FP_SIMD_NEON:
            return "neon";
    }
    return NULL;
}

const fp_cast_table *
fp_cast_current(void)
{
    switch (fp_simd_get_level()) {
#if defined(__x86_64__)
        case FP_SIMD_AVX2:
            return &fp_cast_avx2;
        case FP_SIMD_AVX512:
            return &fp_cast_avx512;
#elif defined(__aarch64__)
        case FP_SIMD_NEON:
            return &fp_cast_neon;
#endif
        default:
            return &fp_cast_baseline;
    }
}
