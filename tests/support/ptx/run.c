/* run.c -- a launch: its blocks, and the threads of each. */
#include "run.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "cuda/fp_kernels.h"
#include "races.h"

enum { MOST_THREADS = FP_KERNEL_THREADS, STACK = 64 << 10 };

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* The threads of a block that meet at barriers: each has a stack of its own. */
static struct {
    ucontext_t context;
    ptx_thread thread;
    int ended;
    unsigned char stack[STACK];
} fibers[MOST_THREADS];
static ucontext_t scheduler;
static const ptx_entry *running;
static uint32_t current;

const ptx_entry *
ptx_find(const char *name)
{
    const ptx_entry *entry = ptx_entries;
    while (entry->name != NULL && strcmp(entry->name, name) != 0) {
        entry++;
    }
    return entry->name != NULL ? entry : NULL;
}

void
ptx_barrier(void)
{
    swapcontext(&fibers[current].context, &scheduler);
}

static void
fiber_main(void)
{
    running->kernel(&fibers[current].thread);
    fibers[current].ended = 1;
    ptx_barrier();
}

/* All threads to a barrier, then all to the next one, to their end. */
static int
run_fibers(const ptx_entry *entry, ptx_thread thread, uint32_t n, int backwards)
{
    uint32_t ended = 0;
    running = entry;
    for (uint32_t i = 0; i < n; i++) {
        thread.thread = i;
        fibers[i].thread = thread;
        fibers[i].ended = 0;
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = fibers[i].stack;
        fibers[i].context.uc_stack.ss_size = STACK;
        makecontext(&fibers[i].context, fiber_main, 0);
    }
    while (ended == 0) {
        for (uint32_t i = 0; i < n; i++) {
            current = backwards ? n - 1 - i : i;
            swapcontext(&scheduler, &fibers[current].context);
            ended += (uint32_t)fibers[current].ended;
        }
        ptx_end_barrier();
    }
    if (ended != n) {
        fprintf(stderr, "ptx: of the threads of block %u some ended, and the others are at a barrier\n", thread.block);
        return -1;
    }
    return 0;
}

static void
run_in_turn(const ptx_entry *entry, ptx_thread thread, uint32_t n, int backwards)
{
    for (uint32_t i = 0; i < n; i++) {
        thread.thread = backwards ? n - 1 - i : i;
        entry->kernel(&thread);
    }
}

int
ptx_launch(const ptx_entry *entry, uint32_t blocks, uint32_t threads, const void *arguments, int looks_for_races)
{
    static int launches;
    if (threads > MOST_THREADS) {
        fprintf(stderr, "ptx: a launch of %u threads in a block, of at most %d\n", threads, MOST_THREADS);
        return -1;
    }
    pthread_mutex_lock(&one_at_a_time);
    const int backwards = launches++ % 2;
    unsigned char *copy = aligned_alloc(64, (entry->argument_bytes + 63) / 64 * 64);
    const size_t shared_bytes = (entry->shared_bytes + 64) / 64 * 64;
    unsigned char *shared = aligned_alloc(64, blocks * shared_bytes);
    ptx_thread thread = {.arguments = copy, .blocks = blocks};
    int status = 0;
    memcpy(copy, arguments, entry->argument_bytes);
    memset(shared, 0xA5, blocks * shared_bytes);
    ptx_begin_launch(blocks, looks_for_races);
    for (uint32_t i = 0; i < blocks && status == 0; i++) {
        thread.block = backwards ? blocks - 1 - i : i;
        thread.shared = shared + i * shared_bytes;
        ptx_begin_block();
        if (entry->has_barriers) {
            status = run_fibers(entry, thread, threads, backwards);
        }
        else {
            run_in_turn(entry, thread, threads, backwards);
        }
    }
    status |= ptx_end_launch();
    free(shared);
    free(copy);
    pthread_mutex_unlock(&one_at_a_time);
    return status;
}
