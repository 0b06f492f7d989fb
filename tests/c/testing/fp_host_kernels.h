/* fp_host_kernels.h -- the bodies of the accelerator's kernels run on the host, all blocks and threads in turn. */
#pragma once

#include "cuda/fp_list_bodies.h"

static inline void
fp_host_pack(const fp_pack_job *job, const fp_piece *pieces, const fp_index *index)
{
    for (uint32_t block = 0; block < index->blocks; block++) {
        for (uint32_t thread = 0; thread < FP_KERNEL_THREADS; thread++) {
#define FP_CALL(to) fp_pack_thread(job, pieces, index, block, thread, to)
            FP_FOR_DTYPE(job->dtype, FP_CALL)
#undef FP_CALL
        }
    }
}

/* The tree that a block's threads climb together. */
static inline double
fp_host_folded(double *sums, int is_max)
{
    for (uint32_t half = FP_KERNEL_THREADS / 2; half > 0; half /= 2) {
        for (uint32_t thread = 0; thread < FP_KERNEL_THREADS; thread++) {
            fp_norm_fold(sums, half, thread, is_max);
        }
    }
    return sums[0];
}

static inline void
fp_host_norm(const fp_norm_job *job, const fp_piece *pieces, const fp_index *index)
{
    double sums[FP_KERNEL_THREADS];
    for (uint32_t block = 0; block < index->blocks; block++) {
        for (uint32_t thread = 0; thread < FP_KERNEL_THREADS; thread++) {
            sums[thread] = fp_norm_thread(job, pieces, index, block, thread, job->is_max);
        }
        job->partials[block] = fp_host_folded(sums, job->is_max);
    }
    for (uint32_t thread = 0; thread < FP_KERNEL_THREADS; thread++) {
        sums[thread] = fp_norm_gather(job, index->blocks, thread);
    }
    fp_norm_finish(job, fp_host_folded(sums, job->is_max));
}

static inline void
fp_host_scale(const fp_scale_job *job, const fp_piece *pieces, const fp_index *index)
{
    for (uint32_t block = 0; block < index->blocks; block++) {
        for (uint32_t thread = 0; thread < FP_KERNEL_THREADS; thread++) {
            fp_scale_thread(job, pieces, index, block, thread);
        }
    }
}
