/* simulation/heap.h -- memory that the processes of a run have in common, at the same addresses. seams.c includes it once.
 *
 * What a mutex protects is as common as the mutex. So a thread that holds a mutex in common memory gets common memory from
 * malloc(), and C++ that is written for threads works across processes. It must keep two rules: the common data have no
 * pointers to memory of one process, and no counted references to objects from before the fork, whose counts are not common.
 *
 * There is no lock: one process runs at a time. */
#ifndef FLATPARAM_SIMULATION_HEAP_H
#define FLATPARAM_SIMULATION_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HEAD = 64 /* bytes before a piece, whose alignment is that, too */, CLASSES = 48 };
#define HEAP_SIZE ((size_t)8 << 30) /* the kernel gives pages that are used alone */

/* libc's own */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *memory, size_t size);
void __libc_free(void *memory);

struct piece {
    int class;          /* it has 2^class bytes */
    struct piece *next; /* of the free ones of its class */
};

struct heap {
    size_t used;
    struct piece *free[CLASSES];
};

static struct heap *heap; /* at the begin of the memory; NULL: ranks are no processes */
static __thread int shares __attribute__((tls_model("initial-exec"))); /* mutexes that this thread holds */

static void
make_heap(void)
{
    void *found = mmap(NULL, HEAP_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) {
        abort();
    }
    heap = found;
    heap->used = 4096;
}

static bool
is_common(const void *memory)
{
    return heap != NULL && (size_t)((const char *)memory - (const char *)heap) < HEAP_SIZE;
}

static bool
gives_common(void)
{
    return heap != NULL && shares > 0;
}

static void *
take_piece(size_t size)
{
    const int class = 64 - __builtin_clzl(size + HEAD - 1);
    struct piece *found = heap->free[class];
    if (found != NULL) {
        heap->free[class] = found->next;
    }
    else if (((size_t)1 << class) > HEAP_SIZE - heap->used) {
        abort();
    }
    else {
        found = (struct piece *)((char *)heap + heap->used);
        heap->used += (size_t)1 << class;
    }
    found->class = class;
    return (char *)found + HEAD;
}

static struct piece *
piece_of(void *memory)
{
    return (struct piece *)((char *)memory - HEAD);
}

void *
malloc(size_t size)
{
    return gives_common() ? take_piece(size) : __libc_malloc(size);
}

void
free(void *memory)
{
    if (!is_common(memory)) {
        __libc_free(memory);
        return;
    }
    struct piece *const piece = piece_of(memory);
    piece->next = heap->free[piece->class];
    heap->free[piece->class] = piece;
}

void *
calloc(size_t n, size_t size)
{
    return gives_common() ? memset(take_piece(n * size), 0, n * size) : __libc_calloc(n, size);
}

void *
realloc(void *memory, size_t size)
{
    if (!is_common(memory)) {
        return memory == NULL ? malloc(size) : __libc_realloc(memory, size);
    }
    const size_t had = ((size_t)1 << piece_of(memory)->class) - HEAD;
    void *const found = malloc(size);
    if (found != NULL) {
        memcpy(found, memory, size < had ? size : had);
        free(memory);
    }
    return found;
}

#endif
