// kernels.cpp -- launches: of flatparam's own kernels, which are run by their bodies on the host. torch's have no stand-in here.
#include "inside.hpp"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

extern "C" {
#include "testing/fp_host_kernels.h"
}

using namespace stand_in;

namespace {

struct Kernel {
    std::string name;
    size_t bytes = 0; // of its table; 0: not one of ours
};
auto &kernels = for_good<std::map<const void *, Kernel>>();

// As in csrc/cuda/fp_kernels.cu.
template <class Job> struct Arguments {
    Job job;
    fp_index index;
    alignas(16) unsigned char table[32752];
};

// A copy of what a launch was given.
template <class Job>
std::shared_ptr<Arguments<Job>>
arguments_of(const Kernel &kernel, void **all)
{
    auto copy = std::make_shared<Arguments<Job>>();
    std::memcpy(static_cast<void *>(copy.get()), all[0], offsetof(Arguments<Job>, table) + kernel.bytes);
    return copy;
}

void
run(const fp_pack_job &job, const fp_piece *pieces, const fp_index &index)
{
    fp_host_pack(&job, pieces, &index);
}

void
run(const fp_norm_job &job, const fp_piece *pieces, const fp_index &index)
{
    if (*reinterpret_cast<unsigned *>(job.partials + index.blocks) != 0) {
        throw std::runtime_error("the counter of the norm's kernel was not zeroed");
    }
    fp_host_norm(&job, pieces, &index);
}

void
run(const fp_scale_job &job, const fp_piece *pieces, const fp_index &index)
{
    fp_host_scale(&job, pieces, &index);
}

// Queue a launch: of as many blocks as its index is for, or of none.
template <class Job>
cudaError_t
queued(const Kernel &kernel, void **all, uint32_t blocks, Stream *stream)
{
    auto asked = arguments_of<Job>(kernel, all);
    if (blocks != asked->index.blocks) {
        return told(cudaErrorInvalidConfiguration);
    }
    put(stream, [asked] { run(asked->job, reinterpret_cast<const fp_piece *>(asked->table), asked->index); });
    return cudaSuccess;
}

cudaError_t
launch(const void *function, dim3 grid, dim3 block, void **all, Stream *stream)
{
    const Kernel &kernel = kernels[function];
    if (kernel.bytes == 0) {
        std::fprintf(stderr, "stand-in for CUDA: no stand-in for the kernel %s\n", kernel.name.c_str());
        return told(cudaErrorNotSupported);
    }
    if (block.x != FP_KERNEL_THREADS || block.y != 1 || block.z != 1 || grid.y != 1 || grid.z != 1) {
        return told(cudaErrorInvalidConfiguration);
    }
    const auto is = [&](const char *part) { return kernel.name.find(part) != std::string::npos; };
    if (is("4packI")) {
        return queued<fp_pack_job>(kernel, all, grid.x, stream);
    }
    if (is("4normI")) {
        return queued<fp_norm_job>(kernel, all, grid.x, stream);
    }
    return queued<fp_scale_job>(kernel, all, grid.x, stream);
}

} // namespace

extern "C" {

void
__cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *,
                       int *)
{
    LOCKED;
    Kernel &kernel = kernels[function];
    kernel.name = name;
    if (kernel.name.find("ArgumentsI") != std::string::npos && kernel.name.find("fp_") != std::string::npos) {
        kernel.bytes = size_t(std::atol(kernel.name.c_str() + kernel.name.find("Lm") + 2));
    }
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
static thread_local Configuration configuration;

unsigned
__cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    configuration = {grid, block, shared, stream};
    return 0;
}

cudaError_t
__cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *static_cast<cudaStream_t *>(stream) = configuration.stream;
    return cudaSuccess;
}

cudaError_t
__cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}

cudaError_t
cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t, cudaStream_t handle)
{
    LOCKED;
    return launch(function, grid, block, arguments, stream_of(handle));
}

cudaError_t
__cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, block, arguments, shared, stream);
}

cudaError_t
cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                            cudaStream_t stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t
cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                            config->stream);
}

cudaError_t
cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *)
{
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t
cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t)
{
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t
cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned)
{
    *blocks = 2;
    return cudaSuccess;
}

} // extern "C"
