/* core/fp_trace.c -- expectations in one hash table, from a hash of the past to the event that came after it. */
#include "core/fp_trace.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "core/fp_alloc.h"

typedef struct {
    uint64_t past; /* 0: a free place */
    uint64_t next; /* see stored() */
} expectation;

enum { FIRST_ROOM = 1 << 8, LONG = 1, SHORT = 2, LAST = 3 };
enum { RING = FP_TRACE_RECENT + 1 }; /* one of its events may just be written while another thread reads */

/* Whether an order is broken, an fp_trace_state: counted, as the orders that were joined to it have it too. */
typedef struct {
    atomic_int owners, broken;
} mark;

static void
set_mark(mark *of, fp_trace_state state)
{
    int before = FP_TRACE_WHOLE;
    if (state != FP_TRACE_BROKEN) {
        atomic_store(&of->broken, (int)state);
    }
    else { /* what is lost stays so */
        (void)atomic_compare_exchange_strong(&of->broken, &before, (int)state);
    }
}

typedef struct joined {
    mark *mark;
    struct joined *next;
} joined;

struct fp_trace {
    uint64_t pass;                    /* of this pass so far */
    uint64_t before[FP_TRACE_PASSES]; /* of those before it, a ring */
    uint64_t history;                 /* of all of those */
    uint64_t last;
    _Atomic int64_t passes;
    _Atomic int64_t open; /* index of the event that was noted and did not begin yet; -1: none */
    bool launched;        /* see fp_trace_launch */
    int64_t missed;       /* of the first that was missed; -1: none */
    uint64_t digest;      /* of all that were */
    _Atomic int64_t count;
    _Atomic uint64_t recent[RING];
    mark *mark;
    _Atomic(joined *) others;
    expectation *table;
    size_t room, used; /* room: a power of 2 */
};

static uint64_t
mix(uint64_t hash, uint64_t value)
{
    hash = hash * UINT64_C(0x9E3779B97F4A7C15) + value * UINT64_C(0xD6E8FEB86659FD93) + UINT64_C(0xA0761D6478BD642F);
    hash ^= hash >> 32;
    hash *= UINT64_C(0xE7037ED1A0B428DB);
    return hash ^ (hash >> 29);
}

/* An event with its flag, never 0. */
static uint64_t
stored(uint64_t event, int new_pass)
{
    return (event << 1 | (new_pass != 0)) + 1;
}

static uint64_t
past_of(uint64_t hash, uint64_t kind)
{
    const uint64_t past = mix(hash, kind);
    return past == 0 ? 1 : past;
}

/* Where past is, or the free place for it. */
static expectation *
place_of(const fp_trace *order, uint64_t past)
{
    size_t i = (size_t)past & (order->room - 1);
    while (order->table[i].past != 0 && order->table[i].past != past) {
        i = (i + 1) & (order->room - 1);
    }
    return &order->table[i];
}

static void
expect(fp_trace *order, uint64_t past, uint64_t next)
{
    expectation *place = place_of(order, past);
    order->used += place->past == 0;
    *place = (expectation){.past = past, .next = next};
}

/* Room for three more. */
static fp_status
make_room(fp_trace *order)
{
    if (2 * (order->used + 3) <= order->room) {
        return FP_OK;
    }
    if (order->room >= FP_TRACE_MOST) {
        memset(order->table, 0, order->room * sizeof *order->table);
        order->used = 0;
        return FP_OK;
    }
    expectation *old = order->table;
    const size_t old_room = order->room;
    expectation *table = fp_calloc(2 * old_room, sizeof *table);
    if (table == NULL) {
        return FP_ENOMEM;
    }
    order->table = table;
    order->room = 2 * old_room;
    order->used = 0;
    for (size_t i = 0; i < old_room; i++) {
        if (old[i].past != 0) {
            expect(order, old[i].past, old[i].next);
        }
    }
    fp_free(old);
    return FP_OK;
}

static void
let_go(mark *of)
{
    if (of != NULL && atomic_fetch_sub(&of->owners, 1) == 1) {
        fp_free(of);
    }
}

void
fp_trace_free(fp_trace *order)
{
    if (order != NULL) {
        joined *next;
        for (joined *each = atomic_load(&order->others); each != NULL; each = next) {
            next = each->next;
            let_go(each->mark);
            fp_free(each);
        }
        let_go(order->mark);
        fp_free(order->table);
        fp_free(order);
    }
}

fp_trace *
fp_trace_new(void)
{
    fp_trace *order = fp_calloc(1, sizeof *order);
    if (order == NULL) {
        return NULL;
    }
    order->table = fp_calloc(FIRST_ROOM, sizeof *order->table);
    order->room = FIRST_ROOM;
    atomic_store(&order->open, -1);
    order->missed = -1;
    order->mark = fp_calloc(1, sizeof *order->mark);
    if (order->mark != NULL) {
        order->mark->owners = 1;
    }
    if (order->table == NULL || order->mark == NULL) {
        fp_trace_free(order);
        return NULL;
    }
    return order;
}

/* If the event that was noted last did not begin: another one stands in its place. */
static void
take_missed(fp_trace *order)
{
    const int64_t open = atomic_load(&order->open);
    if (open < 0) {
        return;
    }
    if (order->missed < 0) {
        order->missed = open;
        order->digest = 1;
    }
    order->digest = order->launched || order->digest == 0 ? 0 : mix(order->digest, order->last) | 1;
    atomic_store_explicit(&order->recent[open % RING], stored(FP_TRACE_MISSED, 0), memory_order_release);
}

static void
advance(fp_trace *order, uint64_t next, bool new_pass)
{
    take_missed(order);
    if (new_pass) {
        order->before[order->passes % FP_TRACE_PASSES] = order->pass;
        order->passes++;
        order->history = 0;
        for (int64_t i = 0; i < FP_TRACE_PASSES; i++) {
            order->history = mix(order->history, order->before[(order->passes + i) % FP_TRACE_PASSES]);
        }
        order->pass = 0;
    }
    order->pass = mix(order->pass, next);
    order->last = next;
    order->launched = false;
    const int64_t count = fp_trace_count(order);
    atomic_store(&order->open, count);
    atomic_store_explicit(&order->recent[count % RING], next, memory_order_release);
    atomic_store_explicit(&order->count, count + 1, memory_order_release);
}

fp_status
fp_trace_note(fp_trace *order, uint64_t event, int new_pass, fp_trace_verdict *verdict)
{
    if (event >= FP_TRACE_MISSED) {
        return FP_EINVAL;
    }
    const uint64_t next = stored(event, new_pass);
    const uint64_t longest = past_of(mix(order->history, order->pass), LONG);
    uint64_t expected = place_of(order, longest)->next;
    if (expected != next) {
        const uint64_t shorter = past_of(order->pass, SHORT), shortest = past_of(order->last, LAST);
        if (make_room(order) != FP_OK) {
            return FP_ENOMEM;
        }
        if (expected == 0) {
            expected = place_of(order, shorter)->next;
        }
        if (expected == 0 && order->passes >= 2) { /* in the first pass all is new */
            expected = place_of(order, shortest)->next;
        }
        expect(order, longest, next);
        expect(order, shorter, next);
        expect(order, shortest, next);
    }
    *verdict = expected == 0 ? FP_TRACE_NEW : expected == next ? FP_TRACE_EXPECTED : FP_TRACE_OTHER;
    advance(order, next, new_pass != 0);
    return FP_OK;
}

void
fp_trace_begin(fp_trace *order)
{
    atomic_store(&order->open, -1);
}

void
fp_trace_launch(fp_trace *order)
{
    order->launched = true;
}

int
fp_trace_missed(const fp_trace *order, int64_t *index, uint64_t *digest)
{
    if (order->missed < 0) {
        return 0;
    }
    *index = order->missed;
    *digest = order->digest;
    return 1;
}

void
fp_trace_confirm_not_begun(fp_trace *order)
{
    order->missed = -1;
}

int64_t
fp_trace_count(const fp_trace *order)
{
    return atomic_load_explicit(&order->count, memory_order_acquire);
}

int64_t
fp_trace_passes(const fp_trace *order)
{
    return atomic_load(&order->passes);
}

int
fp_trace_at(const fp_trace *order, int64_t index, uint64_t *event, int *new_pass)
{
    if (index < 0 || index >= fp_trace_count(order)) {
        return 0;
    }
    const uint64_t value = atomic_load_explicit(&order->recent[index % RING], memory_order_acquire) - 1;
    if (index < fp_trace_count(order) - FP_TRACE_RECENT) { /* another event may have taken its place meanwhile */
        return 0;
    }
    *event = value >> 1;
    *new_pass = (int)(value & 1);
    return 1;
}

int
fp_trace_has_begun(const fp_trace *order, int64_t index)
{
    uint64_t event;
    int new_pass;
    return fp_trace_at(order, index, &event, &new_pass) && atomic_load(&order->open) != index &&
           fp_trace_at(order, index, &event, &new_pass) && /* again: MISSED is written before open */
           event != FP_TRACE_MISSED;
}

fp_trace_state
fp_trace_broken(const fp_trace *order)
{
    return (fp_trace_state)atomic_load(&order->mark->broken);
}

void
fp_trace_set_broken(fp_trace *order, fp_trace_state broken)
{
    set_mark(order->mark, broken);
}

fp_status
fp_trace_join(fp_trace *order, fp_trace *other)
{
    joined *const first = atomic_load(&order->others);
    for (const joined *each = first; each != NULL; each = each->next) {
        if (each->mark == other->mark) {
            return FP_OK;
        }
    }
    joined *added = fp_calloc(1, sizeof *added);
    if (added == NULL) {
        return FP_ENOMEM;
    }
    atomic_fetch_add(&other->mark->owners, 1);
    *added = (joined){.mark = other->mark, .next = first};
    atomic_store(&order->others, added);
    return FP_OK;
}

void
fp_trace_break(fp_trace *order, fp_trace_state how)
{
    set_mark(order->mark, how);
    for (const joined *each = atomic_load(&order->others); each != NULL; each = each->next) {
        set_mark(each->mark, how);
    }
}
