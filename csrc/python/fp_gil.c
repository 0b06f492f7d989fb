/* python/fp_gil.c -- see fp_gil.h. */
#include "python/fp_gil.h"

#include <pthread.h>
#include <unistd.h>

/* Called in a thread that pthread_exit() ends. */
static void
wait_for_the_end(void *unused)
{
    (void)unused;
    for (;;) {
        pause();
    }
}

void
fp_gil_restore(PyThreadState *state)
{
    pthread_cleanup_push(wait_for_the_end, NULL);
    PyEval_RestoreThread(state);
    pthread_cleanup_pop(0);
}

PyGILState_STATE
fp_gil_ensure(void)
{
    PyGILState_STATE state;
    pthread_cleanup_push(wait_for_the_end, NULL);
    state = PyGILState_Ensure();
    pthread_cleanup_pop(0);
    return state;
}
