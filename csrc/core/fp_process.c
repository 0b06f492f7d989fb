/* core/fp_process.c -- read the memory of another process. */
#ifdef __linux__
#define _GNU_SOURCE /* process_vm_readv */
#endif
#include "core/fp_process.h"

#include <errno.h>

#ifdef __linux__
#include <sys/prctl.h>
#include <sys/uio.h>

enum {
    RUN = 3,           /* numbers that describe a run */
    MOST_AT_ONCE = 64, /* runs of one call: more are not faster */
};

static struct iovec
memory(int64_t address, int64_t begin, int64_t end)
{
    return (struct iovec){(void *)((uintptr_t)address + (uintptr_t)begin), (size_t)(end - begin)};
}

int
fp_read_process(int64_t process, const int64_t *runs, size_t n)
{
    int64_t done = 0; /* bytes of the first run that is left */
    if (process <= 0 || process != (pid_t)process) {
        return ESRCH;
    }
    for (;;) {
        struct iovec here[MOST_AT_ONCE], there[MOST_AT_ONCE];
        size_t count = 0;
        for (; n > 0 && done >= runs[2]; runs += RUN, n--) {
            done -= runs[2];
        }
        for (; count < n && count < MOST_AT_ONCE; count++) {
            const int64_t *run = runs + RUN * count, begin = count == 0 ? done : 0;
            here[count] = memory(run[0], begin, run[2]);
            there[count] = memory(run[1], begin, run[2]);
        }
        if (count == 0) {
            return 0;
        }
        const ssize_t copied = process_vm_readv((pid_t)process, here, count, there, count, 0);
        if (copied <= 0) { /* 2 GiB at most, and less before an address without memory: then the next call fails */
            return copied < 0 ? errno : EFAULT;
        }
        done += copied;
    }
}

void
fp_allow_reads(void)
{
    (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0UL, 0UL, 0UL);
}
#else
int
fp_read_process(int64_t process, const int64_t *runs, size_t n)
{
    (void)process, (void)runs, (void)n;
    return ENOSYS;
}

void
fp_allow_reads(void)
{
}
#endif
