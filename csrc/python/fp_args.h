/* python/fp_args.h -- module state, and the helpers for arguments and errors that all wrappers use.
 * Conventions: functions that return int give 0, or -1 with a Python exception set. PyObject arguments are borrowed.
 * The caller holds the GIL. */
#pragma once

#include "python/fp_compat.h"

#include <stdint.h>

#include "core/fp_status.h"

/* What a module object has beside its types. A member is set in fp_exec, visited in fp_traverse and cleared in
 * fp_clear (module/fp_module.c). */
typedef struct {
    struct {
        const PyTypeObject *type; /* borrowed, only compared */
        PyObject *own;            /* owned: else another dict could have its address */
        unsigned int version;     /* 0: nothing */
        int as_defined;
    } overrides;          /* the answer of fp_overrides.c for the class that it was asked about last */
    PyObject *ShardError; /* flatparam.ShardError, a ValueError: sizes, world sizes, ranks and ranges that do not fit */
    PyObject *StateError; /* flatparam.fsdp.errors.StateError, which says when it is raised */
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

/* The result of a method from a status: NULL for status < 0, which has an exception set; else None, or status != 0 as a
 * bool. */
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

/* TypeError unless min <= nargs <= max. name is the Python name of the function, for the message. */
int fp_check_nargs_between(const char *name, Py_ssize_t nargs, Py_ssize_t min, Py_ssize_t max);

/* TypeError unless nargs == expected. */
int fp_check_nargs(const char *name, Py_ssize_t nargs, Py_ssize_t expected);

/* Check the number of arguments and read those that are no objects. kinds has one letter an argument, and each but O stands
 * for a pointer at the end: i int64_t *, d double *, b int * (True or False); O: the caller reads args[k] himself.
 * Reads in order and stops at the first failure: TypeError or OverflowError. */
int fp_read_args(const char *name, PyObject *const *args, Py_ssize_t nargs, const char *kinds, ...);

/* An int, or an object with __index__, as int64_t. TypeError for anything else, OverflowError past 64 bits.
 * May run Python code (__index__). *out is written only on success. */
int fp_as_int64(PyObject *object, int64_t *out);

/* A float or int (or __float__, __index__) as double. *out is written only on success. */
int fp_as_double(PyObject *object, double *out);

/* New reference: text, with lone surrogates, which UTF-8 cannot encode, escaped as \\udc80 and the like. For messages:
 * PyUnicode_AsUTF8() of the result does not fail. TypeError unless text is a str. */
PyObject *fp_as_text(PyObject *text);

/* True or False as 1 or 0, nothing else: TypeError. */
int fp_as_bool(PyObject *object, int *out);

/* A sequence or iterable of ints as a new array, which the caller gives back with fp_free(); never NULL on success,
 * also for no items. The items are read from a tuple of ours, since __index__ may change the caller's list. */
int fp_as_int64_array(PyObject *object, int64_t **out, Py_ssize_t *n);

/* fp_calloc(), with MemoryError. */
void *fp_new_array(Py_ssize_t count, size_t item_bytes);

/* New tuple of the items of a sequence: a copy, which no callback can shrink. TypeError for no sequence, ValueError unless
 * it has `expected` items. what: a noun for them, in the message. */
PyObject *fp_as_tuple(PyObject *sequence, Py_ssize_t expected, const char *what);

/* Borrowed: the items of a tuple, as an array. */
static inline PyObject **
fp_items(PyObject *tuple)
{
    return &PyTuple_GET_ITEM(tuple, 0);
}

/* A new tuple of the n values; NULL with an exception set. */
PyObject *fp_int64_tuple(const int64_t *values, Py_ssize_t n);

/* Turn a status of the core into an exception: FP_ENOMEM into MemoryError, others into ShardError, with a message (printf
 * format of PyErr_Format) that says what was expected and what came.
 * Returns 0 for FP_OK, else -1. */
int fp_fail(PyObject *module, fp_status status, const char *format, ...);
