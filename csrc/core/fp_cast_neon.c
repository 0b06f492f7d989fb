/* core/fp_cast_neon.c -- the kernels with NEON, which every aarch64 processor has: 4 floats or 2 doubles at a time. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define FP_TABLE fp_cast_neon
#define FP_TARGET
#define FP_VECTOR_BYTES 16
#define FP_F32_OF_F16(halves) vcvt_f32_f16((float16x4_t)(halves))
#define FP_F16_OF_F32(floats) vcvt_f16_f32(floats)
#define FP_WIDE(halves) vmovl_u16((uint16x4_t)(halves))
#define FP_NARROW(bits) vmovn_u32((uint32x4_t)(bits))
#define FP_IF_NAN(floats, bits, others) vbslq_u32(vceqq_f32(floats, floats), (uint32x4_t)(others), (uint32x4_t)(bits))
#define FP_F64_OF_F32(few) vcvt_f64_f32(few)

#include "core/fp_cast_kernels.h"
#else
typedef int fp_cast_neon_is_for_aarch64; /* C11 wants a declaration in every file */
#endif
