/* races.h -- what races.c is told of the threads of a launch. */
#pragma once

#include "run.h"

typedef enum { PTX_READ, PTX_WRITE, PTX_ATOMIC } ptx_access;

/* By the thread. */
void ptx_accessed(const ptx_thread *self, uint64_t address, uint64_t bytes, ptx_access access);
void ptx_fence(const ptx_thread *self);

/* By the launch. */
void ptx_begin_launch(uint32_t blocks, int looks_for_races);
void ptx_begin_block(void);
void ptx_end_barrier(void); /* all threads of the block have come to it */
int ptx_end_launch(void);   /* 0, or -1: there was a race, and standard error has the first one */
