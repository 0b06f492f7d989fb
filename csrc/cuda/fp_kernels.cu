// cuda/fp_kernels.cu -- the kernels for CUDA, and their launch on a stream. The work of one thread is in fp_pack_body.h and
// fp_list_bodies.h.
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstring>

extern "C" {
#include "cuda/fp_list_bodies.h"
}

namespace {

// The arguments of a launch: a job, the index, and the table. Kernels take 4 KiB of arguments, from CUDA 12.1 on 32,764 bytes.
template <class Job, size_t BYTES> struct Arguments {
    Job job;
    fp_index index;
    alignas(16) unsigned char table[BYTES];

    __device__ const fp_piece *pieces() const
    {
        return reinterpret_cast<const fp_piece *>(table);
    }
};

constexpr size_t other_bytes = sizeof(fp_pack_job) + sizeof(fp_index) + 32,
                 small_bytes = (4096 - other_bytes) / 16 * 16,
                 large_bytes = CUDART_VERSION >= 12010 ? (32764 - other_bytes) / 16 * 16 : small_bytes;
static_assert(sizeof(Arguments<fp_pack_job, small_bytes>) <= 4096);
static_assert(sizeof(Arguments<fp_pack_job, large_bytes>) <= (CUDART_VERSION >= 12010 ? 32764 : 4096));

template <fp_dtype to, size_t BYTES>
__global__ void
__launch_bounds__(FP_KERNEL_THREADS, 4) pack(const __grid_constant__ Arguments<fp_pack_job, BYTES> asked)
{
    const fp_pack_job job = asked.job;
    fp_pack_thread(&job, asked.pieces(), &asked.index, blockIdx.x, threadIdx.x, to);
}

__device__ void
fold(double *sums, int is_max)
{
    for (uint32_t half = FP_KERNEL_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        fp_norm_fold(sums, half, threadIdx.x, is_max);
    }
}

// The block that ends last joins the partial results of all blocks, in the order of the blocks. It is found by a counter behind
// the partial results.
template <size_t BYTES>
__global__ void
__launch_bounds__(FP_KERNEL_THREADS) norm(const __grid_constant__ Arguments<fp_norm_job, BYTES> asked)
{
    __shared__ double sums[FP_KERNEL_THREADS];
    __shared__ bool is_last;
    const fp_norm_job job = asked.job;
    sums[threadIdx.x] = job.is_max ? fp_norm_thread(&job, asked.pieces(), &asked.index, blockIdx.x, threadIdx.x, 1)
                                   : fp_norm_thread(&job, asked.pieces(), &asked.index, blockIdx.x, threadIdx.x, 0);
    fold(sums, job.is_max);
    if (threadIdx.x == 0) {
        job.partials[blockIdx.x] = sums[0];
        __threadfence();
        is_last = atomicAdd(reinterpret_cast<unsigned *>(job.partials + gridDim.x), 1U) == gridDim.x - 1;
        __threadfence(); // before the barrier, by which the other threads see, too, what the blocks before have written
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    sums[threadIdx.x] = fp_norm_gather(&job, gridDim.x, threadIdx.x);
    fold(sums, job.is_max);
    if (threadIdx.x == 0) {
        fp_norm_finish(&job, sums[0]);
    }
}

template <size_t BYTES>
__global__ void
__launch_bounds__(FP_KERNEL_THREADS) scale(const __grid_constant__ Arguments<fp_scale_job, BYTES> asked)
{
    const fp_scale_job job = asked.job;
    fp_scale_thread(&job, asked.pieces(), &asked.index, blockIdx.x, threadIdx.x);
}

template <class Job, size_t BYTES>
cudaError_t
launch_one(void (*kernel)(Arguments<Job, BYTES>), const Job &job, const fp_index &index, const fp_table &table,
           cudaStream_t stream)
{
    Arguments<Job, BYTES> arguments; // the kernel does not read the bytes after the table
    arguments.job = job;
    arguments.index = index;
    std::memcpy(arguments.table, table.memory, table.bytes);
    void *all[] = {&arguments};
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(index.blocks), dim3(FP_KERNEL_THREADS), all, 0,
                            stream);
}

template <class Job>
int
launch(void (*small)(Arguments<Job, small_bytes>), void (*large)(Arguments<Job, large_bytes>), const Job &job,
       const fp_index &index, const fp_table &table, void *stream_handle)
{
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    if (index.blocks == 0) {
        return cudaSuccess;
    }
    if (table.bytes > large_bytes) {
        return cudaErrorInvalidValue;
    }
    return table.bytes <= small_bytes ? launch_one(small, job, index, table, stream)
                                      : launch_one(large, job, index, table, stream);
}

template <fp_dtype to>
int
launch_pack(const fp_pack_job &job, const fp_table &table, void *stream)
{
    return launch<fp_pack_job>(pack<to, small_bytes>, pack<to, large_bytes>, job, fp_pack_index(&job, &table), table,
                               stream);
}

int
pack_any(const fp_pack_job *job, const fp_table *table, void *stream)
{
    switch (job->dtype) {
        case FP_F64:
            return launch_pack<FP_F64>(*job, *table, stream);
        case FP_F32:
            return launch_pack<FP_F32>(*job, *table, stream);
        case FP_BF16:
            return launch_pack<FP_BF16>(*job, *table, stream);
        case FP_F16:
            return launch_pack<FP_F16>(*job, *table, stream);
    }
    return cudaErrorInvalidValue;
}

int
norm_any(const fp_norm_job *job, const fp_table *table, void *stream)
{
    const fp_index index = fp_norm_index(job, table);
    const cudaError_t error =
        cudaMemsetAsync(job->partials + index.blocks, 0, sizeof(unsigned), static_cast<cudaStream_t>(stream));
    return error != cudaSuccess
               ? error
               : launch<fp_norm_job>(norm<small_bytes>, norm<large_bytes>, *job, index, *table, stream);
}

int
scale_any(const fp_scale_job *job, const fp_table *table, void *stream)
{
    return launch<fp_scale_job>(scale<small_bytes>, scale<large_bytes>, *job, fp_scale_index(job, table), *table,
                                stream);
}

// CUDA is asked once a device. A device has no kernels if it is older than all architectures for which they were compiled.
int
works(int device)
{
    static std::array<std::atomic<int>, 64> known; // 0: not asked yet
    if (device < 0 || static_cast<size_t>(device) >= known.size()) {
        return 0;
    }
    if (known[device] == 0) {
        cudaFuncAttributes attributes;
        const cudaError_t error =
            cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(scale<small_bytes>));
        known[device] = error == cudaSuccess ? 1 : -1;
        cudaGetLastError(); // so that torch does not find the error
    }
    return known[device] > 0;
}

const char *
message(int error)
{
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// An error while a graph is captured spoils the capture: CUDA has no number for it any more.
uint64_t
capture(void *stream)
{
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;
    if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &number) != cudaSuccess) {
        cudaGetLastError(); // so that torch does not find the error
    }
    return status == cudaStreamCaptureStatusNone ? 0 : status == cudaStreamCaptureStatusActive ? number : UINT64_MAX;
}

static_assert(FP_CAPTURE_MODE_RELAXED == cudaStreamCaptureModeRelaxed);

int
set_capture_mode(int number)
{
    auto mode = static_cast<cudaStreamCaptureMode>(number);
    if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) {
        cudaGetLastError(); // so that torch does not find the error
    }
    return mode;
}

} // namespace

extern "C" const fp_kernels fp_cuda_kernels = {.argument_bytes = large_bytes,
                                               .works = works,
                                               .pack = pack_any,
                                               .norm = norm_any,
                                               .scale = scale_any,
                                               .message = message,
                                               .set_capture_mode = set_capture_mode,
                                               .capture = capture};
