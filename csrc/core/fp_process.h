/* core/fp_process.h -- read the memory of another process on this machine: Linux alone. Pure C11: no Python.h, no torch.
 * The functions allocate nothing, and may be called without the GIL. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Copy n runs of bytes from the memory of a process. runs has three numbers for each run: the address to copy to, in this
 * process; the address to copy from, in the other one; the number of bytes, at least 0. The caller owns runs and the memory.
 * The kernel checks the addresses. Returns: 0, or an errno. ESRCH: the process has ended; EPERM: the system forbids the read;
 * EFAULT: no memory is at an address; ENOSYS: the system has no such call. A failure may leave a part of the bytes copied. */
int fp_read_process(int64_t process, const int64_t *runs, size_t n);

/* Let other processes of this user read this one's memory from now on. Without effect unless the system asks for this (Yama,
 * where ptrace_scope is 1): else they may, or none may. Takes the place of what PR_SET_PTRACER has named before: the kernel
 * does not tell what this was, so it is not put back. */
void fp_allow_reads(void);
