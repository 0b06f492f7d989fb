/* core/fp_simd.c -- the level in use and its kernel table. */
#include "core/fp_simd.h"

#include <stdatomic.h>

#include "core/fp_cast.h"

static _Atomic int forced_level = -1; /* -1: none was chosen, use the best */

static const char *const names[FP_SIMD_COUNT] = {"baseline", "avx2", "avx512", "neon"};

/* The kernels of each level; NULL: it is not for this kind of processor. */
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

int
fp_simd_supported(fp_simd_level level)
{
#if defined(__x86_64__) /* the compiler's run-time library asks cpuid, and xgetbv for the operating system */
    if (level == FP_SIMD_AVX2) {
        return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
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
    return is_level(level) ? names[level] : NULL;
}

const fp_cast_table *
fp_cast_current(void)
{
    return kernels[fp_simd_get_level()];
}
