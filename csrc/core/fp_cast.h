/* core/fp_cast.h -- the inner loops of packing: cast, scale and add for each pair of dtypes, one table a SIMD level.
 * Pure C11: no Python.h, no torch. Internal to the core: fp_pack.c is the only user. */
#pragma once

#include <stddef.h>

#include "core/fp_dtype.h"

/* Bits: the operations of a kernel after the cast. */
enum { FP_OP_SCALE = 1, FP_OP_ADD = 2, FP_OP_COUNT = 4 };

/* destination[i] = or += cast(source[i]) [* scale] for n contiguous elements; the arithmetic is in fp_pack_opts.
 * source and destination do not overlap, unless they are the same array of the same dtype. No alignment is needed. */
typedef void (*fp_cast_kernel)(const void *source, void *destination, size_t n, double scale);

/* [source dtype][destination dtype][FP_OP_* bits]; no entry is NULL. */
typedef fp_cast_kernel fp_cast_table[FP_DTYPE_COUNT][FP_DTYPE_COUNT][FP_OP_COUNT];

/* For the functions inside the kernels of a level. The file of the level defines FP_TARGET: the instructions of the level. */
#define FP_INLINE FP_TARGET static inline __attribute__((always_inline))

extern const fp_cast_table fp_cast_baseline;
#if defined(__x86_64__)
extern const fp_cast_table fp_cast_avx2;   /* needs AVX2 and F16C */
extern const fp_cast_table fp_cast_avx512; /* needs AVX-512F and BW */
#elif defined(__aarch64__)
extern const fp_cast_table fp_cast_neon;
#endif

/* The table of the SIMD level in use (fp_simd.h). */
const fp_cast_table *fp_cast_current(void);
