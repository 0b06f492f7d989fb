/* cuda/fp_lookup.h -- how a block and its threads find their pieces, and elements in a piece. The host fills an index for each
 * launch; the kernels read it. Positions are in ELEMENTS. Nothing can fail. */
#ifndef FP_LOOKUP_H
#define FP_LOOKUP_H

#include "cuda/fp_kernels.h"
#include "cuda/fp_registers.h"

enum { FP_INDEX = 256 };

/* An argument of a launch that shortens the search of a block: block b searches from piece first[b >> shift] on. */
typedef struct {
    uint32_t blocks; /* of the launch */
    uint32_t n;      /* pieces in the table */
    uint32_t shift;
    float pieces_of_block; /* pieces that a block would have if all were equally long */
    uint16_t
        first[FP_INDEX]; /* modulo 2^16: if the number is too small, the search is longer and has the same result */
} fp_index;

/* The index of the first piece from i on that ends after position; n if there is none. O(log k) if it is k pieces after i. */
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

/* The index for blocks of `share` elements each that together cover [begin, end). Called on the host, for each launch: so it
 * fills at most one entry a piece, as a search among few pieces is short anyway. */
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

/* The index of the first piece that ends after position, the first position of a block; n if there is none. It guesses the
 * piece as if all were equally long, and reads it while it reads the index: two reads that miss the cache at a time. */
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

/* 1: all of [from, upto) lies in the piece; 0. */
FP_BODY int
fp_covers(const fp_piece *piece, int64_t from, int64_t upto)
{
    return piece->start <= from && piece->start + piece->numel >= upto;
}

/* The address of the element at `position` in a contiguous piece. dtype: the piece's, a constant. */
FP_BODY char *
fp_place(const fp_piece *piece, int64_t position, fp_dtype dtype)
{
    return (char *)(uintptr_t)piece->data + (position - piece->start) * (int64_t)fp_dtype_bytes(dtype);
}

/* The offset in memory, in elements from data, of element `index` of a piece. */
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
