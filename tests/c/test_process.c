/* test_process.c -- runs of bytes come from the memory of another process, and each failure has its errno. */
#define _GNU_SOURCE
#include "core/fp_process.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { RUNS = 200 /* more than one call of the system takes */ };

static unsigned char there[RUNS * RUNS], here[sizeof there];
static int64_t runs[3 * RUNS];

/* Run i has i bytes, and its place here mirrors its place there. Returns: their number. */
static size_t
describe(void)
{
    size_t at = 0;
    for (size_t i = 0; i < RUNS; at += i, i++) {
        runs[3 * i] = (int64_t)(intptr_t)(here + sizeof here - at - i);
        runs[3 * i + 1] = (int64_t)(intptr_t)(there + at);
        runs[3 * i + 2] = (int64_t)i;
    }
    return at;
}

static int
runs_are_equal(unsigned char change)
{
    size_t at = 0;
    for (size_t i = 0; i < RUNS; at += i, i++) {
        for (size_t k = 0; k < i; k++) {
            if (here[sizeof here - at - i + k] != (unsigned char)(there[at + k] ^ change)) {
                return 0;
            }
        }
    }
    return 1;
}

/* A child that has other bytes at the same addresses, and waits. */
static pid_t
start(int said[2])
{
    const pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < sizeof there; i++) {
            there[i] ^= 0x5a;
        }
        fp_allow_reads();
        (void)!write(said[1], "1", 1);
        for (;;) {
            pause();
        }
    }
    return child;
}

int
main(void)
{
    char byte;
    int said[2];
    const size_t bytes = describe();
    for (size_t i = 0; i < bytes; i++) {
        there[i] = (unsigned char)next_random();
    }
    CHECK_EQ(pipe(said), 0);
    const pid_t child = start(said);
    CHECK_EQ(read(said[0], &byte, 1), 1);
    const int status = fp_read_process(child, runs, RUNS);
    const int may_read = status != EPERM && status != ENOSYS; /* the system may refuse it to all */
    if (may_read) {
        CHECK_EQ(status, 0);
        CHECK(runs_are_equal(0x5a));
        CHECK_EQ(fp_read_process(child, runs, 0), 0);
        runs[3 * (RUNS - 1) + 1] = 8; /* where no process has memory */
        CHECK_EQ(fp_read_process(child, runs, RUNS), EFAULT);
        (void)describe();
    }
    CHECK_EQ(kill(child, SIGKILL), 0);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    if (may_read) {
        CHECK_EQ(fp_read_process(child, runs, RUNS), ESRCH);
        CHECK_EQ(fp_read_process(0, runs, RUNS), ESRCH);
        CHECK_EQ(fp_read_process(INT64_C(1) << 40, runs, RUNS), ESRCH);
    }
    return check_result();
}
