/* run.h -- kernels that translate.py has made C of, and their launches. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* What a thread of a kernel knows. */
typedef struct {
    const unsigned char *arguments;
    unsigned char *shared;
    uint32_t block, blocks, thread;
} ptx_thread;

/* A kernel of the module; the last of ptx_entries has no name. */
typedef struct {
    const char *name;
    void (*kernel)(const ptx_thread *);
    size_t argument_bytes, shared_bytes;
    int has_barriers;
} ptx_entry;

extern const ptx_entry ptx_entries[];

/* The kernel of this name, or NULL. */
const ptx_entry *ptx_find(const char *name);

/* Run a launch to its end. Blocks come one after the other, and so do the threads of one, up to a barrier: in their order, and at
 * every second launch the other way round. arguments: entry->argument_bytes. Returns 0, or -1, and standard error says why:
 * threads do not all come to a barrier or, where races are looked for (races.c), race; looking takes ten times as long.
 * Launches of several threads wait for each other. */
int ptx_launch(const ptx_entry *entry, uint32_t blocks, uint32_t threads, const void *arguments, int looks_for_races);

void ptx_barrier(void);
