/* python/fp_gil.h -- take the GIL in a thread that may outlive the interpreter, as autograd's threads may. All C and C++ of
 * flatparam that takes the GIL calls these functions. They cannot fail.
 *
 * When the interpreter ends, Python before 3.14 ends a thread that takes the GIL by pthread_exit(), which unwinds the frames
 * of the thread. If one of them is a C++ function that may not throw, the process is aborted. A thread that calls these
 * functions waits instead until the process ends, and keeps all its locks, as with CPython 3.14. (Where torch takes the
 * GIL itself, the process is still aborted.) */
#pragma once

#include <Python.h>

/* As PyEval_RestoreThread(): state is the result of PyEval_SaveThread() in this thread. */
void fp_gil_restore(PyThreadState *state);

/* As PyGILState_Ensure(): PyGILState_Release() ends it. */
PyGILState_STATE fp_gil_ensure(void);
