// tensor/fp_views.cpp -- make views of a flat tensor behind one autograd node; and the reverse, flatten by torch's operations.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "tensor/fp_convert.hpp"
#include "tensor/fp_graph.hpp"

namespace fp {

bool
same_layout(const at::Tensor &tensor, const View &view)
{
    if (view.contiguous) {
        return tensor.is_contiguous();
    }
    for (int64_t d = 0; d < tensor.dim(); d++) {
        if (tensor.size(d) != 1 && tensor.stride(d) != view.stride[static_cast<size_t>(d)]) {
            return false;
        }
    }
    return true;
}

namespace {

// piece as a 1-D tensor in view's order; differentiable.
at::Tensor
in_storage_order(const at::Tensor &piece, const View &view)
{
    check_memory(piece);
    const at::Tensor dense = piece.layout() == at::kStrided ? piece : piece.to_dense();
    if (view.contiguous) {
        return dense.reshape({-1});
    }
    std::vector<int64_t> order(view.shape.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return view.stride[static_cast<size_t>(a)] > view.stride[static_cast<size_t>(b)];
    });
    return dense.permute(order).reshape({-1});
}

} // namespace

void
check_gradients(const Geometry &geometry, const std::vector<at::Tensor> &gradients, const std::string &what)
{
    const std::vector<View> &views = geometry.views;
    TORCH_CHECK_VALUE(gradients.size() == views.size(), what, " expected ", views.size(), " gradients, got ",
                      gradients.size());
    for (size_t i = 0; i < views.size(); i++) {
        TORCH_CHECK_VALUE(!gradients[i].defined() || gradients[i].sizes() == c10::IntArrayRef(views[i].shape), what,
                          " expected gradient ", i, " to have shape ", c10::IntArrayRef(views[i].shape), ", got ",
                          gradients[i].sizes());
    }
}

at::Tensor
alias(const at::Tensor &source, c10::IntArrayRef shape, c10::IntArrayRef stride, int64_t offset)
{
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(source.storage()),
                                                               source.key_set(), source.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(shape, stride, offset);
    return view;
}

at::Tensor
flatten_by_ops(const Geometry &geometry, const std::vector<at::Tensor> &pieces, const at::TensorOptions &options)
{
    std::vector<at::Tensor> parts;
    parts.reserve(2 * pieces.size() + 1);
    int64_t end = 0;
    const auto add_zeros = [&](int64_t numel) {
        if (numel > 0) {
            parts.push_back(at::zeros({numel}, options));
        }
    };
    for (size_t i = 0; i < pieces.size(); i++) {
        const View &view = geometry.views[i];
        add_zeros(view.offset - end);
        if (pieces[i].defined()) {
            parts.push_back(in_storage_order(pieces[i], view));
        }
        else {
            add_zeros(view.numel);
        }
        end = view.offset + view.numel;
    }
    add_zeros(geometry.total - end);
    return at::cat(parts);
}

} // namespace fp

extern "C" int
fp_torch_modes_active(void) noexcept
{
    using c10::DispatchKey;
    // Dense: libtorch's own guards may leave it there, where it changes nothing.
    static const c10::DispatchKeySet usual =
        c10::default_included_set | c10::autocast_dispatch_keyset | c10::DispatchKeySet(DispatchKey::Dense);
    return c10::impl::dispatch_mode_enabled() || at::impl::torch_function_mode_enabled() ||
           torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr ||
           (c10::impl::tls_local_dispatch_key_set().included_ - usual).highestFunctionalityKey() !=
               DispatchKey::Undefined; // backends alone are no mode
}

namespace fp {
namespace {

void
check_flat(const at::Tensor &flat, const Geometry &geometry)
{
    TORCH_CHECK_VALUE(flat.dim() == 1 && flat.numel() == geometry.total && flat.stride(0) == 1,
                      "expected the unsharded flat parameter of ", geometry.total, " elements, got shape ",
                      flat.sizes());
}

// out[i] = make(i), a new reference, for i < n. On failure none is left in out.
template <class Make>
int
make_each(size_t n, PyObject **out, Make &&make)
{
    size_t made = 0;
    const int status = guarded(-1, [&] {
        for (; made < n; made++) {
            out[made] = make(made);
            if (out[made] == nullptr) {
                return -1;
            }
        }
        return 0;
    });
    while (status < 0 && made > 0) {
        made--;
        Py_CLEAR(out[made]); // a macro, which may evaluate this twice
    }
    return status;
}

// The spare views of fp_torch_make_views() that can be used again: still as they were made, and nothing refers to them.
class Spare {
  public:
    Spare(PyObject *const *views, const char *idle, const at::Tensor &flat, const at::Tensor &base,
          const Geometry &geometry)
        : views_(views)
    {
        ViewsBackward *const earlier = views == nullptr ? nullptr : node_behind(views[0]);
        if (earlier == nullptr || earlier->has_hooks()) {
            return;
        }
        fits_.resize(geometry.views.size());
        for (size_t i = 0; i < fits_.size(); i++) {
            fits_[i] = idle[i] != 0 && is_as_made(THPVariable_Unpack(views[i]), earlier, i, base) &&
                       is_at(THPVariable_Unpack(views[i]), flat, geometry.views[i]);
        }
    }

    // Spare view i, borrowed; null: make a new one.
    PyObject *operator[](size_t i) const
    {
        return !fits_.empty() && fits_[i] ? views_[i] : nullptr;
    }

  private:
    static ViewsBackward *node_behind(PyObject *view)
    {
        const auto *meta = torch::autograd::impl::get_view_autograd_meta(THPVariable_Unpack(view));
        return meta == nullptr ? nullptr : dynamic_cast<ViewsBackward *>(meta->grad_fn_.get());
    }

    static bool is_as_made(const at::Tensor &view, const ViewsBackward *earlier, size_t i, const at::Tensor &base)
    {
        const auto *meta = torch::autograd::impl::get_view_autograd_meta(view);
        return meta != nullptr && view.use_count() == 1 && meta->grad_fn_.get() == earlier && meta->output_nr_ == i &&
               meta->hooks_.empty() && !meta->retains_grad_ && !meta->grad_.defined() && !meta->fw_grad_ &&
               meta->name_.empty() && meta->has_bw_view() &&
               meta->get_creation_meta() == torch::autograd::CreationMeta::MULTI_OUTPUT_NODE &&
               meta->get_backward_view().base_.unsafeGetTensorImpl() == base.unsafeGetTensorImpl();
    }

    PyObject *const *views_;
    std::vector<char> fits_;
};

} // namespace

int
make_views(const at::Tensor &flat, const Geometry &geometry, const NodePtr &node, PyObject **out,
           PyObject *const *spare_views, const char *idle)
{
    check_flat(flat, geometry);
    const at::Tensor base = flat.is_view() ? at::Tensor(flat._base()) : flat;
    const Spare spare(node ? spare_views : nullptr, idle, flat, base, geometry);
    const auto track = [&](const at::Tensor &view) {
        torch::autograd::impl::set_gradient_edge(view, {node, node->add_input_metadata(view)});
    };
    return make_each(geometry.views.size(), out, [&](size_t i) {
        if (PyObject *again = spare[i]) {
            track(THPVariable_Unpack(again));
            return Py_NewRef(again);
        }
        at::Tensor view = torch::autograd::make_variable_differentiable_view(
            alias(flat, geometry.views[i]), torch::autograd::ViewInfo(base, nullptr, nullptr), std::nullopt,
            /*shared_view_info=*/true, torch::autograd::CreationMeta::MULTI_OUTPUT_NODE);
        if (node) {
            track(view);
        }
        return THPVariable_Wrap(std::move(view));
    });
}

int
make_leaves(const at::Tensor &flat, const Geometry &geometry, PyObject **out)
{
    check_flat(flat, geometry);
    return make_each(geometry.views.size(), out, [&](size_t i) {
        at::Tensor leaf = alias(flat, geometry.views[i]);
        leaf.unsafeGetTensorImpl()->set_version_counter(torch::autograd::impl::version_counter(flat));
        return THPVariable_Wrap(std::move(leaf));
    });
}

} // namespace fp

extern "C" int
fp_torch_make_views(PyObject *flat_object, const fp_geometry *geometry, PyObject *const *spare, const char *idle,
                    PyObject **out)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &flat = fp::unpack(flat_object);
        fp::check_memory(flat);
        const fp::NodePtr node =
            flat.requires_grad() ? fp::NodePtr(fp::make_node<fp::ViewsBackward>(geometry->shared, flat)) : nullptr;
        return fp::make_views(flat, *geometry->shared, node, out, spare, idle);
    });
}
