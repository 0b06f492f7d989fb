/* core/fp_process.h -- read the memory of another process on this machine: Linux alone. Pure C11: no Python.h, no torch.
 * Nothing is allocated; safe without the GIL. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Copy n runs of bytes from the memory of a process. runs has three numbers for each: its address here, its address there,
 * its bytes, from 0 on. It is borrowed, and so is the memory at the addresses, which the kernel checks. 0, or an errno:
 * ESRCH: the process has ended; EPERM: it may not be read; EFAULT: an address is of no memory; ENOSYS: not on this system.
 * After a failure any of the bytes may have been copied. */
int fp_read_process(int64_t process, const int64_t *runs, size_t n);

/* Let other processes of this user read this one's memory from now on. Without effect unless the system asks for this (Yama,
 * where ptrace_scope is 1): else they may, or none may. Takes the place of what PR_SET_PTRACER has named before: the kernel
 * does not tell what this was, so it is not put back. */
void fp_allow_reads(void);
