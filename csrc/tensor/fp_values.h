/* tensor/fp_values.h -- the values of a tensor, looked at and not changed. Plain C, as fp_torch.h, whose rules hold. */
#ifndef FP_VALUES_H
#define FP_VALUES_H

#include <Python.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* fp_digest of a plain tensor on the host that is dense, in the order of its memory. */
int fp_torch_digest(PyObject *tensor, uint64_t *out);

#ifdef __cplusplus
}
#endif

#endif
