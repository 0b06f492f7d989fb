// tensor/fp_values.cpp -- the values of a tensor, looked at and not changed.
#include <ATen/core/Tensor.h>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_values.h"

extern "C" {
#include "core/fp_digest.h"

int
fp_torch_digest(PyObject *object, uint64_t *out)
{
    return fp::guarded(-1, [&] {
        TORCH_CHECK_TYPE(fp_torch_is_plain(object), "expected a plain dense tensor, got ", Py_TYPE(object)->tp_name);
        const at::Tensor &tensor = fp::unpack(object);
        TORCH_CHECK_TYPE(tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense(),
                         "expected a dense tensor on the host, got strides ", tensor.strides(), " on ",
                         tensor.device());
        const size_t bytes = tensor.nbytes();
        const size_t room = static_cast<size_t>(fp_torch_storage_numel(object)) * tensor.element_size();
        const size_t begin = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
        TORCH_CHECK(bytes == 0 || begin + bytes <= room, "the tensor's storage is freed, or too small for it");
        *out = fp_digest(bytes == 0 ? nullptr : tensor.const_data_ptr(), bytes);
        return 0;
    });
}

} // extern "C"
