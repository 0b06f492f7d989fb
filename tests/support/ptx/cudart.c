/* cudart.c -- libcudart for csrc/cuda/fp_kernels.cu: launches. One runs its kernel, as translate.py has made C of it,
 * before it returns. Blocks and threads take turns: in their order, and at every second launch the other way round. */
#include <ucontext.h>

#include "cuda/fp_kernels.h"
#include "ptx.h"

typedef struct {
    unsigned x, y, z;
} dim3;

enum { SUCCESS = 0, INVALID_VALUE = 1 }; /* cudaError_t */

enum { MOST_KERNELS = 64, MOST_THREADS = FP_KERNEL_THREADS, STACK = 64 << 10 };

static struct {
    const void *function;
    const ptx_entry *entry;
} kernels[MOST_KERNELS];
static int n_kernels, launches;

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

/* The threads of a block that meet at barriers: each has a stack of its own. */
static struct {
    ucontext_t context;
    ptx_thread thread;
    int ended;
    unsigned char stack[STACK];
} fibers[MOST_THREADS];
static ucontext_t scheduler;
static const ptx_entry *running;
static int current;

static void
at_barrier(void)
{
    swapcontext(&fibers[current].context, &scheduler);
}

static void
fiber_main(void)
{
    running->kernel(&fibers[current].thread);
    fibers[current].ended = 1;
    at_barrier();
}

/* Run a block to its end: all threads to a barrier, then all to the next one. */
static void
run_fibers(const ptx_entry *entry, ptx_thread thread, int n, int backwards)
{
    int ended = 0;
    running = entry;
    for (int i = 0; i < n; i++) {
        thread.thread = (uint32_t)i;
        fibers[i].thread = thread;
        fibers[i].ended = 0;
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = fibers[i].stack;
        fibers[i].context.uc_stack.ss_size = STACK;
        makecontext(&fibers[i].context, fiber_main, 0);
    }
    while (ended == 0) {
        for (int i = 0; i < n; i++) {
            current = backwards ? n - 1 - i : i;
            swapcontext(&scheduler, &fibers[current].context);
            ended += fibers[current].ended;
        }
    }
    if (ended != n) {
        fail("of the threads of a block some ended, and the others are at a barrier");
    }
}

int
cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t dynamic, void *stream)
{
    const ptx_entry *entry = entry_of(function);
    if (entry == NULL || grid.x == 0 || block.x == 0 || block.x > MOST_THREADS || block.y != 1 || block.z != 1 ||
        grid.y != 1 || grid.z != 1 || dynamic != 0) {
        return INVALID_VALUE;
    }
    const int backwards = launches++ % 2;
    unsigned char *copy = aligned_alloc(64, (entry->argument_bytes + 63) / 64 * 64);
    unsigned char *shared = aligned_alloc(64, (entry->shared_bytes + 64) / 64 * 64);
    memcpy(copy, arguments[0], entry->argument_bytes);
    for (unsigned i = 0; i < grid.x; i++) {
        ptx_thread thread = {.arguments = copy, .shared = shared, .blocks = grid.x, .barrier = at_barrier};
        thread.block = backwards ? grid.x - 1 - i : i;
        memset(shared, 0xA5, entry->shared_bytes);
        if (entry->shared_bytes != 0) {
            run_fibers(entry, thread, (int)block.x, backwards);
        }
        else {
            for (unsigned k = 0; k < block.x; k++) {
                thread.thread = backwards ? block.x - 1 - k : k;
                entry->kernel(&thread);
            }
        }
    }
    free(shared);
    free(copy);
    return SUCCESS;
}

void
__cudaRegisterFunction(void **module, const char *function, char *device_function, const char *name, int threads,
                       void *tid, void *bid, dim3 *block, dim3 *grid, int *warp)
{
    for (const ptx_entry *entry = ptx_entries; entry->name != NULL; entry++) {
        if (strcmp(entry->name, name) == 0) {
            if (n_kernels == MOST_KERNELS) {
                fail("too many kernels");
            }
            kernels[n_kernels].function = function;
            kernels[n_kernels++].entry = entry;
        }
    }
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
