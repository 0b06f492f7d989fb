/* simulation/disk.h -- the disk of simulated ranks. A library that is preloaded behind that of seams.c (disk.c) takes the place
 * of the libc functions that change files, for the threads of ranks alone. */
#ifndef FLATPARAM_SIMULATION_DISK_H
#define FLATPARAM_SIMULATION_DISK_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Call function each time when a thread of rank is about to make a file or a folder, to write to a file, to sync one, to rename
 * or to remove one. takes_room: the call needs room on the disk. file: the descriptor that size bytes of data are to be written
 * to; -1: it is no write. If the function returns false, the call fails with ENOSPC and does nothing. It does not hold the GIL
 * unless the caller does. NULL: call nothing. */
void fp_sim_at_disk(bool (*function)(int rank, bool takes_room, int file, const void *data, size_t size));

#ifdef __cplusplus
}
#endif

#endif
