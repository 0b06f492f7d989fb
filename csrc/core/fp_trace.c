/* core/fp_trace.c -- expectations in one hash table, from a hash of the past to the event that came after it. */
#include "core/fp_trace.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "core/fp_alloc.h"

typedef struct {
    uint64_t past; /* 0: a free place */
    uint64_t next; /* the event after it, as stored() packs it */
} expectation;

enum { FIRST_ROOM = 1 << 8, LONG = 1, SHORT = 2, LAST = 3 };
enum { RING = FP_TRACE_RECENT + 1 }; /* one more: a thread may write that one while another thread reads */

/* The state of one trace. Traces that are joined share it, so it has a count of its owners and outlives the trace. */
typedef struct {
    atomic_int owners;
    atomic_int broken; /* an fp_trace_state */
} mark;

static void
set_mark(mark *of, fp_trace_state state)
{
    int before = FP_TRACE_WHOLE;
    if (state != FP_TRACE_BROKEN) {
        atomic_store(&of->broken, (int)state);
    }
    else { /* FP_TRACE_LOST is final: FP_TRACE_BROKEN does not replace it */
        (void)atomic_compare_exchange_strong(&of->broken, &before, (int)state);
    }
}

typedef struct joined {
    mark *mark;
    struct joined *next;
} joined;

struct fp_trace {
    uint64_t pass;                    /* hash of the events of this pass so far */
    uint64_t before[FP_TRACE_PASSES]; /* hashes of the passes before it, a ring */
    uint64_t history;                 /* hash of the hashes in before */
    uint64_t last;                    /* the last event */
    _Atomic int64_t passes;
    _Atomic int64_t open;          /* index of the event that was noted and has not begun yet; -1: none */
    bool launched;                 /* see fp_trace_launch() */
    int64_t missed;                /* index of the first event that was missed; -1: none */
    uint64_t digest;               /* hash of all events that were missed */
    _Atomic int64_t count;         /* of events so far */
    _Atomic uint64_t recent[RING]; /* the last events, as stored() packs them */
    mark *mark;                    /* shared, see above */
    _Atomic(joined *) others;      /* traces that break with this one */
    expectation *table;            /* open addressing */
    size_t room, used;             /* places in table (a power of 2), and the number of those in use */
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

/* The place of past in the table, or the free place for it. */
static expectation *
place_of(const fp_trace *trace, uint64_t past)
{
    size_t i = (size_t)past & (trace->room - 1);
    while (trace->table[i].past != 0 && trace->table[i].past != past) {
        i = (i + 1) & (trace->room - 1);
    }
    return &trace->table[i];
}

static void
expect(fp_trace *trace, uint64_t past, uint64_t next)
{
    expectation *place = place_of(trace, past);
    trace->used += place->past == 0;
    *place = (expectation){.past = past, .next = next};
}

/* Make room for three more expectations. When the table is at its limit all are dropped. */
static fp_status
make_room(fp_trace *trace)
{
    if (2 * (trace->used + 3) <= trace->room) {
        return FP_OK;
    }
    if (trace->room >= FP_TRACE_MOST) {
        memset(trace->table, 0, trace->room * sizeof *trace->table);
        trace->used = 0;
        return FP_OK;
    }
    expectation *old = trace->table;
    const size_t old_room = trace->room;
    expectation *table = fp_calloc(2 * old_room, sizeof *table);
    if (table == NULL) {
        return FP_ENOMEM;
    }
    trace->table = table;
    trace->room = 2 * old_room;
    trace->used = 0;
    for (size_t i = 0; i < old_room; i++) {
        if (old[i].past != 0) {
            expect(trace, old[i].past, old[i].next);
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
fp_trace_free(fp_trace *trace)
{
    if (trace != NULL) {
        joined *next;
        for (joined *each = atomic_load(&trace->others); each != NULL; each = next) {
            next = each->next;
            let_go(each->mark);
            fp_free(each);
        }
        let_go(trace->mark);
        fp_free(trace->table);
        fp_free(trace);
    }
}

fp_trace *
fp_trace_new(void)
{
    fp_trace *trace = fp_calloc(1, sizeof *trace);
    if (trace == NULL) {
        return NULL;
    }
    trace->table = fp_calloc(FIRST_ROOM, sizeof *trace->table);
    trace->room = FIRST_ROOM;
    atomic_store(&trace->open, -1);
    trace->missed = -1;
    trace->mark = fp_calloc(1, sizeof *trace->mark);
    if (trace->mark != NULL) {
        trace->mark->owners = 1;
    }
    if (trace->table == NULL || trace->mark == NULL) {
        fp_trace_free(trace);
        return NULL;
    }
    return trace;
}

/* If the event that was noted last did not begin, count it as missed, and write FP_TRACE_MISSED in its place. */
static void
take_missed(fp_trace *trace)
{
    const int64_t open = atomic_load(&trace->open);
    if (open < 0) {
        return;
    }
    if (trace->missed < 0) {
        trace->missed = open;
        trace->digest = 1;
    }
    trace->digest = trace->launched || trace->digest == 0 ? 0 : mix(trace->digest, trace->last) | 1;
    atomic_store_explicit(&trace->recent[open % RING], stored(FP_TRACE_MISSED, 0), memory_order_release);
}

static void
advance(fp_trace *trace, uint64_t next, bool new_pass)
{
    take_missed(trace);
    if (new_pass) {
        trace->before[trace->passes % FP_TRACE_PASSES] = trace->pass;
        trace->passes++;
        trace->history = 0;
        for (int64_t i = 0; i < FP_TRACE_PASSES; i++) {
            trace->history = mix(trace->history, trace->before[(trace->passes + i) % FP_TRACE_PASSES]);
        }
        trace->pass = 0;
    }
    trace->pass = mix(trace->pass, next);
    trace->last = next;
    trace->launched = false;
    const int64_t count = fp_trace_count(trace);
    atomic_store(&trace->open, count);
    atomic_store_explicit(&trace->recent[count % RING], next, memory_order_release);
    atomic_store_explicit(&trace->count, count + 1, memory_order_release);
}

fp_status
fp_trace_note(fp_trace *trace, uint64_t event, int new_pass, fp_trace_verdict *verdict)
{
    if (event >= FP_TRACE_MISSED) {
        return FP_EINVAL;
    }
    const uint64_t next = stored(event, new_pass);
    const uint64_t longest = past_of(mix(trace->history, trace->pass), LONG);
    uint64_t expected = place_of(trace, longest)->next;
    if (expected != next) {
        const uint64_t shorter = past_of(trace->pass, SHORT), shortest = past_of(trace->last, LAST);
        if (make_room(trace) != FP_OK) {
            return FP_ENOMEM;
        }
        if (expected == 0) {
            expected = place_of(trace, shorter)->next;
        }
        if (expected == 0 && trace->passes >= 2) { /* in the first pass every event is new */
            expected = place_of(trace, shortest)->next;
        }
        expect(trace, longest, next);
        expect(trace, shorter, next);
        expect(trace, shortest, next);
    }
    *verdict = expected == 0 ? FP_TRACE_NEW : expected == next ? FP_TRACE_EXPECTED : FP_TRACE_OTHER;
    advance(trace, next, new_pass != 0);
    return FP_OK;
}

void
fp_trace_begin(fp_trace *trace)
{
    atomic_store(&trace->open, -1);
}

void
fp_trace_launch(fp_trace *trace)
{
    trace->launched = true;
}

int
fp_trace_missed(const fp_trace *trace, int64_t *index, uint64_t *digest)
{
    if (trace->missed < 0) {
        return 0;
    }
    *index = trace->missed;
    *digest = trace->digest;
    return 1;
}

void
fp_trace_confirm_not_begun(fp_trace *trace)
{
    trace->missed = -1;
}

int64_t
fp_trace_count(const fp_trace *trace)
{
    return atomic_load_explicit(&trace->count, memory_order_acquire);
}

int64_t
fp_trace_passes(const fp_trace *trace)
{
    return atomic_load(&trace->passes);
}

int
fp_trace_at(const fp_trace *trace, int64_t index, uint64_t *event, int *new_pass)
{
    if (index < 0 || index >= fp_trace_count(trace)) {
        return 0;
    }
    const uint64_t value = atomic_load_explicit(&trace->recent[index % RING], memory_order_acquire) - 1;
    if (index < fp_trace_count(trace) - FP_TRACE_RECENT) { /* another event may have taken its place meanwhile */
        return 0;
    }
    *event = value >> 1;
    *new_pass = (int)(value & 1);
    return 1;
}

int
fp_trace_has_begun(const fp_trace *trace, int64_t index)
{
    uint64_t event;
    int new_pass;
    return fp_trace_at(trace, index, &event, &new_pass) && atomic_load(&trace->open) != index &&
           fp_trace_at(trace, index, &event, &new_pass) && /* again: MISSED is written before open */
           event != FP_TRACE_MISSED;
}

fp_trace_state
fp_trace_broken(const fp_trace *trace)
{
    return (fp_trace_state)atomic_load(&trace->mark->broken);
}

void
fp_trace_set_broken(fp_trace *trace, fp_trace_state broken)
{
    set_mark(trace->mark, broken);
}

fp_status
fp_trace_join(fp_trace *trace, fp_trace *other)
{
    joined *const first = atomic_load(&trace->others);
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
    atomic_store(&trace->others, added);
    return FP_OK;
}

void
fp_trace_break(fp_trace *trace, fp_trace_state how)
{
    set_mark(trace->mark, how);
    for (const joined *each = atomic_load(&trace->others); each != NULL; each = each->next) {
        set_mark(each->mark, how);
    }
}
