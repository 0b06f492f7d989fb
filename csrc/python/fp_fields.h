/* python/fp_fields.h -- reading the attributes of a Python object into a struct: by name, from one table. */
#pragma once

#include <stddef.h>

#include "python/fp_args.h"

typedef enum {
    /* PyObject *, owned by the struct; NULL for a None that the kind allows. */
    FP_FIELD_OBJECT,
    FP_FIELD_TUPLE,
    FP_FIELD_TUPLE_OR_NONE,
    FP_FIELD_CALLABLE_OR_NONE,
    /* Numbers. */
    FP_FIELD_INT, /* int */
    FP_FIELD_INT64,
    FP_FIELD_DOUBLE,
    FP_FIELD_BOOL, /* int, 0 or 1 */
} fp_field_kind;

typedef struct {
    const char *name; /* of the attribute; NULL: the end of the table */
    fp_field_kind kind;
    size_t offset; /* in the struct */
} fp_field;

/* Fill a zeroed struct. -1: TypeError that names the attribute, as it is missing, of another kind, or too large. The caller
 * calls fp_fields_clear() also after a failure. */
int fp_fields_read(PyObject *object, const fp_field *table, void *into);
/* Drop the references that the struct owns. */
void fp_fields_clear(const fp_field *table, void *into);
