/* tensor/fp_lent.h -- memory that others use by its address, which may not be freed or written to then. Plain C, as
 * fp_torch.h, whose rules hold. */
#ifndef FP_LENT_H
#define FP_LENT_H

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Somebody outside has got the address of tensor, and a reference to it: if flatparam frees and fills its storage, it
 * leaves that to them. 1; 0: it is another's, or no tensor; -1: error. */
int fp_torch_lend(PyObject *tensor);

/* The capsule of torch.Tensor.__dlpack_c_exchange_api__ such that what is exported through it is lent. New reference; the
 * same one if its version is another than this file knows. */
PyObject *fp_torch_lending_exchange(PyObject *capsule);

#ifdef __cplusplus
}
#endif

#endif
