/* core/fp_atomic.h -- shards that start aligned and cut no atomic block: their least length, and the start of each
 * parameter. Pure C11: no Python.h, no torch. Sizes are in ELEMENTS. core/fp_layout.c is the only caller and has checked the
 * arguments. Nothing is allocated; safe without the GIL.
 *
 * Parameters stay in their order, each in one run. A parameter may be cut between two shards only at a multiple of its
 * block, counted from its start. So a parameter over more than two shards needs shards whose length is a multiple of its
 * block. Padding lies before parameters and after the last one, and makes all shards equally long. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/fp_status.h"

/* The step of a parameter: it may be cut at multiples of it. That is the least common multiple of block, the elements that
 * stay together, and alignment, as shards and parameters start aligned. 0: the parameter is never cut, as no such multiple
 * is less than numel. numel >= 0, block >= 1, alignment >= 1. */
int64_t fp_atomic_step(int64_t numel, int64_t block, int64_t alignment);

/* The parameters to place, and their shards. The arrays are borrowed for a call. */
typedef struct {
    const int64_t *numels; /* [n] elements of each parameter, >= 0 */
    const int64_t *steps;  /* [n] fp_atomic_step of each */
    size_t n;
    int64_t alignment;   /* parameters and shards start at its multiples, >= 1 */
    int64_t world_size;  /* >= 1 */
    int64_t most_padded; /* elements that world_size + 2 shards have at most, so that no sum of the search overflows */
} fp_atomic;

enum { FP_ATOMIC_TRIES = 4096 };

/* Write to *shard_numel the least length of a shard with which all parameters fit. A try of one length is O(n). After
 * FP_ATOMIC_TRIES tries the search goes on in steps of at least 1 / FP_ATOMIC_TRIES of the length, so the result may be
 * longer than the least one. It is at most the sum of all parameters, each rounded up to the alignment: then one shard holds
 * all. FP_OK; FP_EOVERFLOW, and nothing written, if world_size + 2 such shards have more than most_padded elements. */
fp_status fp_atomic_shard_numel(const fp_atomic *atomic, int64_t *shard_numel);

/* Write the start of each parameter to starts[n], counted in the flat parameter. shard_numel: the result of
 * fp_atomic_shard_numel() for the same parameters. */
void fp_atomic_starts(const fp_atomic *atomic, int64_t shard_numel, int64_t *starts);
