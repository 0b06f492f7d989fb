/* tensor/fp_shards.h -- let parameters show their pieces of this rank's shard between passes. An operation that needs a whole
 * parameter then raises an error that names the shard. Plain C, under the rules of fp_torch.h. */
#pragma once

#include "tensor/fp_gradients.h"

FP_BEGIN_C

/* params[i].data = its piece of the shard; an empty tensor if the shard has nothing of it.
 *   marked = 1   the piece is 1-D, or with in_rows whole rows of the parameter. It is marked as a shard: operations on
 *                whole parameters (linear, conv) refuse it, and others that fail with it say why. On devices whose tensors
 *                cannot take the mark it is not marked
 *   marked = 0   the piece is the whole parameter, in the shape of the geometry
 * 0; -1, with nothing set: ValueError for a piece outside of the shard, TypeError for a parameter that cannot take its data. */
int fp_torch_set_shards(const fp_param_pieces *of, PyObject *shard, int marked);

/* Set the Python function explain(tensor): the text of the error (str), or None if tensor is no shard any more. A reference is
 * kept until the next call. */
void fp_torch_explain_shards(PyObject *explain);

FP_END_C
