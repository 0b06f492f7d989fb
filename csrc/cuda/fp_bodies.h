/* cuda/fp_bodies.h -- what one thread of each kernel does, as a function of (block, thread). nvcc compiles it for devices, the C
 * compiler for the tests, which go through all blocks and threads. The arithmetic is core/fp_float.h's. */
#ifndef FP_BODIES_H
#define FP_BODIES_H

#include "core/fp_float.h"
#include "cuda/fp_kernels.h"

#define FP_BODY FP_HD static inline __attribute__((always_inline))
#if defined(__CUDA_ARCH__)
#define FP_UNROLL _Pragma("unroll")
#else
#define FP_UNROLL
#endif

enum { FP_VECTOR_BYTES = 16, FP_PACK_ROUNDS = 4 };

/* Bytes of memory in registers: what a thread takes at once of one tensor. */
typedef struct {
    uint32_t words[4];
} __attribute__((aligned(16))) fp_block16;

/* Copy 2, 4, 8 or 16 bytes; both addresses are multiples of that. */
FP_BODY void
fp_move(void *to, const void *from, size_t bytes)
{
    switch (bytes) {
        case 2:
            memcpy(__builtin_assume_aligned(to, 2), __builtin_assume_aligned(from, 2), 2);
            return;
        case 4:
            memcpy(__builtin_assume_aligned(to, 4), __builtin_assume_aligned(from, 4), 4);
            return;
        case 8:
            memcpy(__builtin_assume_aligned(to, 8), __builtin_assume_aligned(from, 8), 8);
            return;
        default:
            memcpy(__builtin_assume_aligned(to, 16), __builtin_assume_aligned(from, 16), 16);
    }
}

/* The first piece from i on that ends after position; n if there is none. O(log n), O(1) while the answer stays the same. */
FP_BODY uint32_t
fp_find(const fp_piece *pieces, uint32_t i, uint32_t n, int64_t position)
{
    uint32_t high = n;
    if (i < n && pieces[i].start + pieces[i].numel > position) {
        return i;
    }
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

/* Whether the piece has all of [from, upto). */
FP_BODY int
fp_covers(const fp_piece *piece, int64_t from, int64_t upto)
{
    return piece->start <= from && piece->start + piece->numel >= upto;
}

/* Where element `position` of a contiguous piece is; NULL if the piece is otherwise, or not at a multiple of `aligned` there. */
FP_BODY const char *
fp_aligned_at(const fp_piece *piece, int64_t position, size_t aligned)
{
    const char *data = (const char *)piece->data;
    if (data == NULL || piece->ndim != 0) {
        return NULL;
    }
    data += (size_t)(position - piece->start) * fp_dtype_bytes((fp_dtype)piece->dtype);
    return (uintptr_t)data % aligned == 0 ? data : NULL;
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

/* Element j of target = or += element i of source; see fp_pack_job. */
FP_BODY void
fp_pack_one(const fp_pack_job *job, const void *source, size_t i, fp_dtype from, void *target, size_t j, fp_dtype to,
            double before)
{
    double wide = 0;
    float value = 0;
    if (from == FP_F64) {
        wide = fp_load_f64(source, i, from);
        wide *= before;
        value = (float)wide;
    }
    else {
        value = fp_load_f32(source, i, from);
        value = before != 1.0 ? fp_round_f32(value * (float)before, from) : value;
        wide = (double)value;
    }
    if (to == FP_F64) {
        fp_put_f64(target, j, wide, job->has_scale, job->scale, job->accumulate);
    }
    else {
        fp_put_f32(target, j, to, value, from, job->has_scale, job->scale, job->accumulate);
    }
}

/* Call one of the functions below with the dtype as a constant. */
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

/* ---- packing: a thread makes 16 bytes of the flat buffer at once, at aligned addresses ---- */

FP_BODY int64_t
fp_pack_width(fp_dtype to)
{
    return (int64_t)(FP_VECTOR_BYTES / fp_dtype_bytes(to));
}

/* The position from which on every fp_pack_width() elements are aligned, at or before begin; it may be negative. */
FP_BODY int64_t
fp_pack_first(const fp_pack_job *job)
{
    const size_t bytes = fp_dtype_bytes(job->dtype);
    const uintptr_t begin = (uintptr_t)job->flat + (uintptr_t)job->begin * bytes;
    return job->begin - (int64_t)(begin % FP_VECTOR_BYTES / bytes);
}

/* How often a thread does that: once where there is little, so that all processors get some of it. */
FP_BODY uint32_t
fp_pack_rounds(const fp_pack_job *job)
{
    const int64_t little = (int64_t)FP_KERNEL_THREADS * 1024 * fp_pack_width(job->dtype);
    return job->end - job->begin < little ? 1 : FP_PACK_ROUNDS;
}

FP_BODY uint32_t
fp_pack_blocks(const fp_pack_job *job)
{
    const int64_t share = fp_pack_width(job->dtype) * FP_KERNEL_THREADS * (int64_t)fp_pack_rounds(job);
    return (uint32_t)((job->end - fp_pack_first(job) + share - 1) / share);
}

/* `count` times 16 bytes of the flat buffer, each `step` elements after the one before; all is loaded before the first is stored.
 * count, from and to are constants. */
FP_BODY void
fp_pack_vectors(const fp_pack_job *job, double before, const char *source, char *target, size_t step, size_t count,
                fp_dtype from, fp_dtype to)
{
    const size_t width = (size_t)fp_pack_width(to), from_bytes = fp_dtype_bytes(from), to_bytes = fp_dtype_bytes(to);
    const size_t run = width * from_bytes < sizeof(fp_block16) ? width * from_bytes : sizeof(fp_block16);
    fp_block16 in[FP_PACK_ROUNDS][4], out[FP_PACK_ROUNDS];
    FP_UNROLL
    for (size_t r = 0; r < count; r++) {
        FP_UNROLL
        for (size_t k = 0; k < width * from_bytes / run; k++) {
            fp_move(&in[r][k], source + r * step * from_bytes + k * run, run);
        }
        if (job->accumulate) {
            fp_move(&out[r], target + r * step * to_bytes, sizeof out[r]);
        }
    }
    FP_UNROLL
    for (size_t r = 0; r < count; r++) {
        FP_UNROLL
        for (size_t k = 0; k < width; k++) {
            fp_pack_one(job, in[r], k, from, &out[r], k, to, before);
        }
        fp_move(target + r * step * to_bytes, &out[r], sizeof out[r]);
    }
}

/* FP_PACK_ROUNDS of them, as many at once as fit into registers. */
FP_BODY void
fp_pack_rows(const fp_pack_job *job, const char *source, char *target, size_t step, fp_dtype from, fp_dtype to)
{
    const size_t from_bytes = fp_dtype_bytes(from), to_bytes = fp_dtype_bytes(to);
    const size_t count = from_bytes <= to_bytes ? FP_PACK_ROUNDS : from_bytes == 2 * to_bytes ? 2 : 1;
    for (size_t r = 0; r < FP_PACK_ROUNDS; r += count) {
        fp_pack_vectors(job, 1.0, source + r * step * from_bytes, target + r * step * to_bytes, step, count, from, to);
    }
}

/* The element at place = or += that at source; from and to are constants. */
FP_BODY void
fp_pack_element(const fp_pack_job *job, const char *source, char *place, fp_dtype from, fp_dtype to)
{
    uint64_t in = 0, out = 0;
    fp_move(&in, source, fp_dtype_bytes(from));
    if (job->accumulate) {
        fp_move(&out, place, fp_dtype_bytes(to));
    }
    fp_pack_one(job, &in, 0, from, &out, 0, to, job->before);
    fp_move(place, &out, fp_dtype_bytes(to));
}

/* Elements [from, upto), one by one; i: the first piece that ends after from. */
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
            fp_move(place, &zero, bytes);
        }
    }
}

/* to: job->dtype, a constant. */
FP_BODY void
fp_pack_thread(const fp_pack_job *job, const fp_piece *pieces, uint32_t n, uint32_t block, uint32_t thread, fp_dtype to)
{
    const int64_t width = fp_pack_width(to), step = width * FP_KERNEL_THREADS;
    const uint32_t rounds = fp_pack_rounds(job);
    const int64_t tile = fp_pack_first(job) + (int64_t)block * rounds * step;
    const size_t bytes = fp_dtype_bytes(to);
    uint32_t i = fp_find(pieces, 0, n, tile > job->begin ? tile : job->begin);
    if (rounds == FP_PACK_ROUNDS && job->before == 1.0 && tile >= job->begin &&
        tile + FP_PACK_ROUNDS * step <= job->end && i < n &&
        fp_covers(&pieces[i], tile, tile + FP_PACK_ROUNDS * step)) {
        const char *source = fp_aligned_at(&pieces[i], tile, FP_VECTOR_BYTES);
        if (source != NULL) {
            const size_t mine = thread * (size_t)width;
            char *target = (char *)job->flat + ((size_t)tile + mine) * bytes;
#define FP_CALL(from) fp_pack_rows(job, source + mine * fp_dtype_bytes(from), target, (size_t)step, from, to)
            FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
            return;
        }
    }
    for (uint32_t r = 0; r < rounds; r++) {
        const int64_t at = tile + r * step + thread * width;
        const int64_t from = at > job->begin ? at : job->begin;
        const int64_t upto = at + width < job->end ? at + width : job->end;
        if (from >= upto) {
            continue;
        }
        i = fp_find(pieces, i, n, from);
        const int covers = i < n && fp_covers(&pieces[i], at, at + width);
        if (upto - from == width && covers && pieces[i].data != NULL) {
            const fp_dtype dtype = (fp_dtype)pieces[i].dtype;
            const size_t run = (size_t)width * fp_dtype_bytes(dtype);
            const char *source = fp_aligned_at(&pieces[i], at, run < sizeof(fp_block16) ? run : sizeof(fp_block16));
            if (source != NULL) {
                char *target = (char *)job->flat + (size_t)at * bytes;
#define FP_CALL(from) fp_pack_vectors(job, job->before, source, target, 0, 1, from, to)
                FP_FOR_DTYPE(dtype, FP_CALL)
#undef FP_CALL
                continue;
            }
        }
        else if (upto - from == width &&
                 (i == n || pieces[i].start >= upto || (covers && pieces[i].data == NULL))) { /* nothing lies here */
            const fp_block16 zeros = {{0, 0, 0, 0}};
            if (!job->accumulate) {
                fp_move((char *)job->flat + (size_t)at * bytes, &zeros, sizeof zeros);
            }
            continue;
        }
        fp_pack_elements(job, pieces, n, i, from, upto, to);
    }
}

/* ---- norms: a list in blocks of fp_norm_share(), added up in a tree ---- */

FP_BODY double
fp_norm_join(double a, double b, int is_max)
{
    return is_max ? (b > a || b != b ? b : a) : a + b;
}

/* What a element adds. */
FP_BODY double
fp_norm_one(const void *array, size_t i, fp_dtype dtype, int is_max)
{
    const double value = fp_load_f64(array, i, dtype);
    return !is_max ? value * value : value < 0 ? -value : value;
}

/* FP_LIST_WIDTH elements at an aligned address; dtype is a constant. */
FP_BODY double
fp_norm_vectors(const char *source, fp_dtype dtype, double sum, int is_max)
{
    fp_block16 in[4];
    FP_UNROLL
    for (size_t k = 0; k < FP_LIST_WIDTH * fp_dtype_bytes(dtype) / sizeof in[0]; k++) {
        fp_move(&in[k], source + k * sizeof in[0], sizeof in[0]);
    }
    FP_UNROLL
    for (size_t k = 0; k < FP_LIST_WIDTH; k++) {
        sum = fp_norm_join(sum, fp_norm_one(in, k, dtype, is_max), is_max);
    }
    return sum;
}

/* Element `index` of an array; dtype is a constant. */
FP_BODY double
fp_norm_element(const void *array, size_t index, fp_dtype dtype, double sum, int is_max)
{
    uint64_t in = 0;
    fp_move(&in, (const char *)array + index * fp_dtype_bytes(dtype), fp_dtype_bytes(dtype));
    return fp_norm_join(sum, fp_norm_one(&in, 0, dtype, is_max), is_max);
}

/* is_max: the job's, a constant. */
FP_BODY double
fp_norm_thread(const fp_norm_job *job, const fp_piece *pieces, uint32_t n, uint32_t block, uint32_t thread, int is_max)
{
    const int64_t share = fp_norm_share(job->end), begin = (int64_t)block * share;
    const int64_t stop = begin + share < job->end ? begin + share : job->end;
    double sum = 0;
    uint32_t i = 0;
    for (int64_t at = begin + (int64_t)thread * FP_LIST_WIDTH; at < stop; at += FP_KERNEL_THREADS * FP_LIST_WIDTH) {
        const char *source;
        i = fp_find(pieces, i, n, at);
        if (i < n && fp_covers(&pieces[i], at, at + FP_LIST_WIDTH) &&
            (source = fp_aligned_at(&pieces[i], at, FP_VECTOR_BYTES)) != NULL) {
#define FP_CALL(dtype) sum = fp_norm_vectors(source, dtype, sum, is_max)
            FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
            continue;
        }
        for (int64_t p = at; p < at + FP_LIST_WIDTH && p < stop; p++) {
            const uint32_t j = fp_find(pieces, i, n, p);
            if (j < n && pieces[j].start <= p) {
                const size_t index = (size_t)(p - pieces[j].start);
#define FP_CALL(dtype) sum = fp_norm_element(pieces[j].data, index, dtype, sum, is_max)
                FP_FOR_DTYPE((fp_dtype)pieces[j].dtype, FP_CALL)
#undef FP_CALL
            }
        }
    }
    return sum;
}

/* One step of the tree over what the threads of a block have: for half = FP_KERNEL_THREADS / 2, ..., 1, all threads after each. */
FP_BODY void
fp_norm_fold(double *sums, uint32_t half, uint32_t thread, int is_max)
{
    if (thread < half) {
        sums[thread] = fp_norm_join(sums[thread], sums[thread + half], is_max);
    }
}

/* What a thread of the last block has of the partial results of all. */
FP_BODY double
fp_norm_gather(const fp_norm_job *job, uint32_t thread)
{
    const volatile double *partials = job->partials; /* other processors wrote them */
    double sum = 0;
    for (uint32_t block = thread; block < fp_norm_blocks(job->end); block += FP_KERNEL_THREADS) {
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

FP_BODY uint32_t
fp_scale_blocks(const fp_scale_job *job)
{
    const int64_t share = FP_KERNEL_THREADS * FP_LIST_WIDTH;
    return (uint32_t)((job->end + share - 1) / share);
}

/* For fp_pack_one. */
FP_BODY fp_pack_job
fp_scaling(double factor, fp_dtype dtype)
{
    fp_pack_job how;
    memset(&how, 0, sizeof how);
    how.scale = dtype == FP_F64 ? factor : (double)fp_round_f32((float)factor, dtype);
    how.has_scale = 1;
    return how;
}

/* FP_LIST_WIDTH elements at an aligned address; dtype is a constant. */
FP_BODY void
fp_scale_vectors(double factor, char *place, fp_dtype dtype)
{
    const size_t n = FP_LIST_WIDTH * fp_dtype_bytes(dtype) / sizeof(fp_block16);
    const fp_pack_job how = fp_scaling(factor, dtype);
    fp_block16 in[4], out[4];
    FP_UNROLL
    for (size_t k = 0; k < n; k++) {
        fp_move(&in[k], place + k * sizeof in[k], sizeof in[k]);
    }
    FP_UNROLL
    for (size_t k = 0; k < FP_LIST_WIDTH; k++) {
        fp_pack_one(&how, in, k, dtype, out, k, dtype, 1.0);
    }
    FP_UNROLL
    for (size_t k = 0; k < n; k++) {
        fp_move(place + k * sizeof out[k], &out[k], sizeof out[k]);
    }
}

FP_BODY void
fp_scale_element(double factor, char *place, fp_dtype dtype)
{
    const fp_pack_job how = fp_scaling(factor, dtype);
    uint64_t in = 0, out = 0;
    fp_move(&in, place, fp_dtype_bytes(dtype));
    fp_pack_one(&how, &in, 0, dtype, &out, 0, dtype, 1.0);
    fp_move(place, &out, fp_dtype_bytes(dtype));
}

FP_BODY void
fp_scale_thread(const fp_scale_job *job, const fp_piece *pieces, uint32_t n, uint32_t block, uint32_t thread)
{
    const int64_t at = ((int64_t)block * FP_KERNEL_THREADS + thread) * FP_LIST_WIDTH;
    const double factor = job->in_fp64 ? *(const double *)job->factor : (double)*(const float *)job->factor;
    uint32_t i = fp_find(pieces, 0, n, at);
    if (i < n && fp_covers(&pieces[i], at, at + FP_LIST_WIDTH) &&
        fp_aligned_at(&pieces[i], at, FP_VECTOR_BYTES) != NULL) {
        char *place = (char *)(uintptr_t)fp_aligned_at(&pieces[i], at, FP_VECTOR_BYTES);
#define FP_CALL(dtype) fp_scale_vectors(factor, place, dtype)
        FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
        return;
    }
    for (int64_t p = at; p < at + FP_LIST_WIDTH && p < job->end; p++) {
        i = fp_find(pieces, i, n, p);
        if (i < n && pieces[i].start <= p) {
            char *data = (char *)(uintptr_t)pieces[i].data;
            const size_t index = (size_t)(p - pieces[i].start);
#define FP_CALL(dtype) fp_scale_element(factor, data + index * fp_dtype_bytes(dtype), dtype)
            FP_FOR_DTYPE((fp_dtype)pieces[i].dtype, FP_CALL)
#undef FP_CALL
        }
    }
}

#endif
