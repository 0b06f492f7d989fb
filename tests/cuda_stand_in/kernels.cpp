// kernels.cpp -- launches: of flatparam's own kernels, as nvcc compiles them (tests/support/ptx). torch's have no stand-in here.
#include "inside.hpp"

#include <cstdlib>
#include <string>

extern "C" {
#include "cuda/fp_kernels.h"
#include "ptx/run.h"
}

using namespace stand_in;

namespace {

struct Kernel {
    std::string name;
    const ptx_entry *entry = nullptr; // of those of flatparam
};
auto &kernels = for_good<std::map<const void *, Kernel>>();

cudaError_t
launch(const void *function, dim3 grid, dim3 block, void **all, size_t shared, Stream *stream)
{
    const Kernel &kernel = kernels[function];
    if (kernel.entry == nullptr) {
        std::fprintf(stderr, "stand-in for CUDA: no stand-in for the kernel %s\n", kernel.name.c_str());
        return told(cudaErrorNotSupported);
    }
    if (block.x != FP_KERNEL_THREADS || block.y != 1 || block.z != 1 || grid.x == 0 || grid.y != 1 || grid.z != 1 ||
        shared != 0) {
        return told(cudaErrorInvalidConfiguration);
    }
    const auto *given = static_cast<const char *>(all[0]);
    const std::vector<char> arguments(given, given + kernel.entry->argument_bytes);
    put(stream, [entry = kernel.entry, blocks = grid.x, threads = block.x, arguments] {
        if (ptx_launch(entry, blocks, threads, arguments.data(), 0) != 0) {
            std::abort();
        }
    });
    return cudaSuccess;
}

} // namespace

extern "C" {

void
__cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *,
                       int *)
{
    LOCKED;
    kernels[function] = {name, ptx_find(name)};
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
cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t handle)
{
    LOCKED;
    return launch(function, grid, block, arguments, shared, stream_of(handle));
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
