/* core/fp_cast_avx2.c -- the kernels with AVX2 and F16C: 8 floats or 4 doubles at a time. */
#if defined(__x86_64__)
#include <immintrin.h>

#define FP_TABLE fp_cast_avx2
#define FP_TARGET __attribute__((target("avx2,f16c")))
#define FP_VECTOR_BYTES 32
#define FP_F32_OF_F16(halves) _mm256_cvtph_ps((__m128i)(halves))
#define FP_F16_OF_F32(floats) _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT)
#define FP_WIDE(halves) _mm256_cvtepu16_epi32((__m128i)(halves))
#define FP_NARROW(bits)                                                                                                \
    _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(bits), (__m256i)(bits)), 0x08))
#define FP_IF_NAN(floats, bits, others)                                                                                \
    _mm256_blendv_epi8((__m256i)(others), (__m256i)(bits),                                                             \
                       _mm256_castps_si256(_mm256_cmp_ps(floats, floats, _CMP_UNORD_Q)))
#define FP_F64_OF_F32(few) _mm256_cvtps_pd(few)

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_avx2_is_for_x86_64; /* C11 wants a declaration in every file */
#endif
