/* core/fp_cast_avx2.c -- the kernels with AVX2 and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>

#define FP_TABLE fp_cast_avx2
#define FP_TARGET __attribute__((target("avx2,f16c")))
#define FP_LANES 8
#define FP_F32_OF_F16(halves) _mm256_cvtph_ps((__m128i)(halves))
#define FP_F16_OF_F32(floats) _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT)

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_avx2_is_for_x86_64; /* C11 wants a declaration in every file */
#endif
