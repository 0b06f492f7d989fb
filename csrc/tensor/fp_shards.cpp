// tensor/fp_shards.cpp -- mark shards of parameters, and refuse operations that need whole ones; see fp_shards.h.
//
// A marked tensor has the dispatch key DeferredInit, which torch reserves for other code and which nothing else uses. Its
// fallback falls through, and the dispatcher then skips the key: other operations cost nothing more. The few operations
// that modules do with whole parameters have a kernel for it.
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
const c10::DispatchKeySet after_marked(c10::DispatchKeySet::FULL_AFTER, marked);

PyObject *explain = nullptr;

// If tensor is marked and explain() has a text for it, throw that as RuntimeError. An exception of explain() is thrown too:
// without the answer the operation could compute with a shard in the place of a parameter.
void
refuse(const at::Tensor &tensor)
{
    if (!tensor.defined() || !tensor.key_set().has(marked) || explain == nullptr) {
        return;
    }
    std::string text;
    {
        const WithGil gil;
        PyObject *object = THPVariable_Wrap(tensor);
        PyObject *said = object == nullptr ? nullptr : PyObject_CallOneArg(explain, object);
        const char *bytes = said == nullptr || said == Py_None ? nullptr : PyUnicode_AsUTF8(said);
        const bool failed = bytes == nullptr && said != Py_None;
        text = bytes == nullptr ? "" : bytes;
        Py_XDECREF(said);
        Py_XDECREF(object);
        if (failed) {
            python_error error;
            error.persist();
            throw error;
        }
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

// The kernel for operations that take whole parameters alone: refuse a shard before the operation.
void
refuse_all(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack)
{
    for (const c10::IValue &value : torch::jit::last(*stack, op.schema().arguments().size())) {
        refuse(value);
    }
    op.redispatchBoxed(keys & after_marked, stack);
}

template <class Argument>
void
refuse_if_tensor(const Argument &argument)
{
    if constexpr (std::is_same_v<Argument, at::Tensor>) {
        refuse(argument);
    }
}

// The kernel for operations that can fit shards, too: try, and explain a failure.
template <class Op, class Schema = typename Op::schema> struct Tried;
template <class Op, class Result, class... Arguments> struct Tried<Op, Result(Arguments...)> {
    static Result call(c10::DispatchKeySet keys, Arguments... arguments)
    {
        try {
            return Op::redispatch(keys & after_marked, arguments...);
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

// Operations of modules, on whole parameters.
constexpr const char *whole_operations[] = {
    // layers
    "linear", "bilinear", "embedding", "embedding_bag", "embedding_bag.padding_idx", "prelu",
    "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
    // convolutions
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    // norms
    "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
    // recurrent ones
    "lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
    "rnn_relu.data", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"};

TORCH_LIBRARY_IMPL(aten, DeferredInit, library)
{
    for (const char *name : whole_operations) {
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
fp_torch_set_shards(const fp_param_pieces *of, PyObject *shard_object, int marked)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const std::vector<fp::View> &views = of->geometry->shared->views;
        const int64_t *starts = of->starts, *numels = of->numels;
        const at::Tensor &whole =
            fp::unpack(shard_object); /* not used below: set_data() may run Python code, which may replace its data */
        const at::Tensor shard = fp::alias(whole, whole.sizes(), whole.strides(), whole.storage_offset());
        const std::vector<at::Tensor> targets = fp::unpack_all(of->params, of->n);
        const c10::DispatchKeySet keys = marked ? shard.key_set().add(fp::marked) : shard.key_set();
        const bool may_require_grad = torch::autograd::isDifferentiableType(shard.scalar_type());
        std::vector<at::Tensor> pieces; /* all are made and checked before the first parameter changes */
        for (size_t i = 0; i < targets.size(); i++) {
            const int64_t numel = std::max<int64_t>(numels[i], 0);
            std::vector<int64_t> shape(views[i].shape), stride(views[i].stride);
            TORCH_CHECK_TYPE(may_require_grad || !targets[i].requires_grad(), "parameter ", i,
                             " requires grad, which data of type ", shard.scalar_type(), " cannot have");
            TORCH_CHECK_VALUE(starts[i] >= 0 && numel <= shard.numel() - starts[i], "piece ", i,
                              " is outside of the shard of ", shard.numel(), " elements");
            TORCH_CHECK_VALUE(marked || numels[i] < 0 || numel == views[i].numel, "expected all ", views[i].numel,
                              " elements of parameter ", i, ", got ", numel);
            if (marked && (of->in_rows[i] == 0 || shape.empty())) {
                shape = {numel};
                stride = {1};
            }
            else if (marked && numels[i] < views[i].numel) {
                shape[0] = numel == 0 ? 0 : numel / (views[i].numel / shape[0]);
            }
            at::Tensor piece = numels[i] < 0 ? fp::real_empty(shape, shard.options())
                                             : fp::alias(shard, shape, stride, shard.storage_offset() + starts[i]);
            if (marked && targets[i].unsafeGetTensorImpl()->has_compatible_shallow_copy_type(
                              keys)) { /* tensors of some devices cannot take the mark */
                const auto *made = piece.unsafeGetTensorImpl();
                at::Tensor same = at::detail::make_tensor<c10::TensorImpl>(
                    c10::TensorImpl::VIEW, c10::Storage(piece.storage()), keys, piece.dtype());
                same.unsafeGetTensorImpl()->set_sizes_and_strides(made->sizes(), made->strides(),
                                                                  made->storage_offset());
                piece = std::move(same);
            }
            TORCH_CHECK_TYPE(targets[i].unsafeGetTensorImpl()->has_compatible_shallow_copy_type(piece.key_set()),
                             "parameter ", i, " is a tensor of another kind than the shard: it cannot take its data");
            pieces.push_back(std::move(piece));
        }
        for (size_t i = 0; i < targets.size(); i++) {
            targets[i].set_data(pieces[i]);
        }
    });
}

void
fp_torch_explain_shards(PyObject *explain)
{
    Py_XSETREF(fp::explain, Py_NewRef(explain));
}

} // extern "C"
