/* core/fp_float.h -- load, round and store one element of each dtype. Pure C11: no Python.h, no torch. These functions define
 * all conversions of the core and of csrc/cuda. The vector kernels of the core give the same bits, except that a NaN may
 * become another NaN. All rounding is to nearest even. Memory is read and written by memcpy, so no address needs to be
 * aligned. On CUDA each conversion is one instruction with the same results (PTX ISA, cvt). Nothing can fail. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/fp_dtype.h"

FP_HD static inline uint32_t
fp_bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

FP_HD static inline float
fp_f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

FP_HD static inline float
fp_f32_of_bf16(uint16_t bf16)
{
    return fp_f32_of_bits((uint32_t)bf16 << 16);
}

FP_HD static inline uint16_t
fp_bf16_of_f32(float value)
{
#if defined(__CUDA_ARCH__)
    uint16_t bf16;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bf16) : "f"(value));
    return bf16;
#else
    const uint32_t bits = fp_bits_of_f32(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0x7FC0; /* the addition below could carry a NaN into infinity */
    }
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
#endif
}

FP_HD static inline float
fp_f32_of_f16(uint16_t f16)
{
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(f16));
    return value;
#else
    const uint32_t sign = ((uint32_t)f16 & 0x8000u) << 16;
    const uint32_t magnitude = ((uint32_t)f16 & 0x7FFFu) << 13; /* exponent and mantissa in binary32's places */
    if (magnitude >= 0x0F800000u) {                             /* infinity or NaN: the largest exponent there too */
        return fp_f32_of_bits(sign | (magnitude + 0x70000000u));
    }
    if (magnitude < 0x00800000u) { /* zero or subnormal: 2^-14 * 1.m minus 2^-14 is 2^-14 * 0.m, exactly */
        const float scaled = fp_f32_of_bits(magnitude + 0x38800000u) - fp_f32_of_bits(0x38800000u);
        return fp_f32_of_bits(sign | fp_bits_of_f32(scaled));
    }
    return fp_f32_of_bits(sign | (magnitude + 0x38000000u)); /* the exponent's bias grows from 15 to 127 */
#endif
}

FP_HD static inline uint16_t
fp_f16_of_f32(float value)
{
#if defined(__CUDA_ARCH__)
    uint16_t f16;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(f16) : "f"(value));
    return f16;
#else
    const uint32_t bits = fp_bits_of_f32(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= 0x47800000u) { /* 65536 and above, infinity, NaN; 65520 to 65536 round up to infinity below */
        return (uint16_t)(sign | (magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u));
    }
    if (magnitude < 0x38800000u) { /* below 2^-14: adding 0.5 leaves units of 2^-24, binary16's smallest, rounded */
        return (uint16_t)(sign | (fp_bits_of_f32(fp_f32_of_bits(magnitude) + 0.5f) - 0x3F000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}

/* Element i of an array as float (fp64 is rounded) or as double (exact). */
FP_HD static inline float
fp_load_f32(const void *array, size_t i, fp_dtype dtype)
{
    double f64;
    float f32;
    uint16_t half;
    switch (dtype) {
        case FP_F64:
            memcpy(&f64, (const char *)array + i * sizeof f64, sizeof f64);
            return (float)f64;
        case FP_F32:
            memcpy(&f32, (const char *)array + i * sizeof f32, sizeof f32);
            return f32;
        case FP_BF16:
        case FP_F16:
            break;
    }
    memcpy(&half, (const char *)array + i * sizeof half, sizeof half);
    return dtype == FP_BF16 ? fp_f32_of_bf16(half) : fp_f32_of_f16(half);
}

FP_HD static inline double
fp_load_f64(const void *array, size_t i, fp_dtype dtype)
{
    double f64;
    if (dtype == FP_F64) {
        memcpy(&f64, (const char *)array + i * sizeof f64, sizeof f64);
        return f64;
    }
    return (double)fp_load_f32(array, i, dtype);
}

/* Round value to dtype and write it to element i. */
FP_HD static inline void
fp_store_f32(void *array, size_t i, fp_dtype dtype, float value)
{
    const double f64 = (double)value;
    uint16_t half;
    switch (dtype) {
        case FP_F64:
            memcpy((char *)array + i * sizeof f64, &f64, sizeof f64);
            return;
        case FP_F32:
            memcpy((char *)array + i * sizeof value, &value, sizeof value);
            return;
        case FP_BF16:
        case FP_F16:
            half = dtype == FP_BF16 ? fp_bf16_of_f32(value) : fp_f16_of_f32(value);
            memcpy((char *)array + i * sizeof half, &half, sizeof half);
            return;
    }
}

FP_HD static inline void
fp_store_f64(void *array, size_t i, fp_dtype dtype, double value)
{
    if (dtype == FP_F64) {
        memcpy((char *)array + i * sizeof value, &value, sizeof value);
        return;
    }
    fp_store_f32(array, i, dtype, (float)value);
}

/* The nearest value that dtype can hold. */
FP_HD static inline float
fp_round_f32(float value, fp_dtype dtype)
{
    switch (dtype) {
        case FP_BF16:
            return fp_f32_of_bf16(fp_bf16_of_f32(value));
        case FP_F16:
            return fp_f32_of_f16(fp_f16_of_f32(value));
        case FP_F64:
        case FP_F32:
            break;
    }
    return value;
}

/* Write value to element i of an array: multiplied by scale if has_scale, and added to the present element if adds. Each
 * step rounds to the array's dtype, as fp_pack_opts (core/fp_pack.h) says. fp_put_f64: for an array of fp64. fp_put_f32: for
 * one of another dtype; from: the dtype that value was loaded from. */
FP_HD static inline void
fp_put_f64(void *array, size_t i, double value, int has_scale, double scale, int adds)
{
    value = has_scale ? value * scale : value;
    value = adds ? fp_load_f64(array, i, FP_F64) + value : value;
    fp_store_f64(array, i, FP_F64, value);
}

FP_HD static inline void
fp_put_f32(void *array, size_t i, fp_dtype dtype, float value, fp_dtype from, int has_scale, double scale, int adds)
{
    value = has_scale ? (from == dtype ? value : fp_round_f32(value, dtype)) * (float)scale : value;
    value = adds ? fp_load_f32(array, i, dtype) + (from == dtype && !has_scale ? value : fp_round_f32(value, dtype))
                 : value;
    fp_store_f32(array, i, dtype, value);
}
