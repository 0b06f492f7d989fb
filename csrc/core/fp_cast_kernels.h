/* core/fp_cast_kernels.h -- the 64 kernels of one SIMD level and their table. Included once by each fp_cast_<level>.c, so it
 * has no include guard. The including file defines
 *   FP_TABLE   the name of the table
 *   FP_TARGET  the function attribute that lets the compiler use the instruction set (may be empty)
 * and, unless the level has no vectors of its own,
 *   FP_VECTOR_BYTES                how long a vector is
 *   FP_F32_OF_F16, FP_F16_OF_F32   a vector of floats from and to as many fp16, rounded to nearest even
 *   FP_WIDE, FP_NARROW             a vector of 32-bit integers from and to as many of 16 bits
 *   FP_IF_NAN                      bits where floats are NaN, others elsewhere
 *   FP_F64_OF_F32                  a vector of doubles from as many floats
 * All else is the compilers' own vectors. A dtype is a constant in every kernel, so that switches fold away.
 * Floats compute for the destinations fp32, bf16 and fp16; doubles for fp64. The last few elements go one by one, and halves
 * that become doubles, which no model has.
 * Multiplication and addition round separately: the build must not fuse them (-ffp-contract=off, as -std=c11 sets). */
#include <stdint.h>

#include "core/fp_cast.h"
#include "core/fp_float.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif __GNUC__ >= 12 /* its analyzer takes the length of a vector for that of a number */
#pragma GCC diagnostic ignored "-Wanalyzer-shift-count-overflow"
#endif

FP_INLINE void
cast_one(const void *source, fp_dtype from, void *destination, fp_dtype to, size_t i, int op, double scale)
{
    const int has_scale = op & FP_OP_SCALE, adds = op & FP_OP_ADD;
    if (to == FP_F64) {
        fp_put_f64(destination, i, fp_load_f64(source, i, from), has_scale, scale, adds);
    }
    else {
        fp_put_f32(destination, i, to, fp_load_f32(source, i, from), has_scale, scale, adds);
    }
}

#if defined(FP_VECTOR_BYTES)
typedef float vec_f32 __attribute__((vector_size(FP_VECTOR_BYTES)));
typedef double vec_f64 __attribute__((vector_size(FP_VECTOR_BYTES)));
typedef uint32_t vec_bits __attribute__((vector_size(FP_VECTOR_BYTES)));       /* of as many floats */
typedef uint16_t vec_halves __attribute__((vector_size(FP_VECTOR_BYTES / 2))); /* as many as floats */
typedef float few_f32 __attribute__((vector_size(FP_VECTOR_BYTES / 2)));       /* as many as doubles */
typedef double many_f64 __attribute__((vector_size(FP_VECTOR_BYTES * 2)));     /* as many as floats */
enum { VEC_F32 = FP_VECTOR_BYTES / 4, VEC_F64 = FP_VECTOR_BYTES / 8 };

/* As integers; see fp_bf16_of_f32. */
FP_INLINE vec_bits
bf16_of_f32(vec_f32 value)
{
    const vec_bits bits = (vec_bits)value, not_a_number = {0};
    const vec_bits rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (vec_bits)FP_IF_NAN(value, not_a_number + 0x7FC0u, rounded);
}

FP_INLINE vec_f32
f32_load(const char *from, fp_dtype dtype)
{
    vec_f32 value;
    many_f64 doubles;
    vec_halves halves;
    switch (dtype) {
        case FP_F64:
            memcpy(&doubles, from, sizeof doubles);
            return __builtin_convertvector(doubles, vec_f32);
        case FP_F32:
            memcpy(&value, from, sizeof value);
            return value;
        case FP_BF16:
        case FP_F16:
            break;
    }
    memcpy(&halves, from, sizeof halves);
    return dtype == FP_BF16 ? (vec_f32)((vec_bits)FP_WIDE(halves) << 16) : (vec_f32)FP_F32_OF_F16(halves);
}

FP_INLINE vec_f64
f64_load(const char *from, fp_dtype dtype)
{
    vec_f64 value;
    few_f32 floats;
    if (dtype == FP_F64) {
        memcpy(&value, from, sizeof value);
        return value;
    }
    memcpy(&floats, from, sizeof floats);
    return (vec_f64)FP_F64_OF_F32(floats);
}

FP_INLINE void
f32_store(char *to, fp_dtype dtype, vec_f32 value)
{
    if (dtype == FP_F32) {
        memcpy(to, &value, sizeof value);
        return;
    }
    const vec_halves halves =
        dtype == FP_BF16 ? (vec_halves)FP_NARROW(bf16_of_f32(value)) : (vec_halves)FP_F16_OF_F32(value);
    memcpy(to, &halves, sizeof halves);
}

FP_INLINE vec_f32
f32_round(vec_f32 value, fp_dtype dtype)
{
    if (dtype == FP_BF16) {
        return (vec_f32)(bf16_of_f32(value) << 16);
    }
    return dtype == FP_F16 ? (vec_f32)FP_F32_OF_F16(FP_F16_OF_F32(value)) : value;
}

/* The kernel for whole vectors of doubles; returns how many elements it did. */
FP_INLINE size_t
cast_f64(const char *source, fp_dtype from, char *destination, size_t n, int op, double scale)
{
    const size_t from_bytes = fp_dtype_bytes(from);
    size_t i = 0;
    for (; i + VEC_F64 <= n; i += VEC_F64) {
        vec_f64 value = f64_load(source + i * from_bytes, from);
        if (op & FP_OP_SCALE) {
            value *= scale;
        }
        if (op & FP_OP_ADD) {
            value += f64_load(destination + i * sizeof(double), FP_F64);
        }
        memcpy(destination + i * sizeof(double), &value, sizeof value);
    }
    return i;
}

/* The kernel for whole vectors of floats; returns how many elements it did. */
FP_INLINE size_t
cast_f32(const char *source, fp_dtype from, char *destination, fp_dtype to, size_t n, int op, double scale)
{
    const size_t from_bytes = fp_dtype_bytes(from);
    const size_t to_bytes = fp_dtype_bytes(to);
    size_t i = 0;
    for (; i + VEC_F32 <= n; i += VEC_F32) {
        vec_f32 value = f32_load(source + i * from_bytes, from);
        if (op & FP_OP_SCALE) {
            value = (from == to ? value : f32_round(value, to)) * (float)scale;
        }
        if (op & FP_OP_ADD) {
            const int is_exact = from == to && !(op & FP_OP_SCALE);
            value = f32_load(destination + i * to_bytes, to) + (is_exact ? value : f32_round(value, to));
        }
        f32_store(destination + i * to_bytes, to, value);
    }
    return i;
}
#endif

FP_INLINE void
cast_any(const void *source, fp_dtype from, void *destination, fp_dtype to, size_t n, int op, double scale)
{
    size_t i = 0;
#if defined(FP_VECTOR_BYTES)
    if (to != FP_F64) {
        i = cast_f32(source, from, destination, to, n, op, scale);
    }
    else if (from == FP_F64 || from == FP_F32) {
        i = cast_f64(source, from, destination, n, op, scale);
    }
#endif
    for (; i < n; i++) {
        cast_one(source, from, destination, to, i, op, scale);
    }
}

#define FP_KERNEL(name, from, to, op)                                                                                  \
    FP_TARGET static void name(const void *source, void *destination, size_t n, double scale)                          \
    {                                                                                                                  \
        cast_any(source, from, destination, to, n, op, scale);                                                         \
    }
#define FP_KERNELS(from, to)                                                                                           \
    FP_KERNEL(cast_##from##_##to, from, to, 0)                                                                         \
    FP_KERNEL(scale_##from##_##to, from, to, FP_OP_SCALE)                                                              \
    FP_KERNEL(add_##from##_##to, from, to, FP_OP_ADD)                                                                  \
    FP_KERNEL(scale_add_##from##_##to, from, to, FP_OP_SCALE | FP_OP_ADD)
#define FP_KERNELS_FROM(from)                                                                                          \
    FP_KERNELS(from, FP_F64) FP_KERNELS(from, FP_F32) FP_KERNELS(from, FP_BF16) FP_KERNELS(from, FP_F16)

FP_KERNELS_FROM(FP_F64)
FP_KERNELS_FROM(FP_F32)
FP_KERNELS_FROM(FP_BF16)
FP_KERNELS_FROM(FP_F16)

#define FP_ENTRY(from, to) [to] = {cast_##from##_##to, scale_##from##_##to, add_##from##_##to, scale_add_##from##_##to}
#define FP_ROW(from)                                                                                                   \
    [from] = {FP_ENTRY(from, FP_F64), FP_ENTRY(from, FP_F32), FP_ENTRY(from, FP_BF16), FP_ENTRY(from, FP_F16)}

const fp_cast_table FP_TABLE = {FP_ROW(FP_F64), FP_ROW(FP_F32), FP_ROW(FP_BF16), FP_ROW(FP_F16)};
