/* python/fp_gil.h -- the GIL, taken by a thread that the interpreter does not wait for, as autograd's are. When the interpreter ends,
 * Python before 3.14 ends a thread that takes the GIL by pthread_exit(), which unwinds the thread's frames: where one of them is
 * C++ that may not throw, the process is aborted. Where flatparam takes it, such a thread waits for the end of the process, as from
 * Python 3.14 on, with all locks that it has. (Where torch takes it, the process is aborted.) */
#pragma once

#include <Python.h>

/* As PyEval_RestoreThread(). */
void fp_gil_restore(PyThreadState *state);

/* As PyGILState_Ensure(). */
PyGILState_STATE fp_gil_ensure(void);
