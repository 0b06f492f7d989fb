/* module/fp_pieces.c -- see fp_pieces.h. */
#include "module/fp_pieces.h"

#include "core/fp_alloc.h"

void
fp_pieces_release(fp_pieces *pieces)
{
    if (pieces != NULL && --pieces->users == 0) {
        fp_free(pieces->starts);
        fp_free(pieces);
    }
}

/* Read one entry's in_shard, offset_in_shard and numel_in_shard. */
static int
read_piece(PyObject *info, int64_t *start, int64_t *numel)
{
    PyObject *fields = PySequence_Tuple(info);
    int status = -1;
    FP_NEED(fields);
    if (PyTuple_GET_SIZE(fields) < 3) {
        PyErr_SetString(PyExc_ValueError, "a shard info has fewer than 3 fields");
        goto done;
    }
    const int in_shard = PyObject_IsTrue(PyTuple_GET_ITEM(fields, 0));
    if (in_shard == 0) {
        *numel = -1;
        status = 0;
    }
    else if (in_shard > 0 && fp_as_int64(PyTuple_GET_ITEM(fields, 1), start) == 0 &&
             fp_as_int64(PyTuple_GET_ITEM(fields, 2), numel) == 0) {
        status = *start < 0 || *numel < 0 ? -1 : 0;
        if (status < 0) {
            PyErr_SetString(PyExc_ValueError, "a shard info has a negative offset or size");
        }
    }
done:
    Py_DECREF(fields);
    return status;
}

fp_pieces *
fp_pieces_of(fp_last_pieces *last, Py_ssize_t n, PyObject *infos)
{
    if (infos == last->infos && last->pieces != NULL) {
        last->pieces->users++;
        return last->pieces;
    }
    if (!PyTuple_Check(infos) || PyTuple_GET_SIZE(infos) != n) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of %zd shard infos, got %.200s", n, Py_TYPE(infos)->tp_name);
        return NULL;
    }
    fp_pieces *pieces = fp_new_array(1, sizeof *pieces);
    int64_t *block = pieces == NULL ? NULL : fp_new_array(n, 2 * sizeof *block);
    if (block == NULL) {
        fp_free(pieces);
        return NULL;
    }
    *pieces = (fp_pieces){.users = 1, .starts = block, .numels = block + n};
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_piece(PyTuple_GET_ITEM(infos, i), &pieces->starts[i], &pieces->numels[i]) < 0) {
            fp_pieces_release(pieces);
            return NULL;
        }
    }
    fp_pieces *old = last->pieces;
    pieces->users++; /* one for the table */
    last->pieces = pieces;
    Py_XSETREF(last->infos, Py_NewRef(infos));
    fp_pieces_release(old);
    return pieces;
}
