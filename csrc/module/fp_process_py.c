/* module/fp_process_py.c -- wrappers of core/fp_process.h as functions of _C. */
#include "module/fp_tables.h"

#include <errno.h>

#include "core/fp_alloc.h"
#include "core/fp_process.h"

static PyObject *
read_process(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t process, *runs;
    Py_ssize_t n;
    FP_TRY_NULL(fp_read_args("read_process", args, nargs, "iO", &process));
    FP_TRY_NULL(fp_as_int64_array(args[1], &runs, &n)); /* owned */
    int is_whole = n % 3 == 0, status = 0;
    for (Py_ssize_t i = 2; i < n; i += 3) {
        is_whole = is_whole && runs[i] >= 0;
    }
    if (is_whole) {
        Py_BEGIN_ALLOW_THREADS status = fp_read_process(process, runs, (size_t)n / 3);
        Py_END_ALLOW_THREADS
    }
    fp_free(runs);
    if (!is_whole) {
        return PyErr_Format(PyExc_ValueError, "expected three numbers for each run, and bytes >= 0, got %zd", n);
    }
    errno = status;
    return status == 0 ? Py_NewRef(Py_None) : PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *
allow_reads(PyObject *module, PyObject *none)
{
    fp_allow_reads();
    Py_RETURN_NONE;
}

PyMethodDef fp_process_methods[] = {
    {"read_process", FP_METHOD(read_process), METH_FASTCALL,
     "read_process($module, process, runs, /)\n--\n\n"
     "Copy runs of bytes from the memory of a process on this machine. "
     "runs: for each its address here, its address there, its number of bytes, in one sequence. "
     "OSError: the process has ended, or may not be read, or an address is of no memory; a part may have been copied. "
     "ValueError: a part of a run, or bytes < 0."},
    {"allow_reads", FP_METHOD(allow_reads), METH_NOARGS,
     "allow_reads($module, /)\n--\n\n"
     "Let other processes of this user read this one's memory from now on, where the system asks for this (Yama)."},
    {NULL, NULL, 0, NULL},
};
