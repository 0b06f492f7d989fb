/* module/fp_pieces.h -- which piece of each parameter this rank's shard has. Only _C.ModuleParams uses it; torch keeps
 * the pieces as a tuple of shard infos on the flat parameter. The caller holds the GIL. Sizes are in ELEMENTS. */
#pragma once

#include "python/fp_args.h"

/* The 1-D pieces of n parameters in the shard. They have a count of users, because setting data can run Python code (a weak
 * reference's callback), which may let fp_last_pieces read another tuple while a loop still uses these. */
typedef struct {
    Py_ssize_t users; /* fp_last_pieces, and each call at work with it; 0 frees the pieces */
    int64_t *starts;  /* [n] first element in the shard; the same block as numels */
    int64_t *numels;  /* [n] elements in the shard; -1: this rank has none */
} fp_pieces;

/* The tuple that was read last, so that a tuple is read once and not in each step. Its owner zeroes it at first, visits
 * and clears infos for the garbage collector, and releases pieces at its end. */
typedef struct {
    PyObject *infos;   /* owned; the tuple that pieces was read from, compared by identity; NULL: none */
    fp_pieces *pieces; /* one user; NULL: none */
} fp_last_pieces;

/* The pieces that a tuple of n shard infos describes, each (in_shard, offset_in_shard, numel_in_shard, ...). Another tuple
 * than the last one is read, and becomes the last one. The caller gives the result back with fp_pieces_release(). NULL, and
 * *last unchanged: TypeError or ValueError, infos is no such tuple; MemoryError. */
fp_pieces *fp_pieces_of(fp_last_pieces *last, Py_ssize_t n, PyObject *infos);
void fp_pieces_release(fp_pieces *pieces); /* NULL is allowed */
