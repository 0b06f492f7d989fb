/* core/fp_cast_kernels.h -- the 64 kernels of one SIMD level and their table. Included once by each fp_cast_<level>.c, so it
 * has no include guard. The including file defines
 *   FP_TABLE   the name of the table
 *   FP_TARGET  the function attribute that lets the compiler use the instruction set (may be empty)
 * and, if the instruction set has fp16,
 *   FP_LANES                       how many floats a vector has
 *   FP_F32_OF_F16, FP_F16_OF_F32   a vector of floats from and to as many fp16, rounded to nearest even
 * The compiler makes vectors of all loops but those of fp16, whose definition has branches. A dtype is a constant in every
 * kernel, so that switches fold away. Floats compute for the destinations fp32, bf16 and fp16; doubles for fp64.
 * Multiplication and addition round separately: the build must not fuse them (-ffp-contract=off, as -std=c11 sets). */
#include <stdint.h>

#include "core/fp_cast.h"
#include "core/fp_float.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

FP_INLINE void
cast_each(const char *source, fp_dtype from, char *destination, fp_dtype to, size_t n, int op, double scale)
{
    const int has_scale = op & FP_OP_SCALE, adds = op & FP_OP_ADD;
    for (size_t i = 0; i < n; i++) {
        if (to == FP_F64) {
            fp_put_f64(destination, i, fp_load_f64(source, i, from), has_scale, scale, adds);
        }
        else {
            fp_put_f32(destination, i, to, fp_load_f32(source, i, from), from, has_scale, scale, adds);
        }
    }
}

#if defined(FP_LANES)
typedef float vec_f32 __attribute__((vector_size(FP_LANES * 4)));
typedef uint16_t vec_f16 __attribute__((vector_size(FP_LANES * 2)));

FP_INLINE vec_f32
load_f32(const char *from)
{
    vec_f32 floats;
    memcpy(&floats, from, sizeof floats);
    return floats;
}

FP_INLINE vec_f32
load_f16(const char *from)
{
    vec_f16 halves;
    memcpy(&halves, from, sizeof halves);
    return (vec_f32)FP_F32_OF_F16(halves);
}

/* One vector of floats into fp16: fp_put_f32, for many. */
FP_INLINE void
put_f16(char *to, vec_f32 value, fp_dtype from, int op, double scale)
{
    if (op & FP_OP_SCALE) {
        value = (from == FP_F16 ? value : (vec_f32)FP_F32_OF_F16(FP_F16_OF_F32(value))) * (float)scale;
    }
    if (op & FP_OP_ADD) {
        value = load_f16(to) + (vec_f32)FP_F32_OF_F16(FP_F16_OF_F32(value));
    }
    const vec_f16 halves = (vec_f16)FP_F16_OF_F32(value);
    memcpy(to, &halves, sizeof halves);
}

/* From or to fp16, through floats, for whole blocks; returns how many elements it did. */
FP_INLINE size_t
cast_f16(const char *source, fp_dtype from, char *destination, fp_dtype to, size_t n, int op, double scale)
{
    enum { BLOCK = 64 };
    vec_f32 values[BLOCK / FP_LANES];
    size_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        const char *own = source + i * fp_dtype_bytes(from);
        char *target = destination + i * fp_dtype_bytes(to);
        if (from != FP_F16 && from != FP_F32) {
            cast_each(own, from, (char *)values, FP_F32, BLOCK, 0, 1.0);
            own = (const char *)values;
        }
        for (size_t j = 0; j < BLOCK / FP_LANES; j++) {
            values[j] = from == FP_F16 ? load_f16(own + j * sizeof(vec_f16)) : load_f32(own + j * sizeof(vec_f32));
        }
        for (size_t j = 0; j < BLOCK / FP_LANES && to == FP_F16; j++) {
            put_f16(target + j * sizeof(vec_f16), values[j], from, op, scale);
        }
        if (to != FP_F16) {
            cast_each((char *)values, FP_F32, target, to, BLOCK, op, scale);
        }
    }
    return i;
}
#endif

FP_INLINE void
cast_any(const char *source, fp_dtype from, char *destination, fp_dtype to, size_t n, int op, double scale)
{
    size_t done = 0;
#if defined(FP_LANES)
    done = from == FP_F16 || to == FP_F16 ? cast_f16(source, from, destination, to, n, op, scale) : 0;
#endif
    cast_each(source + done * fp_dtype_bytes(from), from, destination + done * fp_dtype_bytes(to), to, n - done, op,
              scale);
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
