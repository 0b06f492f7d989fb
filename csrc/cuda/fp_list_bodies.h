/* cuda/fp_list_bodies.h -- norms, and scaling by a norm: the work of one thread, as a function of (block, thread). nvcc
 * compiles it for devices, the C compiler for the tests. A thread takes FP_LIST_WIDTH elements of a list at once, or one by
 * one where they are not all in one piece at an aligned address. Nothing can fail. */
#ifndef FP_LIST_BODIES_H
#define FP_LIST_BODIES_H

#include "cuda/fp_pack_body.h"

/* 1: the FP_LIST_WIDTH elements from `at` on all lie in the piece, at an aligned address; 0. */
FP_BODY int
fp_has_list_width(const fp_piece *piece, int64_t at)
{
    return fp_covers(piece, at, at + FP_LIST_WIDTH) &&
           (uintptr_t)fp_place(piece, at, (fp_dtype)piece->dtype) % FP_VECTOR_BYTES == 0;
}

/* ---- norms: each thread adds up its elements, a tree adds up threads and then blocks ---- */

enum { FP_NORM_STEP = FP_KERNEL_THREADS * FP_LIST_WIDTH }; /* elements of a block's round */

FP_BODY double
fp_norm_join(double a, double b, int is_max)
{
    return is_max ? (b > a || b != b ? b : a) : a + b;
}

/* The square of an element; is_max: its magnitude. */
FP_BODY double
fp_norm_one(const void *source, fp_dtype dtype, int is_max)
{
    const double value = fp_load_f64(source, 0, dtype);
    return !is_max ? value * value : value < 0 ? -value : value;
}

/* The rounds that a thread reads before it adds the first one up: 64 bytes in all. dtype is a constant. */
FP_BODY int64_t
fp_norm_rounds(fp_dtype dtype)
{
    return (int64_t)(sizeof(fp_registers) / (FP_LIST_WIDTH * fp_dtype_bytes(dtype)));
}

/* Join to sum FP_LIST_WIDTH elements of each round, from source on, at aligned addresses; return the result. dtype and rounds
 * are constants. */
FP_BODY double
fp_norm_vectors(const char *source, fp_dtype dtype, int64_t rounds, double sum, int is_max)
{
    const size_t bytes = fp_dtype_bytes(dtype);
    fp_registers in[sizeof(fp_registers) / FP_VECTOR_BYTES];
    FP_UNROLL
    for (int64_t round = 0; round < rounds; round++) {
        in[round] = fp_read_vectors(source + round * FP_NORM_STEP * (int64_t)bytes, FP_LIST_WIDTH * bytes);
    }
    FP_UNROLL
    for (int64_t round = 0; round < rounds; round++) {
        FP_UNROLL
        for (size_t k = 0; k < FP_LIST_WIDTH; k++) {
            const uint64_t value = fp_element(in[round], k, bytes);
            sum = fp_norm_join(sum, fp_norm_one(&value, dtype, is_max), is_max);
        }
    }
    return sum;
}

/* Join to sum the elements of fp_norm_rounds() rounds from *at on, or of one round if the piece, or stop, ends before. *at
 * becomes the position of the last round taken. Addresses are aligned. dtype is a constant. */
FP_BODY double
fp_norm_piece(const fp_piece *piece, int64_t *at, int64_t stop, fp_dtype dtype, double sum, int is_max)
{
    const char *source = fp_place(piece, *at, dtype);
    const int64_t rounds = fp_norm_rounds(dtype), last = *at + (rounds - 1) * FP_NORM_STEP;
    if (last < stop && fp_covers(piece, *at, last + FP_LIST_WIDTH)) {
        *at = last;
        return fp_norm_vectors(source, dtype, rounds, sum, is_max);
    }
    return fp_norm_vectors(source, dtype, 1, sum, is_max);
}

/* Join to sum the element at source. dtype is a constant. */
FP_BODY double
fp_norm_element(const char *source, fp_dtype dtype, double sum, int is_max)
{
    uint64_t in = 0;
    fp_read(&in, source, fp_dtype_bytes(dtype));
    return fp_norm_join(sum, fp_norm_one(&in, dtype, is_max), is_max);
}

FP_BODY fp_index
fp_norm_index(const fp_norm_job *job, const fp_table *table)
{
    return fp_index_of(table, 0, job->end, fp_norm_share(job->end));
}

/* The sum of one thread's elements. is_max: the job's, a constant. */
FP_BODY double
fp_norm_thread(const fp_norm_job *job, const fp_piece *pieces, const fp_index *index, uint32_t block, uint32_t thread,
               int is_max)
{
    const int64_t share = fp_norm_share(job->end), begin = (int64_t)block * share;
    const int64_t stop = begin + share < job->end ? begin + share : job->end;
    const uint32_t n = index->n;
    double sum = 0;
    uint32_t i = fp_first_piece(pieces, index, block, begin);
    for (int64_t at = begin + (int64_t)thread * FP_LIST_WIDTH; at < stop; at += FP_NORM_STEP) {
        i = fp_find(pieces, i, n, at);
        if (i < n && fp_has_list_width(&pieces[i], at)) {
#define FP_CALL(dtype) sum = fp_norm_piece(&pieces[i], &at, stop, dtype, sum, is_max)
            FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
            continue;
        }
        for (int64_t p = at; p < at + FP_LIST_WIDTH && p < stop; p++) {
            const uint32_t j = fp_find(pieces, i, n, p);
            if (j < n && pieces[j].start <= p) {
#define FP_CALL(dtype) sum = fp_norm_element(fp_place(&pieces[j], p, dtype), dtype, sum, is_max)
                FP_FOR_DTYPE((fp_dtype)pieces[j].dtype, FP_CALL)
#undef FP_CALL
            }
        }
    }
    return sum;
}

/* One step of the tree over sums[FP_KERNEL_THREADS] of a block: called for half = FP_KERNEL_THREADS / 2, ..., 1, with a barrier
 * before each. The result is sums[0]. */
FP_BODY void
fp_norm_fold(double *sums, uint32_t half, uint32_t thread, int is_max)
{
    if (thread < half) {
        sums[thread] = fp_norm_join(sums[thread], sums[thread + half], is_max);
    }
}

/* The sum of the blocks' partial results that one thread of the last block takes. */
FP_BODY double
fp_norm_gather(const fp_norm_job *job, uint32_t blocks, uint32_t thread)
{
    const volatile double *partials = job->partials; /* other processors wrote them */
    double sum = 0;
    for (uint32_t block = thread; block < blocks; block += FP_KERNEL_THREADS) {
        sum = fp_norm_join(sum, partials[block], job->is_max);
    }
    return sum;
}

FP_BODY void
fp_norm_finish(const fp_norm_job *job, double sum)
{
    fp_store_f64(job->result, 0, job->in_fp64 ? FP_F64 : FP_F32, sum);
}

/* ---- scaling ---- */

enum { FP_SCALE_SHARE = FP_KERNEL_THREADS * FP_LIST_WIDTH }; /* elements of a block */

FP_BODY fp_index
fp_scale_index(const fp_scale_job *job, const fp_table *table)
{
    return fp_index_of(table, 0, job->end, FP_SCALE_SHARE);
}

/* A job for the functions of fp_pack_body.h that multiplies by factor. */
FP_BODY fp_pack_job
fp_scaling(double factor, fp_dtype dtype)
{
    fp_pack_job how;
    memset(&how, 0, sizeof how);
    how.scale = dtype == FP_F64 ? factor : (double)fp_round_f32((float)factor, dtype);
    how.before = 1.0;
    how.has_scale = 1;
    return how;
}

/* Scale FP_LIST_WIDTH elements at an aligned address. dtype is a constant. */
FP_BODY void
fp_scale_vectors(double factor, char *place, fp_dtype dtype)
{
    const fp_pack_job how = fp_scaling(factor, dtype);
    const size_t step = (size_t)fp_pack_width(dtype);
    const size_t count = FP_LIST_WIDTH / step; /* 1, 2 or 4 */
    fp_pack_vectors(&how, place, place, step, count, dtype, dtype);
}

FP_BODY void
fp_scale_element(double factor, char *place, fp_dtype dtype)
{
    const fp_pack_job how = fp_scaling(factor, dtype);
    fp_pack_element(&how, place, place, dtype, dtype);
}

FP_BODY void
fp_scale_thread(const fp_scale_job *job, const fp_piece *pieces, const fp_index *index, uint32_t block, uint32_t thread)
{
    const int64_t begin = (int64_t)block * FP_SCALE_SHARE, at = begin + (int64_t)thread * FP_LIST_WIDTH;
    const double factor = job->in_fp64 ? *(const double *)job->factor : (double)*(const float *)job->factor;
    const uint32_t n = index->n;
    uint32_t i = fp_find(pieces, fp_first_piece(pieces, index, block, begin), n, at);
    if (i < n && fp_has_list_width(&pieces[i], at)) {
#define FP_CALL(dtype) fp_scale_vectors(factor, fp_place(&pieces[i], at, dtype), dtype)
        FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
        return;
    }
    for (int64_t p = at; p < at + FP_LIST_WIDTH && p < job->end; p++) {
        i = fp_find(pieces, i, n, p);
        if (i < n && pieces[i].start <= p) {
#define FP_CALL(dtype) fp_scale_element(factor, fp_place(&pieces[i], p, dtype), dtype)
            FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
        }
    }
}

#endif
