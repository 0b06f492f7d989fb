/* core/fp_dtype.h -- the floating-point element types that the core computes with. Pure C11: no Python.h, no torch. */
#pragma once

#include <stddef.h>

#if defined(__CUDACC__)
#define FP_HD __host__ __device__ /* kernels of accelerators are made of these functions too */
#else
#define FP_HD
#endif

typedef enum {
    FP_F64 = 0, /* IEEE binary64 */
    FP_F32,     /* IEEE binary32 */
    FP_BF16,    /* the upper half of a binary32 */
    FP_F16,     /* IEEE binary16 */
} fp_dtype;

enum { FP_DTYPE_COUNT = 4 };

/* Bytes of one element: 8, 4, 2 or 2; 0 for a value that is no fp_dtype. */
FP_HD static inline size_t
fp_dtype_bytes(fp_dtype dtype)
{
    switch (dtype) {
        case FP_F64:
            return 8;
        case FP_F32:
            return 4;
        case FP_BF16:
        case FP_F16:
            return 2;
    }
    return 0;
}
