/* cuda/fp_lookup.h -- how a block and its threads find their pieces, and elements in a piece. */
#ifndef FP_LOOKUP_H
#define FP_LOOKUP_H

#include "cuda/fp_kernels.h"
#include "cuda/fp_registers.h"

enum { FP_INDEX = 256 };

/* Goes along with a launch, so that a block looks for its pieces near where they are: block b from piece first[b >> shift] on. */
typedef struct {
    uint32_t blocks;
    uint32_t n; /* pieces */
    uint32_t shift;
    float pieces_of_block;    /* were all equally long */
    uint16_t first[FP_INDEX]; /* modulo 2^16: a search that begins too early is longer, and as right */
} fp_index;

/* The first piece from i on that ends after position; n if there is none. O(log of how many are before it). */
FP_BODY uint32_t
fp_find(const fp_piece *pieces, uint32_t i, uint32_t n, int64_t position)
{
    uint32_t high = i;
    for (uint32_t step = 1; high < n && pieces[high].start + pieces[high].numel <= position; step *= 2) {
        i = high + 1;
        high += step;
    }
    high = high < n ? high : n;
    while (i < high) {
        const uint32_t middle = i + (high - i) / 2;
        if (pieces[middle].start + pieces[middle].numel > position) {
            high = middle;
        }
        else {
            i = middle + 1;
        }
    }
    return i;
}

/* For as many blocks of `share` elements as take [begin, end). It has an entry for each piece at most: the host fills it in, and
 * of few pieces each is near. */
FP_BODY fp_index
fp_index_of(const fp_table *table, int64_t begin, int64_t end, int64_t share)
{
    const uint32_t most = table->n == 0 ? 1 : table->n < FP_INDEX ? table->n : (uint32_t)FP_INDEX;
    fp_index index;
    uint32_t i = 0;
    memset(&index, 0, sizeof index);
    index.n = table->n;
    index.blocks = (uint32_t)((end - begin + share - 1) / share);
    index.pieces_of_block = index.blocks == 0 ? 0.0F : (float)index.n / (float)index.blocks;
    while (index.blocks > (uint64_t)most << index.shift) {
        index.shift++;
    }
    for (uint32_t k = 0; (uint64_t)k << index.shift < index.blocks; k++) {
        i = fp_find((const fp_piece *)table->memory, i, table->n, begin + ((int64_t)k << index.shift) * share);
        index.first[k] = (uint16_t)i;
    }
    return index;
}

/* The first piece that ends after position, which is a block's first; n if there is none. Where pieces are equally long, a block
 * finds its own without the index: of two reads that miss the cache, one is not waited for. */
FP_BODY uint32_t
fp_first_piece(const fp_piece *pieces, const fp_index *index, uint32_t block, int64_t position)
{
    const uint32_t near = index->first[block >> index->shift];
    const uint32_t guess = (uint32_t)(((float)block + 0.5F) * index->pieces_of_block);
    if (guess < index->n && pieces[guess].start <= position && position < pieces[guess].start + pieces[guess].numel) {
        return guess;
    }
    return fp_find(pieces, near, index->n, position);
}

/* Whether the piece has all of [from, upto). */
FP_BODY int
fp_covers(const fp_piece *piece, int64_t from, int64_t upto)
{
    return piece->start <= from && piece->start + piece->numel >= upto;
}

/* Where element `position` of a contiguous piece is; dtype is the piece's, a constant. */
FP_BODY char *
fp_place(const fp_piece *piece, int64_t position, fp_dtype dtype)
{
    return (char *)(uintptr_t)piece->data + (position - piece->start) * (int64_t)fp_dtype_bytes(dtype);
}

/* Where element `index` of a piece is, counted from its first. */
FP_BODY int64_t
fp_strided(const fp_piece *piece, const fp_piece_dim *dims, int64_t index)
{
    uint32_t rest = (uint32_t)index;
    int64_t offset = 0;
    if (piece->ndim == 0) {
        return index;
    }
    for (uint32_t d = piece->ndim; d-- > 0;) {
        const fp_piece_dim *dim = &dims[piece->first_dim + d];
        const uint32_t numel = (uint32_t)dim->numel;
        offset += (int64_t)(rest % numel) * dim->stride;
        rest /= numel;
    }
    return offset;
}

#endif
