/* core/fp_cast_kernels.h -- the 64 kernels of one SIMD level and their table, made from the level's few vector
 * operations. Included once by each fp_cast_<level>.c, so it has no include guard. The including file defines
 *   FP_TABLE    the name of the table
 *   FP_TARGET   the function attribute that lets the compiler use the instruction set (may be empty)
 * and, unless the level has no vectors of its own, FP_VECTORS and
 *   vec_f32, VEC_F32, f32_set, f32_load, f32_store, f32_round   floats, VEC_F32 of them at a time
 *   vec_f64, VEC_F64, f64_set, f64_load                         doubles
 * where load and store take a pointer and a dtype, which is a constant in every kernel, so that switches fold away. The
 * compilers know * and + of vectors.
 * Floats compute for the destinations fp32, bf16 and fp16; doubles for fp64. The last few elements go one by one.
 * Multiplication and addition round separately: the build must not fuse them (-ffp-contract=off, as -std=c11 sets). */
#include <stdint.h>

#include "core/fp_cast.h"
#include "core/fp_float.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

FP_INLINE void
cast_one(const void *source, fp_dtype from, void *destination, fp_dtype to, size_t i, int op, double scale)
{
    if (to == FP_F64) {
        double value = fp_load_f64(source, i, from);
        if (op & FP_OP_SCALE) {
            value *= scale;
        }
        if (op & FP_OP_ADD) {
            value += fp_load_f64(destination, i, to);
        }
        fp_store_f64(destination, i, to, value);
        return;
    }
    float value = fp_load_f32(source, i, from);
    if (op & FP_OP_SCALE) {
        value = fp_round_f32(value, to) * (float)scale;
    }
    if (op & FP_OP_ADD) {
        value = fp_load_f32(destination, i, to) + fp_round_f32(value, to);
    }
    fp_store_f32(destination, i, to, value);
}

#if defined(FP_VECTORS)
/* The kernel for whole vectors of doubles; returns how many elements it did. */
FP_INLINE size_t
cast_f64(const char *source, fp_dtype from, char *destination, size_t n, int op, double scale)
{
    const size_t from_bytes = fp_dtype_bytes(from);
    const vec_f64 factor = f64_set(scale);
    size_t i = 0;
    for (; i + VEC_F64 <= n; i += VEC_F64) {
        vec_f64 value = f64_load(source + i * from_bytes, from);
        if (op & FP_OP_SCALE) {
            value *= factor;
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
    const vec_f32 factor = f32_set((float)scale);
    size_t i = 0;
    for (; i + VEC_F32 <= n; i += VEC_F32) {
        vec_f32 value = f32_load(source + i * from_bytes, from);
        if (op & FP_OP_SCALE) {
            value = (from == to ? value : f32_round(value, to)) * factor;
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
#if defined(FP_VECTORS)
    i = to == FP_F64 ? cast_f64(source, from, destination, n, op, scale)
                     : cast_f32(source, from, destination, to, n, op, scale);
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
