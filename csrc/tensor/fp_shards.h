/* tensor/fp_shards.h -- this rank's pieces of parameters, told apart from whole parameters by what is done with them. */
#pragma once

#include "tensor/fp_gradients.h"

FP_BEGIN_C

/* Let params[i]'s data be its piece of the shard, or an empty tensor. marked: as shards, where torch knows their device:
 * operations that take whole parameters refuse them, and others that fail with them say why. Such a piece is 1-D, or
 * in_rows[i] whole rows of the parameter; any other has the shape that the geometry says. -1 with an exception. */
int fp_torch_set_shards(const fp_param_pieces *of, PyObject *shard, const char *in_rows, int marked);

/* explain(tensor): what to say of a shard, a str; or None if it is none any more. PendingCollectives. */
void fp_torch_explain_shards(PyObject *explain);

FP_END_C
