/* core/fp_atomic.h -- shards that start aligned and cut no atomic block: their least length, and the start of each
 * parameter. Pure C11: no Python.h, no torch. Sizes are in ELEMENTS.
 *
 * Parameters stay in their order, each in one run. A parameter may be cut between two shards only at a multiple of its
 * block, counted from its start; so one that lies over more than two shards needs shards that are a multiple of its
 * block long. Padding lies before parameters, and makes all shards equally long.
 * core/fp_layout.c is the only user. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/fp_status.h"

/* A parameter may be cut at multiples of the result: the least common multiple of block and alignment, as shards and
 * parameters start aligned. 0: nowhere, as no such multiple is less than numel. block: elements that stay together, >= 1;
 * alignment >= 1. */
int64_t fp_atomic_step(int64_t numel, int64_t block, int64_t alignment);

/* The parameters to place, and their shards. The arrays are borrowed for a call. */
typedef struct {
    const int64_t *numels; /* [n] elements of each parameter, >= 0 */
    const int64_t *steps;  /* [n] fp_atomic_step of each */
    size_t n;
    int64_t alignment;   /* parameters and shards start at its multiples, >= 1 */
    int64_t world_size;  /* >= 1 */
    int64_t most_padded; /* elements that world_size + 2 shards may have */
} fp_atomic;

enum { FP_ATOMIC_TRIES = 4096 };

/* The least length of a shard with which all fit, into *shard_numel. The search is exact for its first FP_ATOMIC_TRIES
 * tries; then it goes on in steps of at least 1 / FP_ATOMIC_TRIES of the length. Whatever it finds is no longer than all
 * parameters, each rounded up to the alignment. FP_OK; FP_EOVERFLOW if the shards do not fit in most_padded. Allocates
 * nothing; a try is O(n). */
fp_status fp_atomic_shard_numel(const fp_atomic *atomic, int64_t *shard_numel);

/* The start of each parameter in shards of this length, which fp_atomic_shard_numel gave. */
void fp_atomic_starts(const fp_atomic *atomic, int64_t shard_numel, int64_t *starts);
