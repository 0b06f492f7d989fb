/* core/fp_cast_neon.c -- the kernels with NEON, which every aarch64 processor has. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define FP_TABLE fp_cast_neon
#define FP_TARGET
#define FP_LANES 4
#define FP_F32_OF_F16(halves) vcvt_f32_f16((float16x4_t)(halves))
#define FP_F16_OF_F32(floats) vcvt_f16_f32(floats)

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_neon_is_for_aarch64; /* C11 wants a declaration in every file */
#endif
