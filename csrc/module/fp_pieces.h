/* module/fp_pieces.h -- which piece of each parameter this rank's shard has. */
#pragma once

#include "python/fp_args.h"

/* The 1-D piece of each parameter that the shard has, in elements. Counted by users: setting data can run Python code (a weak
 * reference's callback), which may let the table read another tuple while a loop still uses this one. */
typedef struct {
    Py_ssize_t users; /* the table, and each call at work with it; changed with the GIL held; 0 frees the pieces */
    int64_t *starts;  /* [n] first element in the shard; the same block as numels */
    int64_t *numels;  /* [n] elements in the shard; -1: this rank has none */
} fp_pieces;

/* The table: the tuple that was read last. It is zeroed at first. */
typedef struct {
    PyObject *infos; /* owned; the tuple that pieces was read from; NULL: none. Compared by identity */
    fp_pieces *pieces;
} fp_last_pieces;

/* The pieces that a tuple of n shard infos describes, each (in_shard, offset_in_shard, numel_in_shard, ...). Another tuple than
 * the last one is read anew. The caller gives the result back with fp_pieces_release(). NULL with an exception set: infos is no
 * such tuple, or memory is out. */
fp_pieces *fp_pieces_of(fp_last_pieces *last, Py_ssize_t n, PyObject *infos);
void fp_pieces_release(fp_pieces *pieces); /* NULL is allowed */
