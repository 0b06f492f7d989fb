/* module/fp_pieces.h -- which piece of each parameter this rank's shard has. */
#pragma once

#include "python/fp_args.h"

/* The 1-D piece that the shard has of each parameter. Counted, since setting data can run Python code (a weak reference's
 * callback) that makes the table read another tuple meanwhile. */
typedef struct {
    Py_ssize_t users; /* the table and the calls that are at work with it; changed with the GIL held */
    int64_t *starts;  /* n: first element in the shard; the same block as numels */
    int64_t *numels;  /* n: elements in the shard; -1: none here */
} fp_pieces;

/* What was read last. */
typedef struct {
    PyObject *infos; /* the tuple that pieces was read from, or NULL */
    fp_pieces *pieces;
} fp_last_pieces;

/* The pieces that a tuple of n shard infos describes: (in_shard, offset_in_shard, numel_in_shard, ...) each; read anew only if
 * the tuple is not the one that was read last. To be given back with fp_pieces_release(); NULL with an exception set. */
fp_pieces *fp_pieces_of(fp_last_pieces *last, Py_ssize_t n, PyObject *infos);
void fp_pieces_release(fp_pieces *pieces); /* one user less; NULL is allowed */
