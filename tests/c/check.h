/* check.h -- what the C tests of the core share. A failed CHECK prints where and what, and the program goes on; main
 * ends with `return check_result()`: 0 if none failed and no block of the core is left over. */
#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <stdio.h>

#include "core/fp_alloc.h"

static int check_failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            check_failures++;                                                                                          \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                     \
        }                                                                                                              \
    } while (0)

/* CHECK for two integers that shows them. */
#define CHECK_EQ(got, expected)                                                                                        \
    do {                                                                                                               \
        const long long got_value = (long long)(got), expected_value = (long long)(expected);                          \
        if (got_value != expected_value) {                                                                             \
            check_failures++;                                                                                          \
            printf("%s:%d: %s is %lld, expected %lld\n", __FILE__, __LINE__, #got, got_value, expected_value);         \
        }                                                                                                              \
    } while (0)

static inline int
check_result(void)
{
    CHECK_EQ(fp_alloc_live(), 0);
    return check_failures == 0 ? 0 : 1;
}

/* Numbers without a pattern, the same in each run (xorshift). */
static inline uint64_t
next_random(void)
{
    static uint64_t state = 0x9E3779B97F4A7C15u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

/* A number in [0, n). */
static inline int64_t
random_below(int64_t n)
{
    return (int64_t)(next_random() % (uint64_t)n);
}

#endif
