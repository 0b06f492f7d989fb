/* counting.c -- a function that callgrind counts: all that is called in it, as a profile of its own.
 * benchmarks/bench_step_instructions.py compiles it, and calls it from Python. */
#include <valgrind/callgrind.h>

void
count(const char *name, void (*call)(void))
{
    CALLGRIND_ZERO_STATS;
    CALLGRIND_TOGGLE_COLLECT;
    call();
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(name);
}
