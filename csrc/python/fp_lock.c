/* python/fp_lock.c -- see fp_lock.h. */
#include "python/fp_lock.h"

#include "python/fp_gil.h"

int
fp_lock_make(fp_lock *lock)
{
    lock->native = PyThread_allocate_lock();
    if (lock->native == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

void
fp_lock_free(fp_lock *lock)
{
    if (lock->native != NULL) {
        PyThread_free_lock(lock->native);
    }
}

void
fp_lock_take(fp_lock *lock)
{
    const unsigned long self = PyThread_get_thread_ident();
    if (lock->held == 0 || lock->holder != self) {
        if (PyThread_acquire_lock(lock->native, NOWAIT_LOCK) != PY_LOCK_ACQUIRED) {
            PyThreadState *state = PyEval_SaveThread();
            PyThread_acquire_lock(lock->native, WAIT_LOCK);
            fp_gil_restore(state);
        }
        lock->holder = self;
    }
    lock->held++;
}

void
fp_lock_leave(fp_lock *lock)
{
    if (--lock->held == 0) {
        PyThread_release_lock(lock->native);
    }
}
