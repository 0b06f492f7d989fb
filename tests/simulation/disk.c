/* simulation/disk.c -- see disk.h. Linux and glibc. */
#define _GNU_SOURCE
#include "disk.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "seams.h"

static bool (*at_disk)(int rank, bool takes_room, int file, const void *data, size_t size);

void
fp_sim_at_disk(bool (*function)(int rank, bool takes_room, int file, const void *data, size_t size))
{
    at_disk = function;
}

/* Whether the disk does a call of this thread. Sets errno if not. */
static bool
does(bool takes_room, int file, const void *data, size_t size)
{
    const int rank = fp_sim_rank();
    if (rank < 0 || at_disk == NULL || at_disk(rank, takes_room, file, data, size)) {
        return true;
    }
    errno = ENOSPC;
    return false;
}

/* libc's own function. */
#define REAL(name)                                                                                                     \
    static __typeof__(name) *real;                                                                                     \
    if (real == NULL) {                                                                                                \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);                                                            \
    }

ssize_t
write(int file, const void *data, size_t size)
{
    REAL(write)
    struct stat about;
    const bool is_output = file == STDOUT_FILENO || file == STDERR_FILENO; /* which may be a file, of nobody's disk */
    if (fp_sim_rank() >= 0 && !is_output && fstat(file, &about) == 0 && S_ISREG(about.st_mode) &&
        !does(true, file, data, size)) {
        return -1;
    }
    return real(file, data, size);
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        REAL(name)                                                                                                     \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, int) : 0;                                 \
        va_end(list);                                                                                                  \
        return (flags & O_CREAT) != 0 && !does(true, -1, NULL, 0) ? -1 : real(path, flags, mode);                      \
    }
OPEN(open)
OPEN(open64)

#define CHANGE(name, takes_room, parameters, arguments)                                                                \
    int name parameters                                                                                                \
    {                                                                                                                  \
        REAL(name)                                                                                                     \
        return does(takes_room, -1, NULL, 0) ? real arguments : -1;                                                    \
    }
CHANGE(mkdir, true, (const char *path, mode_t mode), (path, mode))
CHANGE(unlink, false, (const char *path), (path))
CHANGE(unlinkat, false, (int folder, const char *path, int flags), (folder, path, flags))
CHANGE(rename, false, (const char *from, const char *to), (from, to))
CHANGE(renameat2, false, (int of, const char *from, int in, const char *to, unsigned flags), (of, from, in, to, flags))

/* No rank loses what the machine has not written yet, as no machine loses its power: the real disk is not waited for. */
int
fsync(int file)
{
    REAL(fsync)
    if (fp_sim_rank() < 0) {
        return real(file);
    }
    return !does(false, -1, NULL, 0) || fcntl(file, F_GETFD) < 0 ? -1 : 0;
}
