/* cuda/fp_pack_body.h -- packing: the work of one thread, as a function of (block, thread). nvcc compiles it for devices, the C
 * compiler for the tests, which call it for all blocks and threads. The arithmetic is core/fp_float.h's. Threads share
 * nothing, and nothing can fail. A thread writes 16 bytes of the flat buffer at once, at an aligned address.
 *
 * Parameters of type fp_dtype are constants in each kernel, so that the compiler drops all other cases. from: the dtype of a
 * piece; to: job->dtype. */
#ifndef FP_PACK_BODY_H
#define FP_PACK_BODY_H

#include "core/fp_float.h"
#include "cuda/fp_lookup.h"

enum { FP_PACK_ROUNDS = 4 }; /* times 16 bytes that a thread writes, if the flat buffer is large */

/* The element at target = or += the element at source; see fp_pack_job. before: job->before. */
FP_BODY void
fp_pack_one(const fp_pack_job *job, const void *source, fp_dtype from, void *target, fp_dtype to, double before)
{
    double wide = 0;
    float value = 0;
    if (from == FP_F64) {
        wide = fp_load_f64(source, 0, from);
        wide *= before;
        value = (float)wide;
    }
    else {
        value = fp_load_f32(source, 0, from);
        value = before != 1.0 ? fp_round_f32(value * (float)before, from) : value;
        wide = (double)value;
    }
    if (to == FP_F64) {
        fp_put_f64(target, 0, wide, job->has_scale, job->scale, job->accumulate);
    }
    else {
        fp_put_f32(target, 0, to, value, from, job->has_scale, job->scale, job->accumulate);
    }
}

/* Elements that a thread writes at once. */
FP_BODY int64_t
fp_pack_width(fp_dtype to)
{
    return (int64_t)(FP_VECTOR_BYTES / fp_dtype_bytes(to));
}

/* The last position at or before job->begin whose address is 16-byte aligned; it may be negative. */
FP_BODY int64_t
fp_pack_first(const fp_pack_job *job, fp_dtype to)
{
    const size_t bytes = fp_dtype_bytes(to);
    const uintptr_t begin = (uintptr_t)job->flat + (uintptr_t)job->begin * bytes;
    return job->begin - (int64_t)(begin % FP_VECTOR_BYTES / bytes);
}

/* Elements of a block. In a small flat buffer a thread writes once, so that all processors of the device get work. */
FP_BODY int64_t
fp_pack_share(const fp_pack_job *job, fp_dtype to)
{
    const int64_t step = fp_pack_width(to) * FP_KERNEL_THREADS;
    return job->end - job->begin < 1024 * step ? step : FP_PACK_ROUNDS * step;
}

FP_BODY fp_index
fp_pack_index(const fp_pack_job *job, const fp_table *table)
{
    return fp_index_of(table, fp_pack_first(job, job->dtype), job->end, fp_pack_share(job, job->dtype));
}

/* The operands for 16 bytes of the flat buffer. */
typedef struct {
    fp_registers source;
    fp_registers old; /* the present elements of the buffer, if job->accumulate; else zeros */
} fp_pack_operands;

FP_BODY fp_pack_operands
fp_pack_load(const fp_pack_job *job, const char *source, int has_vectors, const char *target, fp_dtype from,
             fp_dtype to)
{
    const size_t width = (size_t)fp_pack_width(to), bytes = fp_dtype_bytes(from);
    fp_pack_operands operands = {{{0, 0}, {0, 0}, {0, 0}, {0, 0}}, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}};
    operands.source = has_vectors ? fp_read_vectors(source, width * bytes) : fp_read_elements(source, width, bytes);
    if (job->accumulate) {
        operands.old = fp_read_vectors(target, FP_VECTOR_BYTES);
    }
    return operands;
}

FP_BODY void
fp_pack_store(const fp_pack_job *job, double before, fp_pack_operands operands, char *target, fp_dtype from,
              fp_dtype to)
{
    const size_t bytes = fp_dtype_bytes(to);
    fp_vector out = {0, 0};
    FP_UNROLL
    for (size_t k = 0; k < (size_t)fp_pack_width(to); k++) {
        const uint64_t value = fp_element(operands.source, k, fp_dtype_bytes(from));
        uint64_t place = fp_element(operands.old, k, bytes);
        fp_pack_one(job, &value, from, &place, to, before);
        out = fp_with_element(out, k, bytes, place);
    }
    fp_write(target, &out, sizeof out);
}

/* Write `count` (1, 2 or 4, a constant) times 16 bytes of the flat buffer, each `step` elements after the one before. All
 * operands are loaded before the first store, so that one wait serves all. job->before is 1. */
FP_BODY void
fp_pack_vectors(const fp_pack_job *job, const char *source, char *target, size_t step, size_t count, fp_dtype from,
                fp_dtype to)
{
    const size_t apart = step * fp_dtype_bytes(from), there = step * fp_dtype_bytes(to);
    const fp_pack_operands first = fp_pack_load(job, source, 1, target, from, to);
    fp_pack_operands second = first, third = first, fourth = first;
    if (count > 1) {
        second = fp_pack_load(job, source + apart, 1, target + there, from, to);
    }
    if (count > 2) {
        third = fp_pack_load(job, source + 2 * apart, 1, target + 2 * there, from, to);
        fourth = fp_pack_load(job, source + 3 * apart, 1, target + 3 * there, from, to);
    }
    fp_pack_store(job, 1.0, first, target, from, to);
    if (count > 1) {
        fp_pack_store(job, 1.0, second, target + there, from, to);
    }
    if (count > 2) {
        fp_pack_store(job, 1.0, third, target + 2 * there, from, to);
        fp_pack_store(job, 1.0, fourth, target + 3 * there, from, to);
    }
}

/* Write FP_PACK_ROUNDS times 16 bytes from position `at` on, as many at once as fit into registers. 1; 0, with nothing done:
 * the piece is not aligned as the flat buffer is. job->before is 1. */
FP_BODY int
fp_pack_rows(const fp_pack_job *job, const fp_piece *piece, int64_t at, size_t step, fp_dtype from, fp_dtype to)
{
    const size_t from_bytes = fp_dtype_bytes(from), to_bytes = fp_dtype_bytes(to);
    const size_t count = from_bytes <= to_bytes ? FP_PACK_ROUNDS : from_bytes == 2 * to_bytes ? 2 : 1;
    const char *source = fp_place(piece, at, from);
    char *target = (char *)job->flat + at * (int64_t)to_bytes;
    if (!fp_has_vectors(source, (size_t)fp_pack_width(to) * from_bytes)) {
        return 0;
    }
    for (size_t r = 0; r < FP_PACK_ROUNDS; r += count) {
        fp_pack_vectors(job, source + r * step * from_bytes, target + r * step * to_bytes, step, count, from, to);
    }
    return 1;
}

/* Write 16 bytes of the flat buffer from a contiguous piece of any alignment. */
FP_BODY void
fp_pack_vector(const fp_pack_job *job, const fp_piece *piece, int64_t at, fp_dtype from, fp_dtype to)
{
    const char *source = fp_place(piece, at, from);
    char *target = (char *)job->flat + at * (int64_t)fp_dtype_bytes(to);
    const int has_vectors = fp_has_vectors(source, (size_t)fp_pack_width(to) * fp_dtype_bytes(from));
    fp_pack_store(job, job->before, fp_pack_load(job, source, has_vectors, target, from, to), target, from, to);
}

/* The element at place = or += the element at source. */
FP_BODY void
fp_pack_element(const fp_pack_job *job, const char *source, char *place, fp_dtype from, fp_dtype to)
{
    uint64_t in = 0, out = 0;
    fp_read(&in, source, fp_dtype_bytes(from));
    if (job->accumulate) {
        fp_read(&out, place, fp_dtype_bytes(to));
    }
    fp_pack_one(job, &in, from, &out, to, job->before);
    fp_write(place, &out, fp_dtype_bytes(to));
}

/* Write elements [from, upto) one by one. i: the index of the first piece that ends after from. */
FP_BODY void
fp_pack_elements(const fp_pack_job *job, const fp_piece *pieces, uint32_t n, uint32_t i, int64_t from, int64_t upto,
                 fp_dtype to)
{
    const fp_piece_dim *dims = (const fp_piece_dim *)(const void *)(pieces + n);
    const size_t bytes = fp_dtype_bytes(to);
    const uint64_t zero = 0;
    for (int64_t p = from; p < upto; p++) {
        char *place = (char *)job->flat + (size_t)p * bytes;
        i = fp_find(pieces, i, n, p);
        if (i < n && pieces[i].start <= p && pieces[i].data != NULL) {
            const int64_t index = fp_strided(&pieces[i], dims, p - pieces[i].start);
#define FP_CALL(from)                                                                                                  \
    fp_pack_element(job, (const char *)pieces[i].data + index * (int64_t)fp_dtype_bytes(from), place, from, to)
            FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
        }
        else if (!job->accumulate) {
            fp_write(place, &zero, bytes);
        }
    }
}

/* Write 16 bytes of the flat buffer from position `at` on, as far as they lie in [job->begin, job->end). No piece before
 * piece i ends after `at`. */
FP_BODY void
fp_pack_part(const fp_pack_job *job, const fp_piece *pieces, uint32_t n, uint32_t i, int64_t at, fp_dtype to)
{
    const int64_t from = at > job->begin ? at : job->begin;
    const int64_t upto = at + fp_pack_width(to) < job->end ? at + fp_pack_width(to) : job->end;
    const int is_whole = upto - from == fp_pack_width(to);
    if (from >= upto) {
        return;
    }
    i = fp_find(pieces, i, n, from);
    if (is_whole && i < n && fp_covers(&pieces[i], from, upto) && pieces[i].data != NULL && pieces[i].ndim == 0) {
#define FP_CALL(from) fp_pack_vector(job, &pieces[i], at, from, to)
        FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
    }
    else if (is_whole && (i == n || pieces[i].start >= upto)) {
        const fp_vector zeros = {0, 0};
        if (!job->accumulate) {
            fp_write((char *)job->flat + at * (int64_t)fp_dtype_bytes(to), &zeros, sizeof zeros);
        }
    }
    else {
        fp_pack_elements(job, pieces, n, i, from, upto, to);
    }
}

/* The work of one thread. If one contiguous piece covers the block, FP_PACK_ROUNDS writes at a time; else 16 bytes at a time,
 * with a search for the piece. */
FP_BODY void
fp_pack_thread(const fp_pack_job *job, const fp_piece *pieces, const fp_index *index, uint32_t block, uint32_t thread,
               fp_dtype to)
{
    const int64_t width = fp_pack_width(to), step = width * FP_KERNEL_THREADS, share = fp_pack_share(job, to);
    const int64_t tile = fp_pack_first(job, to) + (int64_t)block * share, mine = tile + thread * width;
    const uint32_t i = fp_first_piece(pieces, index, block, tile);
    if (share == FP_PACK_ROUNDS * step && job->before == 1.0 && tile >= job->begin && tile + share <= job->end &&
        i < index->n && fp_covers(&pieces[i], tile, tile + share) && pieces[i].data != NULL && pieces[i].ndim == 0) {
        int is_done = 0;
#define FP_CALL(from) is_done = fp_pack_rows(job, &pieces[i], mine, (size_t)step, from, to)
        FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
        if (is_done) {
            return;
        }
    }
    for (int64_t at = mine; at < tile + share; at += step) {
        fp_pack_part(job, pieces, index->n, i, at, to);
    }
}

#endif
