/* core/fp_cast_avx2.c -- the kernels with AVX2 and F16C: 8 floats or 4 doubles at a time. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "core/fp_cast.h"

#define FP_TABLE fp_cast_avx2
#define FP_TARGET __attribute__((target("avx2,f16c")))
#define FP_VECTORS
#define f32_set _mm256_set1_ps
#define f64_set _mm256_set1_pd

typedef __m256 vec_f32;
typedef __m256d vec_f64;
enum { VEC_F32 = 8, VEC_F64 = 4 };

FP_INLINE vec_f32
f32_of_bf16(__m128i bf16)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
}

/* Eight floats rounded to bf16, each in the low half of its lane. */
FP_INLINE __m256i
bf16_of_f32(vec_f32 value)
{
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7FC0), is_nan);
}

FP_INLINE vec_f32
f32_load(const char *from, fp_dtype dtype)
{
    switch (dtype) {
        case FP_F64:
            return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd((const double *)(const void *)(from + 32))),
                                   _mm256_cvtpd_ps(_mm256_loadu_pd((const double *)(const void *)from)));
        case FP_BF16:
            return f32_of_bf16(_mm_loadu_si128((const __m128i *)(const void *)from));
        case FP_F16:
            return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
        case FP_F32:
            break;
    }
    return _mm256_loadu_ps((const float *)(const void *)from);
}

FP_INLINE void
f32_store(char *to, fp_dtype dtype, vec_f32 value)
{
    if (dtype == FP_BF16) {
        const __m256i halves = bf16_of_f32(value);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
        _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(packed));
    }
    else if (dtype == FP_F16) {
        _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    else {
        _mm256_storeu_ps((float *)(void *)to, value);
    }
}

FP_INLINE vec_f32
f32_round(vec_f32 value, fp_dtype dtype)
{
    if (dtype == FP_BF16) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_of_f32(value), 16));
    }
    return dtype == FP_F16 ? _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)) : value;
}

FP_INLINE vec_f64
f64_load(const char *from, fp_dtype dtype)
{
    switch (dtype) {
        case FP_F32:
            return _mm256_cvtps_pd(_mm_loadu_ps((const float *)(const void *)from));
        case FP_BF16: {
            const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
            return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(wide, 16)));
        }
        case FP_F16:
            return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(const void *)from)));
        case FP_F64:
            break;
    }
    return _mm256_loadu_pd((const double *)(const void *)from);
}

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_avx2_is_for_x86_64; /* C11 wants a declaration in every file */
#endif
