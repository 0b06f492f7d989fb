/* core/fp_cast_avx512.c -- the kernels with AVX-512F: 16 floats or 8 doubles at a time. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "core/fp_cast.h"

#define FP_TABLE fp_cast_avx512
#define FP_TARGET __attribute__((target("avx512f")))
#define FP_VECTORS
#define f32_set _mm512_set1_ps
#define f64_set _mm512_set1_pd

typedef __m512 vec_f32;
typedef __m512d vec_f64;
enum { VEC_F32 = 16, VEC_F64 = 8 };

FP_INLINE vec_f32
f32_of_bf16(__m256i bf16)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

/* Sixteen floats rounded to bf16, each in the low half of its lane. */
FP_INLINE __m512i
bf16_of_f32(vec_f32 value)
{
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7FC0));
}

FP_INLINE vec_f32
f32_load(const char *from, fp_dtype dtype)
{
    switch (dtype) {
        case FP_F64: {
            const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(from));
            const __m256 high = _mm512_cvtpd_ps(_mm512_loadu_pd(from + 64));
            const __m512d both = _mm512_castpd256_pd512(_mm256_castps_pd(low));
            return _mm512_castpd_ps(_mm512_insertf64x4(both, _mm256_castps_pd(high), 1));
        }
        case FP_BF16:
            return f32_of_bf16(_mm256_loadu_si256((const __m256i *)(const void *)from));
        case FP_F16:
            return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
        case FP_F32:
            break;
    }
    return _mm512_loadu_ps(from);
}

FP_INLINE void
f32_store(char *to, fp_dtype dtype, vec_f32 value)
{
    if (dtype == FP_BF16) {
        _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16(bf16_of_f32(value)));
    }
    else if (dtype == FP_F16) {
        _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    else {
        _mm512_storeu_ps(to, value);
    }
}

FP_INLINE vec_f32
f32_round(vec_f32 value, fp_dtype dtype)
{
    if (dtype == FP_BF16) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_of_f32(value), 16));
    }
    return dtype == FP_F16 ? _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)) : value;
}

FP_INLINE vec_f64
f64_load(const char *from, fp_dtype dtype)
{
    switch (dtype) {
        case FP_F32:
            return _mm512_cvtps_pd(_mm256_loadu_ps((const float *)(const void *)from));
        case FP_BF16: {
            const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
            return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
        }
        case FP_F16: /* of 16 halves the lower 8; the upper ones are zero */
            return _mm512_cvtps_pd(_mm512_castps512_ps256(
                _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from)))));
        case FP_F64:
            break;
    }
    return _mm512_loadu_pd(from);
}

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_avx512_is_for_x86_64; /* C11 wants a declaration in every file */
#endif
