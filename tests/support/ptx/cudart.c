/* cudart.c -- libcudart for csrc/cuda/fp_kernels.cu: launches. One runs its kernel, as translate.py has made C of it,
 * before it returns. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fp_kernels.h"
#include "run.h"

typedef struct {
    unsigned x, y, z;
} dim3;

enum { SUCCESS = 0, INVALID_VALUE = 1, LAUNCH_FAILURE = 719 }; /* cudaError_t */

enum { MOST_KERNELS = 64 };

static struct {
    const void *function;
    const ptx_entry *entry;
} kernels[MOST_KERNELS];
static int n_kernels;

static void
fail(const char *why)
{
    fprintf(stderr, "ptx: %s\n", why);
    abort();
}

static const ptx_entry *
entry_of(const void *function)
{
    for (int i = 0; i < n_kernels; i++) {
        if (kernels[i].function == function) {
            return kernels[i].entry;
        }
    }
    return NULL;
}

int
cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t dynamic, void *stream)
{
    const ptx_entry *entry = entry_of(function);
    if (entry == NULL || grid.x == 0 || block.x == 0 || block.y != 1 || block.z != 1 || grid.y != 1 || grid.z != 1 ||
        dynamic != 0) {
        return INVALID_VALUE;
    }
    return ptx_launch(entry, grid.x, block.x, arguments[0], 1) == 0 ? SUCCESS : LAUNCH_FAILURE;
}

void
__cudaRegisterFunction(void **module, const char *function, char *device_function, const char *name, int threads,
                       void *tid, void *bid, dim3 *block, dim3 *grid, int *warp)
{
    if (n_kernels == MOST_KERNELS) {
        fail("too many kernels");
    }
    kernels[n_kernels].function = function;
    kernels[n_kernels++].entry = ptx_find(name);
}

void **
__cudaRegisterFatBinary(void *module)
{
    return NULL;
}

void
__cudaRegisterFatBinaryEnd(void **module)
{
}

void
__cudaUnregisterFatBinary(void **module)
{
}

int
cudaMemsetAsync(void *memory, int value, size_t bytes, void *stream)
{
    memset(memory, value, bytes);
    return SUCCESS;
}

const fp_kernels *
compiled_kernels(void)
{
    return &fp_cuda_kernels;
}

/* What fp_kernels.cu refers to, and tests of kernels do not call. */
#define NOT_CALLED(name)                                                                                               \
    void name(void)                                                                                                    \
    {                                                                                                                  \
        fail("there is no " #name);                                                                                    \
    }

NOT_CALLED(__cudaGetKernel)
NOT_CALLED(__cudaLaunchKernel)
NOT_CALLED(__cudaPopCallConfiguration)
NOT_CALLED(cudaFuncGetAttributes)
NOT_CALLED(cudaGetErrorString)
NOT_CALLED(cudaGetLastError)
NOT_CALLED(cudaStreamGetCaptureInfo)
NOT_CALLED(cudaStreamGetCaptureInfo_v2)
NOT_CALLED(cudaThreadExchangeStreamCaptureMode)
