/* counting.c -- a function that callgrind counts: all that is called in it, as a profile of its own. Only there is the program
 * instrumented: an import of torch under instrumentation takes a minute.
 * benchmarks/bench_step_instructions.py compiles it, and calls it from Python. */
#include <valgrind/callgrind.h>

void
count(const char *name, void (*call)(void))
{
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
    call();
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
