/* tensor/fp_shards.h -- this rank's pieces of parameters, told apart from whole parameters by what is done with them. */
#ifndef FP_SHARDS_H
#define FP_SHARDS_H

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Let param's data be piece, marked as a shard where torch knows its device: operations that take whole parameters refuse it,
 * and others that fail with it say why. -1 with an exception. */
int fp_torch_set_shard(PyObject *param, PyObject *piece);

/* explain(tensor): what to say of a shard, a str; or None if it is none any more. Kept. */
void fp_torch_explain_shards(PyObject *explain);

#ifdef __cplusplus
}
#endif

#endif
