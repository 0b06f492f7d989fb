/* core/fp_simd.h -- the instruction set that the packing loops use: found at run time; tests choose another.
 * Pure C11: no Python.h, no torch. Safe in several threads and without the GIL. */
#pragma once

#include "core/fp_status.h"

typedef enum {
    FP_SIMD_BASELINE = 0, /* the instructions that every processor of the architecture has */
    FP_SIMD_AVX2,         /* AVX2 and F16C */
    FP_SIMD_AVX512,       /* AVX-512F and BW */
    FP_SIMD_NEON,         /* aarch64 */
} fp_simd_level;

enum { FP_SIMD_COUNT = 4 };

/* 1 if the level was compiled in, and this processor and operating system can run it; else 0. */
int fp_simd_supported(fp_simd_level level);

/* The level in use: the best supported one, until fp_simd_set_level() chose another. */
fp_simd_level fp_simd_get_level(void);

/* Use a level from the next call of fp_pack on, in every thread (results are the same on all levels).
 * FP_EINVAL when the level is not supported here; the level in use then stays. */
fp_status fp_simd_set_level(fp_simd_level level);

/* "baseline", "avx2", "avx512" or "neon"; NULL for a value that is no level. Static storage. */
const char *fp_simd_name(fp_simd_level level);
