/* core/fp_cast_avx512.c -- the kernels with AVX-512F: 16 floats or 8 doubles at a time. */
#if defined(__x86_64__)
#include <immintrin.h>

#define FP_TABLE fp_cast_avx512
#define FP_TARGET __attribute__((target("avx512f")))
#define FP_VECTOR_BYTES 64
#define FP_F32_OF_F16(halves) _mm512_cvtph_ps((__m256i)(halves))
#define FP_F16_OF_F32(floats) _mm512_maskz_cvtps_ph(0xFFFF, floats, _MM_FROUND_TO_NEAREST_INT)
#define FP_WIDE(halves) _mm512_cvtepu16_epi32((__m256i)(halves))
#define FP_NARROW(bits) _mm512_cvtepi32_epi16((__m512i)(bits))
#define FP_IF_NAN(floats, bits, others)                                                                                \
    _mm512_mask_mov_epi32((__m512i)(others), _mm512_cmp_ps_mask(floats, floats, _CMP_UNORD_Q), (__m512i)(bits))
#define FP_F64_OF_F32(few) _mm512_cvtps_pd(few)

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_avx512_is_for_x86_64; /* C11 wants a declaration in every file */
#endif
