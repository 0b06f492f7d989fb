/* races.c -- whether the threads of a launch race: one writes a byte that another one reads or writes, and nothing orders
 * the two in the order in which they ran here.
 *
 * Of two threads of one block a barrier between orders what they do. Across blocks a counter does: a thread's fence and then
 * an atomic addition to it publish what the thread did before the fence, and what others of its block did before the barrier
 * before that; another thread sees it after a later addition and a fence of its own, and its block after the next barrier.
 * Source: the PTX ISA's memory consistency model (release and acquire patterns). The first address that is added to is the
 * counter, and what a block published last counts: more than that is taken for a race. */
#include "races.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fp_kernels.h"

enum { THREADS = FP_KERNEL_THREADS, PAGE = 4096, BUCKETS = 4096 };

/* An access, or none. Times are counted from 1 in a launch, barriers from 0 in a block. */
typedef struct {
    uint32_t time, block, barriers;
    uint16_t thread, is_atomic;
} event;

/* Of one byte: the last write, the last reads by two threads of the block that read it last, and by one of another block. */
typedef struct {
    event write, reads[2], elsewhere;
} history;

typedef struct page {
    uint64_t number;
    struct page *next;
    history bytes[PAGE];
} page;

static page *pages[BUCKETS], *last_page;

/* What each block has published: what its thread did before `fenced`, and the others before the barrier. */
static struct {
    uint32_t at, fenced, barriers;
    uint16_t thread;
} *published;

/* Of the threads of the current block: when the last fence was, and behind how many barriers; when the last addition to the
 * counter; what was published until `seen` is seen. */
static struct {
    uint32_t fenced, fenced_barriers, added, seen;
} threads[THREADS];
static uint64_t counter; /* its address; 0: none yet */
static uint32_t now, barriers;
static int looking, found;

void
ptx_begin_launch(uint32_t blocks, int looks_for_races)
{
    looking = looks_for_races;
    now = 0;
    counter = 0;
    found = 0;
    published = calloc(blocks, sizeof *published);
}

void
ptx_begin_block(void)
{
    barriers = 0;
    memset(threads, 0, sizeof threads);
}

void
ptx_end_barrier(void)
{
    uint32_t seen = 0;
    for (int i = 0; i < THREADS; i++) {
        seen = threads[i].seen > seen ? threads[i].seen : seen;
    }
    for (int i = 0; i < THREADS; i++) {
        threads[i].seen = seen;
    }
    barriers++;
}

int
ptx_end_launch(void)
{
    for (int i = 0; i < BUCKETS; i++) {
        while (pages[i] != NULL) {
            page *next = pages[i]->next;
            free(pages[i]);
            pages[i] = next;
        }
    }
    last_page = NULL;
    free(published);
    return found ? -1 : 0;
}

void
ptx_fence(const ptx_thread *self)
{
    typeof(*threads) *mine = &threads[self->thread];
    mine->fenced = ++now;
    mine->fenced_barriers = barriers;
    mine->seen = mine->added > mine->seen ? mine->added : mine->seen;
}

static void
added(const ptx_thread *self)
{
    threads[self->thread].added = now;
    published[self->block].at = now;
    published[self->block].fenced = threads[self->thread].fenced;
    published[self->block].barriers = threads[self->thread].fenced_barriers;
    published[self->block].thread = (uint16_t)self->thread;
}

static history *
history_of(uint64_t address)
{
    const uint64_t number = address / PAGE;
    if (last_page == NULL || last_page->number != number) {
        page **bucket = &pages[number % BUCKETS], *there = *bucket;
        while (there != NULL && there->number != number) {
            there = there->next;
        }
        if (there == NULL) {
            there = calloc(1, sizeof *there);
            there->number = number;
            there->next = *bucket;
            *bucket = there;
        }
        last_page = there;
    }
    return &last_page->bytes[address % PAGE];
}

static int
comes_before(const event *earlier, const event *event)
{
    if (earlier->block == event->block) {
        return earlier->thread == event->thread || earlier->barriers < event->barriers;
    }
    const typeof(*published) *of = &published[earlier->block];
    const int is_published =
        of->thread == earlier->thread ? earlier->time < of->fenced : earlier->barriers < of->barriers;
    return is_published && of->at < threads[event->thread].seen;
}

static void
check(const event *earlier, const event *event, const char *did)
{
    if (earlier->time == 0 || found || (earlier->is_atomic && event->is_atomic) || comes_before(earlier, event)) {
        return;
    }
    found = 1;
    fprintf(stderr, "ptx: thread %u of block %u and thread %u of block %u race: the first %s what the other one uses\n",
            earlier->thread, earlier->block, event->thread, event->block, did);
}

static void
note_read(history *of, const event *event)
{
    if (of->reads[0].time != 0 && of->reads[0].block != event->block) {
        of->elsewhere = of->reads[0];
        memset(of->reads, 0, sizeof of->reads);
    }
    if (of->reads[0].thread != event->thread) {
        of->reads[1] = of->reads[0];
    }
    of->reads[0] = *event;
}

void
ptx_accessed(const ptx_thread *self, uint64_t address, uint64_t bytes, ptx_access access)
{
    if (!looking) {
        return;
    }
    const event event = {++now, self->block, barriers, (uint16_t)self->thread, access == PTX_ATOMIC};
    for (uint64_t i = 0; i < bytes; i++) {
        history *of = history_of(address + i);
        check(&of->write, &event, "writes");
        if (access == PTX_READ) {
            note_read(of, &event);
            continue;
        }
        check(&of->reads[0], &event, "reads");
        check(&of->reads[1], &event, "reads");
        check(&of->elsewhere, &event, "reads");
        of->write = event;
    }
    if (access == PTX_ATOMIC && (counter == 0 || counter == address)) {
        counter = address;
        added(self);
    }
}
