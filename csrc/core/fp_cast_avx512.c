/* core/fp_cast_avx512.c -- the kernels with AVX-512F and BW. */
#if defined(__x86_64__)
#include <immintrin.h>

#define FP_TABLE fp_cast_avx512
#if defined(__clang__)
#define FP_TARGET __attribute__((target("avx512f,avx512bw")))
#else /* or else its vectors have half the length */
#define FP_TARGET __attribute__((target("avx512f,avx512bw,prefer-vector-width=512")))
#endif
#define FP_LANES 16
#define FP_F32_OF_F16(halves) _mm512_cvtph_ps((__m256i)(halves))
#define FP_F16_OF_F32(floats) _mm512_maskz_cvtps_ph(0xFFFF, floats, _MM_FROUND_TO_NEAREST_INT)

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_avx512_is_for_x86_64; /* C11 wants a declaration in every file */
#endif
