/* python/fp_args.h -- module state, and the helpers for arguments and errors that all wrappers use.
 * Conventions: functions that return int give 0, or -1 with a Python exception set. PyObject arguments are borrowed.
 * The caller holds the GIL. */
#pragma once

#include "python/fp_compat.h"

#include <stdint.h>

#include "core/fp_status.h"

/* The state of a module object, zeroed by the interpreter. module/fp_module.c sets the members in fp_exec, visits them in
 * fp_traverse and clears them in fp_clear. */
typedef struct {
    /* The last answer of is_as_defined() (fp_overrides.c) about a class, valid for one version of the class. */
    struct {
        const PyTypeObject *type; /* the class; borrowed, only compared */
        PyObject *own;            /* the dict that it was compared with; owned, or another dict could get its address */
        unsigned int version;     /* the version tag of type at that time; 0: there is no answer */
        int as_defined;           /* the answer: 1 or 0 */
    } overrides;
    PyObject *ShardError; /* flatparam.ShardError, a ValueError: a size, world size, rank or range does not fit */
    PyObject *StateError; /* flatparam.fsdp.errors.StateError: a call at a time at which it may not be made */
} fp_module_state;

/* The state of the module object that a METH_FASTCALL function gets as its first argument. */
fp_module_state *fp_get_state(PyObject *module);

/* Casts for tables of methods and getters: a function with METH_FASTCALL, or with the object's own struct as its first
 * parameter, has another type than the table. */
#define FP_METHOD(function) ((PyCFunction)(void (*)(void))(function))
#define FP_GETTER(function) ((getter)(void (*)(void))(function))

/* The spec of a heap type of the module. more_flags: Py_TPFLAGS_HAVE_GC or 0. */
#define FP_TYPE(type_name, object, more_flags, type_slots)                                                             \
    {.name = "flatparam._C." type_name,                                                                                \
     .basicsize = sizeof(object),                                                                                      \
     .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | more_flags,                                              \
     .slots = type_slots}

/* 1: object is of the heap type with this tp_dealloc; 0. The types have no subclasses. The function is compared and not
 * the type: a second execution of the module makes new types, and objects of both stay in use. */
static inline int
fp_is_of(PyObject *object, destructor dealloc)
{
    return Py_TYPE(object)->tp_dealloc == dealloc;
}

/* The end of tp_dealloc: free the object, and the reference to its heap type that it owns. */
static inline void
fp_free_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Return -1, or NULL, from this function if call gives less than 0: it has set an exception. One call, one check: a call with
 * an effect is no part of a longer condition. */
#define FP_TRY(call) FP_TRY_ELSE(-1, call)
#define FP_TRY_NULL(call) FP_TRY_ELSE(NULL, call)
#define FP_TRY_ELSE(result, call)                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            return result;                                                                                             \
        }                                                                                                              \
    } while (0)

/* The same for a pointer: return -1, or NULL, if it is NULL. */
#define FP_NEED(pointer) FP_TRY((pointer) == NULL ? -1 : 0)
#define FP_NEED_NULL(pointer) FP_TRY_NULL((pointer) == NULL ? -1 : 0)

/* The result of a method from a status: NULL for status < 0, which has an exception set; else a new reference to None, or
 * to status != 0 as a bool. */
static inline PyObject *
fp_none_unless(int status)
{
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static inline PyObject *
fp_bool_unless(int status)
{
    return status < 0 ? NULL : PyBool_FromLong(status);
}

/* Drop the result of a call that was made for its effect. 0; -1 if it is NULL: the call has set an exception. */
static inline int
fp_drop_result(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* TypeError unless min <= nargs <= max. name is the Python name of the function, for the message. */
int fp_check_nargs_between(const char *name, Py_ssize_t nargs, Py_ssize_t min, Py_ssize_t max);

/* TypeError unless nargs == expected. */
int fp_check_nargs(const char *name, Py_ssize_t nargs, Py_ssize_t expected);

/* Check the number of arguments, and read numbers and bools. kinds has one letter an argument:
 *   i  an int, into the next int64_t *      d  a float, into the next double *
 *   b  a bool, into the next int *          O  an object: the caller reads args[k]
 * It reads in order and stops at the first failure, TypeError or OverflowError; earlier arguments are written then. */
int fp_read_args(const char *name, PyObject *const *args, Py_ssize_t nargs, const char *kinds, ...);

/* Write an int, or an object with __index__, to *out. TypeError for another object, OverflowError past 64 bits. It may run
 * Python code (__index__). *out is written only on success. */
int fp_as_int64(PyObject *object, int64_t *out);

/* Write a float or int (or an object with __float__ or __index__) to *out, only on success. It may run Python code. */
int fp_as_double(PyObject *object, double *out);

/* New reference: text, with lone surrogates, which UTF-8 cannot encode, escaped as \\udc80 and the like. For messages:
 * PyUnicode_AsUTF8() of the result does not fail. TypeError unless text is a str. */
PyObject *fp_as_text(PyObject *text);

/* Write True or False to *out as 1 or 0. TypeError for another object: a flag in the wrong place shall not count as true. */
int fp_as_bool(PyObject *object, int *out);

/* Read an iterable of ints into a new array *out of *n items, which the caller frees with fp_free(). On success *out is not
 * NULL, not even for no items; on failure nothing is written. It reads from a copy, since __index__ may change a list. */
int fp_as_int64_array(PyObject *object, int64_t **out, Py_ssize_t *n);

/* fp_calloc() (core/fp_alloc.h), freed with fp_free(). NULL with MemoryError. */
void *fp_new_array(Py_ssize_t count, size_t item_bytes);

/* A new tuple of the items of an iterable: a copy, which no callback can shrink. NULL: TypeError, it is no iterable;
 * ValueError, it has not `expected` items. what: a noun for the items, in the message. */
PyObject *fp_as_tuple(PyObject *sequence, Py_ssize_t expected, const char *what);

/* The items of a tuple as an array, borrowed from it. */
static inline PyObject **
fp_items(PyObject *tuple)
{
    return &PyTuple_GET_ITEM(tuple, 0);
}

/* A new tuple of the n values; NULL with an exception set. */
PyObject *fp_int64_tuple(const int64_t *values, Py_ssize_t n);

/* Set an exception, as PyErr_Format() does. -1. */
int fp_raise(PyObject *type, const char *format, ...);

/* Turn a status of the core into an exception: FP_ENOMEM into MemoryError, another failure into ShardError with the
 * message format (as for PyErr_Format), which tells the expected and the given values. 0 for FP_OK, else -1. */
int fp_fail(PyObject *module, fp_status status, const char *format, ...);
