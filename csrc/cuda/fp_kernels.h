/* cuda/fp_kernels.h -- what an accelerator's kernels are asked: packing, norms and scaling of many tensors in one launch
 * each. Pure C11: no Python.h, no torch, no CUDA. csrc/cuda/fp_kernels.cu has them for CUDA; tests run the same bodies
 * (fp_pack_body.h, fp_list_bodies.h) on the host. Sizes and positions are in elements. */
#ifndef FP_KERNELS_H
#define FP_KERNELS_H

#include <stdint.h>

#include "core/fp_dtype.h"

/* One tensor, or a part of one. Memory is aligned to the dtype. */
typedef struct {
    const void *data; /* NULL: zeros; when accumulating, nothing */
    int64_t start;    /* first element, counted in the flat buffer or, in a list, by fp_list_start() */
    int64_t numel;
    uint32_t first_dim; /* among the dimensions of the table */
    uint16_t ndim;      /* 0: numel contiguous elements; else numel < 2^32 */
    uint16_t dtype;     /* fp_dtype */
} fp_piece;

/* A dimension of a piece that is not contiguous; outermost first, in the order in which the flat buffer has them. */
typedef struct {
    int64_t numel, stride;
} fp_piece_dim;

/* n pieces, sorted by start and without overlaps, and behind them the dimensions of all of them. */
typedef struct {
    const void *memory;
    size_t bytes; /* of it; at most argument_bytes: it goes along with the launch, and may change after it */
    uint32_t n;
} fp_table;

/* flat[begin, end) = or += the pieces, as core/fp_pack.h says; zeros where there is none. Besides: the
 * source * before, rounded to the source's dtype, comes before the cast. */
typedef struct {
    void *flat;
    int64_t begin, end;
    double before;
    double scale;
    int has_scale, accumulate;
    fp_dtype dtype;
} fp_pack_job;

/* *result = the sum of the squares, or the largest magnitude, of a list of contiguous pieces: NaN if there is one. Added up in
 * fp64, in an order that sizes and alignments alone decide. */
typedef struct {
    int64_t end;      /* of the last piece */
    double *partials; /* room for fp_norm_blocks(end), and 4 bytes more */
    void *result;     /* fp32 or fp64 */
    int is_max;
    int in_fp64;
} fp_norm_job;

/* Each piece of a list *= *factor, rounded to its dtype before. */
typedef struct {
    int64_t end;
    const void *factor; /* fp32 or fp64 */
    int in_fp64;
} fp_scale_job;

enum {
    FP_KERNEL_THREADS = 256, /* of a block */
    FP_LIST_WIDTH = 8,       /* elements of a list that a thread takes at once */
    FP_NORM_BLOCKS = 1024,   /* at most */
};

/* Where a piece of a list may start after `end`, so that elements at multiples of FP_LIST_WIDTH are 16-byte aligned. */
static inline int64_t
fp_list_start(int64_t end, const void *data, fp_dtype dtype)
{
    const uint64_t wanted = (uintptr_t)data / fp_dtype_bytes(dtype);
    return end + (int64_t)((wanted - (uint64_t)end) % FP_LIST_WIDTH);
}

/* Elements of a list that a block of the norm's kernel takes, and how many blocks there are then. */
FP_HD static inline int64_t
fp_norm_share(int64_t end)
{
    const int64_t step = FP_KERNEL_THREADS * FP_LIST_WIDTH;
    return ((end / FP_NORM_BLOCKS) / step + 1) * step;
}

FP_HD static inline uint32_t
fp_norm_blocks(int64_t end)
{
    return (uint32_t)((end + fp_norm_share(end) - 1) / fp_norm_share(end));
}

#define FP_CAPTURE_MODE_RELAXED 2 /* every call is allowed */

/* The kernels of one type of device. pack, norm and scale queue one launch on a stream of the current device, wait for nothing,
 * and return 0 or a number that message() explains. */
typedef struct {
    size_t argument_bytes;    /* of a table that goes along with a launch */
    int (*works)(int device); /* whether the current device, of this index, can run them */
    int (*pack)(const fp_pack_job *job, const fp_table *table, void *stream);
    int (*norm)(const fp_norm_job *job, const fp_table *table, void *stream);
    int (*scale)(const fp_scale_job *job, const fp_table *table, void *stream);
    const char *(*message)(int error);

    int (*set_capture_mode)(int mode); /* which calls of this thread are allowed while another one captures a graph, a
                                        * cudaStreamCaptureMode: the one before */
    uint64_t (*capture)(void *stream); /* which graph is captured on a stream of CUDA's; 0: none */
} fp_kernels;

extern const fp_kernels fp_cuda_kernels; /* where they are compiled in */

#endif
