/* core/fp_cast_neon.c -- the kernels with NEON, which every aarch64 processor has: 4 floats or 2 doubles at a time. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "core/fp_cast.h"

#define FP_TABLE fp_cast_neon
#define FP_TARGET
#define FP_VECTORS
#define f32_set vdupq_n_f32
#define f64_set vdupq_n_f64

typedef float32x4_t vec_f32;
typedef float64x2_t vec_f64;
enum { VEC_F32 = 4, VEC_F64 = 2 };

/* Loads and stores go by bytes, since elements need not be aligned. */
FP_INLINE uint16x4_t
load_halves(const char *from)
{
    return vreinterpret_u16_u8(vld1_u8((const uint8_t *)from));
}

FP_INLINE float64x2_t
load_doubles(const char *from)
{
    return vreinterpretq_f64_u8(vld1q_u8((const uint8_t *)from));
}

FP_INLINE vec_f32
f32_of_bf16(uint16x4_t bf16)
{
    return vreinterpretq_f32_u32(vshll_n_u16(bf16, 16));
}

FP_INLINE uint16x4_t
bf16_of_f32(vec_f32 value)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
    const uint32x4_t is_number = vceqq_f32(value, value);
    return vshrn_n_u32(vbslq_u32(is_number, rounded, vdupq_n_u32(0x7FC00000)), 16);
}

FP_INLINE vec_f32
f32_load(const char *from, fp_dtype dtype)
{
    switch (dtype) {
        case FP_F64:
            return vcvt_high_f32_f64(vcvt_f32_f64(load_doubles(from)), load_doubles(from + 16));
        case FP_BF16:
            return f32_of_bf16(load_halves(from));
        case FP_F16:
            return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(from)));
        case FP_F32:
            break;
    }
    return vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)from));
}

FP_INLINE void
f32_store(char *to, fp_dtype dtype, vec_f32 value)
{
    if (dtype == FP_BF16) {
        vst1_u8((uint8_t *)to, vreinterpret_u8_u16(bf16_of_f32(value)));
    }
    else if (dtype == FP_F16) {
        vst1_u8((uint8_t *)to, vreinterpret_u8_f16(vcvt_f16_f32(value)));
    }
    else {
        vst1q_u8((uint8_t *)to, vreinterpretq_u8_f32(value));
    }
}

FP_INLINE vec_f32
f32_round(vec_f32 value, fp_dtype dtype)
{
    if (dtype == FP_BF16) {
        return f32_of_bf16(bf16_of_f32(value));
    }
    return dtype == FP_F16 ? vcvt_f32_f16(vcvt_f16_f32(value)) : value;
}

FP_INLINE vec_f64
f64_load(const char *from, fp_dtype dtype)
{
    float32x2_t two_floats;
    uint32_t two_halves;
    switch (dtype) {
        case FP_F32:
            memcpy(&two_floats, from, sizeof two_floats);
            return vcvt_f64_f32(two_floats);
        case FP_BF16:
        case FP_F16: {
            memcpy(&two_halves, from, sizeof two_halves);
            const uint16x4_t halves = vreinterpret_u16_u32(vdup_n_u32(two_halves));
            const vec_f32 wide = dtype == FP_BF16 ? f32_of_bf16(halves) : vcvt_f32_f16(vreinterpret_f16_u16(halves));
            return vcvt_f64_f32(vget_low_f32(wide));
        }
        case FP_F64:
            break;
    }
    return load_doubles(from);
}

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_neon_is_for_aarch64; /* C11 wants a declaration in every file */
#endif
