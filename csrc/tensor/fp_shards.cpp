// tensor/fp_shards.cpp -- what torch's operations make of shards of parameters, found without a look in any of them.
//
// A marked tensor has a dispatch key of its own, which torch reserves for code outside of it and which nothing else uses.
// Its fallback falls through, which costs nothing: the dispatcher leaves it out when it looks for a kernel. The few
// operations that modules do with whole parameters have a kernel for it.
#include "tensor/fp_shards.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/reshape_ops.h>
#include <ATen/ops/view_ops.h>
#include <torch/library.h>

#include "tensor/fp_bridge.hpp"

namespace fp {
namespace {

constexpr c10::DispatchKey marked = c10::DispatchKey::DeferredInit;
const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, marked);

PyObject *explain = nullptr;

bool
is_marked(const at::Tensor &tensor)
{
    return tensor.defined() && tensor.key_set().has(marked);
}

// Raise what is to be said of a shard, if anything is.
void
refuse(const at::Tensor &tensor)
{
    if (!is_marked(tensor) || explain == nullptr) {
        return;
    }
    std::string text;
    {
        const WithGil gil;
        PyObject *object = THPVariable_Wrap(tensor);
        PyObject *said = object == nullptr ? nullptr : PyObject_CallOneArg(explain, object);
        const char *bytes = said == nullptr || said == Py_None ? nullptr : PyUnicode_AsUTF8(said);
        text = bytes == nullptr ? "" : bytes;
        Py_XDECREF(said);
        Py_XDECREF(object);
        PyErr_Clear();
    }
    TORCH_CHECK(text.empty(), text);
}

void
refuse(const c10::IValue &value)
{
    if (value.isTensor()) {
        refuse(value.toTensor());
    }
    else if (value.isTensorList()) {
        for (const at::Tensor &tensor : value.toTensorVector()) {
            refuse(tensor);
        }
    }
}

// For operations that take whole parameters.
void
refuse_all(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    for (const c10::IValue &value : torch::jit::last(*stack, op.schema().arguments().size())) {
        refuse(value);
    }
    op.redispatchBoxed(keys & after, stack);
}

template <class Argument>
void
refuse_if_tensor(const Argument &argument)
{
    if constexpr (std::is_same_v<Argument, at::Tensor>) {
        refuse(argument);
    }
}

// For operations that fit shards too, if they are the right ones.
template <class Op, class Schema = typename Op::schema> struct Tried;
template <class Op, class Result, class... Arguments> struct Tried<Op, Result(Arguments...)> {
    static Result call(c10::DispatchKeySet keys, Arguments... arguments)
    {
        try {
            return Op::redispatch(keys & after, arguments...);
        }
        catch (const c10::Error &) {
            (refuse_if_tensor(arguments), ...);
            throw;
        }
    }
};

TORCH_LIBRARY_IMPL(_, DeferredInit, library)
{
    library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library)
{
    for (const char *name : {"linear",
                             "bilinear",
                             "conv1d",
                             "conv1d.padding",
                             "conv2d",
                             "conv2d.padding",
                             "conv3d",
                             "conv3d.padding",
                             "conv_transpose1d",
                             "conv_transpose2d.input",
                             "conv_transpose3d.input",
                             "convolution",
                             "embedding",
                             "embedding_bag",
                             "embedding_bag.padding_idx",
                             "layer_norm",
                             "rms_norm",
                             "group_norm",
                             "batch_norm",
                             "instance_norm",
                             "prelu",
                             "lstm.input",
                             "lstm.data",
                             "gru.input",
                             "gru.data",
                             "rnn_tanh.input",
                             "rnn_tanh.data",
                             "rnn_relu.input",
                             "rnn_relu.data",
                             "lstm_cell",
                             "gru_cell",
                             "rnn_tanh_cell",
                             "rnn_relu_cell",
                             "_native_multi_head_attention",
                             "_transformer_encoder_layer_fwd"}) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_all>());
    }
    library.impl("addmm", TORCH_FN(Tried<at::_ops::addmm>::call));
    library.impl("bmm", TORCH_FN(Tried<at::_ops::bmm>::call));
    library.impl("matmul", TORCH_FN(Tried<at::_ops::matmul>::call));
    library.impl("mm", TORCH_FN(Tried<at::_ops::mm>::call));
    library.impl("mul.Tensor", TORCH_FN(Tried<at::_ops::mul_Tensor>::call));
    library.impl("reshape", TORCH_FN(Tried<at::_ops::reshape>::call));
    library.impl("view", TORCH_FN(Tried<at::_ops::view>::call));
}

} // namespace
} // namespace fp

extern "C" {

int
fp_torch_set_shard(PyObject *param, PyObject *piece_object)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &target = fp::unpack(param);
        const at::Tensor piece = fp::unpack(piece_object);
        at::Tensor shard = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(piece.storage()), piece.key_set().add(fp::marked), piece.dtype());
        shard.unsafeGetTensorImpl()->set_sizes_and_strides(piece.sizes(), piece.strides(), piece.storage_offset());
        const bool can_be = target.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(shard.key_set());
        target.set_data(can_be ? shard : piece); /* a device from outside of torch allows no other keys */
        return 0;
    });
}

void
fp_torch_explain_shards(PyObject *explain)
{
    Py_XSETREF(fp::explain, Py_NewRef(explain));
}

} // extern "C"
