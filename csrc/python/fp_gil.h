/* python/fp_gil.h -- the GIL, taken by a thread that the interpreter does not wait for, as autograd's are. When the
 * interpreter ends, Python before 3.14 ends a thread that takes the GIL by pthread_exit(), which unwinds the thread's
 * frames: where one of them is C++ that may not throw, the process is aborted. A thread that takes it by these functions
 * waits for the end of the process instead, with all locks that it holds, as CPython 3.14 lets it. (If torch takes the
 * GIL, the process is still aborted.) */
#pragma once

#include <Python.h>

/* As PyEval_RestoreThread(). */
void fp_gil_restore(PyThreadState *state);

/* As PyGILState_Ensure(). */
PyGILState_STATE fp_gil_ensure(void);
