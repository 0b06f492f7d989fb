/* python/fp_lock.h -- a reentrant lock: the thread that holds it may take it again. The caller holds the GIL. fp_root.lock
 * (runtime/fp_types.h) is one. */
#pragma once

#include <Python.h>

typedef struct {
    PyThread_type_lock native; /* owned; NULL before fp_lock_make() */
    unsigned long holder;      /* ident of the thread that holds it; valid if held > 0 */
    int held;                  /* times that the holder has taken it; 0: the lock is free */
} fp_lock;

int fp_lock_make(fp_lock *lock);   /* make a zeroed lock; 0; -1 with MemoryError */
void fp_lock_free(fp_lock *lock);  /* no thread holds it; also one that was not made */
void fp_lock_take(fp_lock *lock);  /* gives up the GIL while another thread holds it */
void fp_lock_leave(fp_lock *lock); /* once for each fp_lock_take() */
