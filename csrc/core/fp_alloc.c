/* core/fp_alloc.c -- malloc with a counter of live blocks and a switch that makes one allocation fail. */
#include "core/fp_alloc.h"

#include <stdatomic.h>
#include <stdlib.h>

static _Atomic int64_t fail_countdown; /* 0: off; 1: the next allocation fails */
static _Atomic int64_t live_blocks;

/* Count one allocation down; 1 if it is the one that has to fail. */
static int
must_fail(void)
{
    int64_t left = atomic_load(&fail_countdown);
    while (left > 0) {
        if (atomic_compare_exchange_weak(&fail_countdown, &left, left - 1)) {
            return left == 1;
        }
    }
    return 0;
}

void *
fp_calloc(size_t count, size_t item_bytes)
{
    if (must_fail() || (item_bytes > 0 && count > SIZE_MAX / item_bytes)) {
        return NULL;
    }
    const size_t bytes = count * item_bytes;
    void *block = calloc(1, bytes > 0 ? bytes : 1);
    if (block != NULL) {
        atomic_fetch_add(&live_blocks, 1);
    }
    return block;
}

void
fp_free(void *block)
{
    if (block != NULL) {
        atomic_fetch_sub(&live_blocks, 1);
        free(block);
    }
}

void
fp_alloc_fail_at(int64_t k)
{
    atomic_store(&fail_countdown, k > 0 ? k : 0);
}

int64_t
fp_alloc_live(void)
{
    return atomic_load(&live_blocks);
}
