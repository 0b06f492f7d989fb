/* core/fp_alloc.h -- the one place of the core that allocates. Pure C11: no Python.h, no torch.
 * Sizes are in bytes. Every function is safe in several threads and without the GIL. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Allocate count items of item_bytes each, all bytes zero; count may be 0 (the block is then empty, not NULL).
 * Returns NULL when the product overflows, memory is out, or fp_alloc_fail_at() asked for a failure.
 * The caller owns the block and gives it back with fp_free(). */
void *fp_calloc(size_t count, size_t item_bytes);

/* Give back a block of fp_calloc(); NULL is allowed. */
void fp_free(void *block);

/* For tests: let the k-th allocation from now on fail, once (1 is the next one); 0 switches that off. */
void fp_alloc_fail_at(int64_t k);

/* Blocks given out and not yet given back: a test that sees it grow has found a leak. */
int64_t fp_alloc_live(void);
