/* module/fp_exit_py.c -- the status with which this process ends. Python code that runs at its end cannot change it. */
#define _DEFAULT_SOURCE /* on_exit */
#include "module/fp_tables.h"

#include <stdlib.h>
#include <unistd.h>

/* Read and written with the GIL, or when the interpreter has ended. */
static int exit_status;
static pid_t set_by; /* a process that this one forks ends as it would */

#ifdef __GLIBC__
static void
at_exit(int status, void *ignored)
{
    (void)ignored;
    if (status == 0 && exit_status != 0 && getpid() == set_by) {
        exit(exit_status); /* glibc goes on with the functions of atexit() that are left */
    }
}
#endif

static PyObject *
set_exit_status(PyObject *module, PyObject *object)
{
    int64_t status;
    FP_TRY_NULL(fp_as_int64(object, &status));
    if (status < 0 || status > 255) {
        return PyErr_Format(PyExc_ValueError, "expected an exit status from 0 to 255, got %lld", (long long)status);
    }
#ifdef __GLIBC__
    if (set_by != getpid() && on_exit(at_exit, NULL) != 0) {
        return PyErr_NoMemory();
    }
#endif
    set_by = getpid();
    exit_status = (int)status;
    Py_RETURN_NONE;
}

PyMethodDef fp_exit_methods[] = {
    {"set_exit_status", FP_METHOD(set_exit_status), METH_O,
     "set_exit_status($module, status, /)\n--\n\n"
     "Let this process end with status, from 0 to 255, if it would end with 0. "
     "It has an effect with glibc only. ValueError: another status."},
    {NULL, NULL, 0, NULL},
};
