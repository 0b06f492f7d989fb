/* python/fp_fields.h -- read the attributes of a Python object into the fields of a struct. A table has the name of each
 * attribute, its kind, and its place in the struct. So Python and C agree on names, and not on positions. */
#pragma once

#include <stddef.h>

#include "python/fp_args.h"

typedef enum {
    /* PyObject *, owned by the struct; NULL if the kind allows None and the attribute is None. */
    FP_FIELD_OBJECT,
    FP_FIELD_TUPLE,
    FP_FIELD_TUPLE_OR_NONE,
    FP_FIELD_CALLABLE_OR_NONE,
    /* Numbers: fp_fields_clear() leaves them as they are. */
    FP_FIELD_INT,    /* int */
    FP_FIELD_INT64,  /* int64_t */
    FP_FIELD_DOUBLE, /* double */
    FP_FIELD_BOOL,   /* int, 0 or 1 */
} fp_field_kind;

typedef struct {
    const char *name; /* of the attribute; NULL: the end of the table */
    fp_field_kind kind;
    size_t offset; /* in the struct */
} fp_field;

/* Fill a zeroed struct. -1 with TypeError, which names the attribute: it is missing, of another kind, or too large. The
 * fields before it are filled then. The caller calls fp_fields_clear() at the end, after a failure too. */
int fp_fields_read(PyObject *object, const fp_field *table, void *into);
/* Drop the references that the struct owns. */
void fp_fields_clear(const fp_field *table, void *into);
