/* cuda/fp_kernels.h -- the interface of an accelerator's kernels: packing, norms and scaling of many tensors in one launch
 * each. Pure C11: no Python.h, no torch, no CUDA. csrc/cuda/fp_kernels.cu has the kernels for CUDA; tests run the same bodies
 * (fp_pack_body.h, fp_list_bodies.h) on the host. tensor/fp_launch.cpp is the caller: it owns all memory, and keeps it until
 * the device has done the work. Sizes and positions are in ELEMENTS. */
#ifndef FP_KERNELS_H
#define FP_KERNELS_H

#include <stdint.h>

#include "core/fp_dtype.h"

/* A piece: one tensor, or a part of one, in memory of the device that is aligned to the dtype. Pieces lie either in a flat
 * buffer, which they fill (packing), or in a list, which has no memory and only numbers their elements (norms, scaling). */
typedef struct {
    const void *data; /* NULL: zeros; when accumulating, nothing */
    int64_t start;    /* position of the first element: in the flat buffer, or in a list by fp_list_start() */
    int64_t numel;
    uint32_t first_dim; /* index of its first dimension in the table */
    uint16_t ndim;      /* 0: the elements are contiguous; else numel < 2^32, and so many dimensions */
    uint16_t dtype;     /* fp_dtype */
} fp_piece;

/* A dimension of a piece that is not contiguous; outermost first, in the order in which the flat buffer has them. */
typedef struct {
    int64_t numel, stride;
} fp_piece_dim;

/* The argument of a launch: n pieces, sorted by start and without overlaps, and behind them the dimensions of all pieces. */
typedef struct {
    const void *memory; /* on the host; borrowed for the launch, which copies it */
    size_t bytes;       /* of memory; at most fp_kernels.argument_bytes */
    uint32_t n;
} fp_table;

/* flat[begin, end) = or += the pieces, with the arithmetic of fp_pack_opts (core/fp_pack.h), and zeros where there is no piece.
 * Before the cast a source is multiplied by `before` and rounded to its own dtype. */
typedef struct {
    void *flat; /* element 0 of the flat buffer, on the device */
    int64_t begin, end;
    double before; /* 1.0: no multiplication */
    double scale;
    int has_scale, accumulate;
    fp_dtype dtype; /* of the flat buffer */
} fp_pack_job;

/* *result = the sum of the squares (is_max: the largest magnitude) of a list of contiguous pieces; NaN if an element is NaN.
 * It is added up in fp64. The order of the additions depends on sizes and alignments alone, so equal data give equal bits. */
typedef struct {
    int64_t end;      /* the end of the last piece */
    double *partials; /* memory of the device: fp_norm_blocks(end) doubles, and 4 bytes more */
    void *result;     /* one element on the device: fp64 if in_fp64, else fp32 */
    int is_max;
    int in_fp64;
} fp_norm_job;

/* Each piece of a list *= *factor, which is rounded to the piece's dtype first. */
typedef struct {
    int64_t end;        /* the end of the last piece */
    const void *factor; /* one element on the device: fp64 if in_fp64, else fp32 */
    int in_fp64;
} fp_scale_job;

enum {
    FP_KERNEL_THREADS = 256, /* threads of a block */
    FP_LIST_WIDTH = 8,       /* elements of a list that a thread takes at once */
    FP_NORM_BLOCKS = 1024,   /* blocks of the norm's kernel, at most */
};

/* The least position from `end` on at which a piece of a list may start, so that elements at multiples of FP_LIST_WIDTH are
 * 16-byte aligned. */
static inline int64_t
fp_list_start(int64_t end, const void *data, fp_dtype dtype)
{
    const uint64_t wanted = (uintptr_t)data / fp_dtype_bytes(dtype);
    return end + (int64_t)((wanted - (uint64_t)end) % FP_LIST_WIDTH);
}

/* The elements of a list that a block of the norm's kernel takes; fp_norm_blocks: the number of blocks. */
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

/* The kernels of one type of device. pack, norm and scale queue one launch on a stream of the current device and do not wait.
 * They return 0, or the number of an error that message() explains; then no kernel is queued. Any thread may call them. */
typedef struct {
    size_t argument_bytes;    /* the most bytes that a table may have */
    int (*works)(int device); /* 1: the current device, which has this index, can run the kernels; 0 */
    int (*pack)(const fp_pack_job *job, const fp_table *table, void *stream);
    int (*norm)(const fp_norm_job *job, const fp_table *table, void *stream);
    int (*scale)(const fp_scale_job *job, const fp_table *table, void *stream);
    const char *(*message)(int error);

    /* Set the calls that are allowed in this thread while another thread captures a graph, a cudaStreamCaptureMode. Returns
     * the mode before. */
    int (*set_capture_mode)(int mode);
    /* The number of the graph that is captured on a stream; 0: none; UINT64_MAX: a capture that an error has spoiled. */
    uint64_t (*capture)(void *stream);
} fp_kernels;

/* The kernels for CUDA. Weak: a build without nvcc does not define it, and its address is then null. So the objects of all
 * other sources serve both builds. */
extern const fp_kernels fp_cuda_kernels __attribute__((weak));

#endif
