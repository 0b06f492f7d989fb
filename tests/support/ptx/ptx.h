/* ptx.h -- what PTX's instructions do, for the C that translate.py makes of a kernel. A register is 64 bits, whatever its type. */
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "races.h"

#define NONSENSE UINT64_C(0xA5A5A5A5A5A5A5A5) /* what a register has before it is written to */

#define PTX_TYPE(name, type)                                                                                           \
    static inline type get_##name(uint64_t bits)                                                                       \
    {                                                                                                                  \
        type value;                                                                                                    \
        memcpy(&value, &bits, sizeof value);                                                                           \
        return value;                                                                                                  \
    }                                                                                                                  \
    static inline uint64_t put_##name(type value)                                                                      \
    {                                                                                                                  \
        uint64_t bits = 0;                                                                                             \
        memcpy(&bits, &value, sizeof value);                                                                           \
        return bits;                                                                                                   \
    }

PTX_TYPE(u8, uint8_t)
PTX_TYPE(u16, uint16_t)
PTX_TYPE(u32, uint32_t)
PTX_TYPE(u64, uint64_t)
PTX_TYPE(s16, int16_t)
PTX_TYPE(s32, int32_t)
PTX_TYPE(s64, int64_t)
PTX_TYPE(f32, float)
PTX_TYPE(f64, double)

/* An address of `bytes` bytes: a multiple of them, as a device demands. */
static inline unsigned char *
ptx_at(const ptx_thread *self, uint64_t address, uint64_t bytes, ptx_access access)
{
    if (address % bytes != 0) {
        fprintf(stderr, "ptx: %llu bytes at %#llx, which is no multiple\n", (unsigned long long)bytes,
                (unsigned long long)address);
        abort();
    }
    ptx_accessed(self, address, bytes, access);
    return (unsigned char *)(uintptr_t)address;
}

/* Shifts by the width and more leave nothing. */
#define PTX_SHL(width, bits, by) ((by) >= (width) ? 0 : (bits) << (by))
#define PTX_SHR(width, bits, by) ((bits) >> ((by) >= (width) ? (width) - 1 : (by)) >> ((by) >= (width)))

/* into, with n bits of from at a place. */
static inline uint64_t
ptx_bfi(uint64_t from, uint64_t into, uint32_t at, uint32_t n)
{
    at &= 255;
    n &= 255;
    if (at >= 64) {
        return into;
    }
    const uint64_t mask = (n >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1) << at;
    return (into & ~mask) | ((from << at) & mask);
}

/* Add to an integer in memory; what it was before. */
static inline uint32_t
ptx_add(unsigned char *at, uint32_t value)
{
    uint32_t before;
    memcpy(&before, at, sizeof before);
    value += before;
    memcpy(at, &value, sizeof value);
    return before;
}

/* 16 bits with a sign, exponents from `least` on and `digits` digits behind the point: by the arithmetic of doubles, and so
 * independent of core/fp_float.h. Rounded to nearest even. */
static inline uint16_t
ptx_narrow(double value, int digits, int least)
{
    const uint32_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value)) {
        return 0x7FFF;
    }
    const uint32_t largest = (uint32_t)(2 * (1 - least) + 1); /* the exponent of infinity, as it is stored */
    int exponent;
    if (value == 0 || isinf(value)) {
        return (uint16_t)(sign | (value == 0 ? 0 : largest << digits));
    }
    frexp(value, &exponent); /* magnitude in [2^(exponent - 1), 2^exponent) */
    const int of_last_digit = (exponent - 1 < least ? least : exponent - 1) - digits;
    const double units = nearbyint(ldexp(fabs(value), -of_last_digit));
    /* what rounds up to 2^exponent carries into the stored exponent by itself */
    const uint32_t stored = (uint32_t)(of_last_digit + digits - least) << digits;
    const uint32_t bits = stored + (uint32_t)units;
    return (uint16_t)(sign | (bits >= largest << digits ? largest << digits : bits));
}

static inline float
ptx_widen_f16(uint16_t f16)
{
    const int exponent = f16 >> 10 & 31, units = (f16 & 1023) | (exponent == 0 ? 0 : 1024);
    const double magnitude =
        exponent == 31 ? (units == 1024 ? INFINITY : NAN) : ldexp(units, (exponent == 0 ? 1 : exponent) - 25);
    return (float)(f16 & 0x8000 ? -magnitude : magnitude);
}
