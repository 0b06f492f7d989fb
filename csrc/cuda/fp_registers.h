/* cuda/fp_registers.h -- up to 64 bytes that a thread has in registers, read from memory and written to it. Little-endian, as
 * all devices are. `bytes`, n and k are constants in each kernel. Nothing can fail; on the host an unaligned address traps. */
#ifndef FP_REGISTERS_H
#define FP_REGISTERS_H

#include <stdint.h>
#include <string.h>

#include "core/fp_dtype.h"

#define FP_BODY FP_HD static inline __attribute__((always_inline))
#if defined(__CUDA_ARCH__)
#define FP_UNROLL _Pragma("unroll")
#define FP_CHECK_ALIGNED(memory, bytes) ((void)0)
#else
#define FP_UNROLL
/* A device faults there; so does the host, for the tests. */
#define FP_CHECK_ALIGNED(memory, bytes) ((uintptr_t)(memory) % (bytes) == 0 ? (void)0 : __builtin_trap())
#endif

enum { FP_VECTOR_BYTES = 16 }; /* the most that one instruction reads or writes */

typedef struct {
    uint64_t low, high;
} fp_vector;

/* Not an array: nvcc puts an array that is indexed into memory, not into registers. */
typedef struct {
    fp_vector a, b, c, d;
} fp_registers;

/* call(dtype), a macro, with the dtype as a constant. */
#define FP_FOR_DTYPE(dtype, call)                                                                                      \
    switch (dtype) {                                                                                                   \
        case FP_F64:                                                                                                   \
            call(FP_F64);                                                                                              \
            break;                                                                                                     \
        case FP_F32:                                                                                                   \
            call(FP_F32);                                                                                              \
            break;                                                                                                     \
        case FP_BF16:                                                                                                  \
            call(FP_BF16);                                                                                             \
            break;                                                                                                     \
        case FP_F16:                                                                                                   \
            call(FP_F16);                                                                                              \
            break;                                                                                                     \
    }

/* Read or write 2, 4, 8 or 16 bytes of memory, whose address is a multiple of bytes. __builtin_assume_aligned is for memory
 * alone: with the address of a variable it makes nvcc put the variable into memory. */
FP_BODY void
fp_read(void *value, const void *memory, size_t bytes)
{
    FP_CHECK_ALIGNED(memory, bytes);
    switch (bytes) {
        case 2:
            memcpy(value, __builtin_assume_aligned(memory, 2), 2);
            return;
        case 4:
            memcpy(value, __builtin_assume_aligned(memory, 4), 4);
            return;
        case 8:
            memcpy(value, __builtin_assume_aligned(memory, 8), 8);
            return;
        default:
            memcpy(value, __builtin_assume_aligned(memory, 16), 16);
    }
}

FP_BODY void
fp_write(void *memory, const void *value, size_t bytes)
{
    FP_CHECK_ALIGNED(memory, bytes);
    switch (bytes) {
        case 2:
            memcpy(__builtin_assume_aligned(memory, 2), value, 2);
            return;
        case 4:
            memcpy(__builtin_assume_aligned(memory, 4), value, 4);
            return;
        case 8:
            memcpy(__builtin_assume_aligned(memory, 8), value, 8);
            return;
        default:
            memcpy(__builtin_assume_aligned(memory, 16), value, 16);
    }
}

/* Element k of `bytes` (2, 4 or 8) bytes, as a number. */
FP_BODY uint64_t
fp_element(fp_registers from, size_t k, size_t bytes)
{
    const size_t at = k * bytes;
    const fp_vector of = at < 16 ? from.a : at < 32 ? from.b : at < 48 ? from.c : from.d;
    return (at % 16 < 8 ? of.low : of.high) >> (8 * (at % 8)) & (UINT64_MAX >> (64 - 8 * bytes));
}

/* The vector with element k, which was zero, set to value. */
FP_BODY fp_vector
fp_with_element(fp_vector of, size_t k, size_t bytes, uint64_t value)
{
    const size_t at = k * bytes;
    of.low |= at < 8 ? value << (8 * at) : 0;
    of.high |= at < 8 ? 0 : value << (8 * (at % 8));
    return of;
}

/* The bytes that one instruction reads of `bytes` bytes. */
FP_BODY size_t
fp_vector_bytes(size_t bytes)
{
    return bytes < FP_VECTOR_BYTES ? bytes : (size_t)FP_VECTOR_BYTES;
}

/* 1: memory is aligned so that fp_read_vectors() can read `bytes` bytes, 2 to 64, from it; 0. */
FP_BODY int
fp_has_vectors(const void *memory, size_t bytes)
{
    return (uintptr_t)memory % fp_vector_bytes(bytes) == 0;
}

/* `bytes` bytes (2 to 64, a power of 2) of memory, and zeros after them. */
FP_BODY fp_registers
fp_read_vectors(const char *memory, size_t bytes)
{
    fp_registers to = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
    fp_read(&to.a, memory, fp_vector_bytes(bytes));
    if (bytes > 16) {
        fp_read(&to.b, memory + 16, 16);
    }
    if (bytes > 32) {
        fp_read(&to.c, memory + 32, 16);
        fp_read(&to.d, memory + 48, 16);
    }
    return to;
}

/* n elements of `bytes` bytes each, from memory that is aligned to one element only; and zeros after them. */
FP_BODY fp_registers
fp_read_elements(const char *memory, size_t n, size_t bytes)
{
    const size_t of_vector = FP_VECTOR_BYTES / bytes;
    fp_registers to = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
    FP_UNROLL
    for (size_t k = 0; k < n; k++) {
        uint64_t value = 0;
        fp_read(&value, memory + k * bytes, bytes);
        switch (k / of_vector) {
            case 0:
                to.a = fp_with_element(to.a, k % of_vector, bytes, value);
                break;
            case 1:
                to.b = fp_with_element(to.b, k % of_vector, bytes, value);
                break;
            case 2:
                to.c = fp_with_element(to.c, k % of_vector, bytes, value);
                break;
            default:
                to.d = fp_with_element(to.d, k % of_vector, bytes, value);
        }
    }
    return to;
}

#endif
