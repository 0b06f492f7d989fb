/* core/fp_atomic.c -- the least shards that cut no block.
 *
 * With shards of a given length, the first possible place of each parameter is the best one: parameters that can follow a
 * parameter that ends later can also follow one that ends earlier, behind more padding. So a length is tried by one walk
 * over the parameters. A walk that fails also finds the least longer length with which one of its decisions would differ.
 * With all lengths in between the walk would fail in the same way, so they are not tried. */
#include "core/fp_atomic.h"

/* The first multiple of unit (>= 1) that is not less than value (>= 0). */
static int64_t
round_up(int64_t value, int64_t unit)
{
    return value + (unit - value % unit) % unit;
}

/* The least common multiple, or 0 if it is more than most. */
static int64_t
common_multiple(int64_t a, int64_t b, int64_t most)
{
    int64_t x = a, y = b;
    while (y != 0) {
        const int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return b / x > most / a ? 0 : a * (b / x);
}

int64_t
fp_atomic_step(int64_t numel, int64_t block, int64_t alignment)
{
    return block >= numel ? 0 : common_multiple(block, alignment, numel - 1);
}

static void
at_most(int64_t *least, int64_t value)
{
    *least = value < *least ? value : *least;
}

/* Place all parameters in shards of this length, and write their starts, if starts is not NULL. Returns whether they fit.
 * *next is lowered to the least longer length with which a decision would differ. */
static int
walk(const fp_atomic *atomic, int64_t shard, int64_t *starts, int64_t *next)
{
    const int64_t end = atomic->world_size * shard;
    int64_t at = 0;
    for (size_t i = 0; i < atomic->n; i++) {
        const int64_t numel = atomic->numels[i], step = atomic->steps[i];
        at = round_up(at, atomic->alignment);
        const int64_t room = shard - at % shard;
        if (room == shard && at > 0 && numel > 0) { /* it begins a shard; with longer ones the shard before has room */
            at_most(next, shard + (step == 0 ? numel : step));
        }
        if (numel > room) {
            at_most(next, shard + numel - room);
            if (step == 0) { /* it is never cut: it begins the next shard */
                at += room;
                if (numel > shard) {
                    return 0;
                }
            }
            else {
                int64_t head = room - room % step; /* the elements in this shard */
                at += room - head;
                at_most(next, shard + step - room % step);
                if (numel - head > shard && shard % step == 0) {
                    at_most(next, shard + 1); /* it fits; another length changes all its cuts */
                }
                else if (numel - head > shard) { /* its next cut would not be at a multiple of step */
                    at_most(next, numel - head);
                    at_most(next, round_up(shard, step));
                    at += head + shard % step; /* its head is the end of the next shard, all multiples of step in it */
                    head = shard - shard % step;
                    if (numel - head > shard) {
                        at_most(next, numel - head);
                        return 0;
                    }
                }
            }
        }
        if (at > end || numel > end - at) {
            return 0;
        }
        if (starts != NULL) {
            starts[i] = at;
        }
        at += numel;
    }
    return 1;
}

/* The least length with which a parameter fits in two shards, cut once. */
static int64_t
cut_once(int64_t numel, int64_t step)
{
    const int64_t steps = 1 + (numel - 1) / 2 / step; /* steps * step: the first cut past the middle */
    return numel - (steps - 1) * step < steps * step ? numel - (steps - 1) * step : steps * step;
}

/* The least length, of at least shard, with which each parameter that must be cut twice has its cuts at multiples of its step:
 * then the length is such a multiple. */
static int64_t
allowed(const fp_atomic *atomic, int64_t shard, int64_t most)
{
    int64_t unit = atomic->alignment, fewer = most; /* fewer: the least length that spares one of them a cut */
    for (size_t i = 0; i < atomic->n; i++) {
        const int64_t step = atomic->steps[i], once = step == 0 ? 0 : cut_once(atomic->numels[i], step);
        if (once > shard) {
            at_most(&fewer, round_up(once, atomic->alignment));
            unit = unit == 0 ? 0 : common_multiple(unit, step, most);
        }
    }
    if (unit != 0) {
        at_most(&fewer, round_up(shard, unit));
    }
    return fewer;
}

fp_status
fp_atomic_shard_numel(const fp_atomic *atomic, int64_t *shard_numel)
{
    int64_t total = 0, longest = 1;
    for (size_t i = 0; i < atomic->n; i++) {
        const int64_t numel = atomic->numels[i], step = atomic->steps[i];
        const int64_t whole = step == 0 ? numel : step;
        total += round_up(numel, atomic->alignment);
        longest = whole > longest ? whole : longest;
    }
    const int64_t even = 1 + (total - 1) / atomic->world_size;
    int64_t shard = round_up(even > longest ? even : longest, atomic->alignment);
    for (int64_t tries = 0; shard < total; tries++) {
        shard = allowed(atomic, shard, total);
        if (shard > atomic->most_padded / (atomic->world_size + 2)) {
            return FP_EOVERFLOW;
        }
        int64_t next = total;
        if (walk(atomic, shard, NULL, &next)) {
            break;
        }
        if (tries >= FP_ATOMIC_TRIES && next < shard + shard / FP_ATOMIC_TRIES) {
            next = shard + shard / FP_ATOMIC_TRIES;
        }
        shard = round_up(next, atomic->alignment);
    }
    shard = shard < total ? shard : total; /* total: one shard has all parameters */
    if (shard > atomic->most_padded / (atomic->world_size + 2)) {
        return FP_EOVERFLOW;
    }
    *shard_numel = shard;
    return FP_OK;
}

void
fp_atomic_starts(const fp_atomic *atomic, int64_t shard_numel, int64_t *starts)
{
    int64_t unused = INT64_MAX;
    (void)walk(atomic, shard_numel, starts, &unused);
}
