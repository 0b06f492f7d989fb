// tensor/fp_views.cpp -- views of a flat tensor behind one autograd node, and the node's backward: packing.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "tensor/fp_convert.hpp"

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

// The elements of piece in the order in which view stores them, as a 1-D tensor; differentiable.
at::Tensor
in_storage_order(const at::Tensor &piece, const View &view)
{
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

struct ViewsBackward final : torch::autograd::Node {
    std::shared_ptr<const Geometry> geometry;
    at::TensorOptions options;

    std::string name() const override
    {
        return "FlatParamViewsBackward";
    }

    void reserve_inputs(size_t n)
    {
        input_metadata_.reserve(n);
    }

    bool has_hooks() noexcept
    {
        return !tensor_pre_hooks().empty() || !pre_hooks().empty() || !post_hooks().empty() ||
               !retains_grad_hooks().empty();
    }

    torch::autograd::variable_list apply(torch::autograd::variable_list &&grads) override
    {
        if (!task_should_compute_output(0) ||
            std::none_of(grads.begin(), grads.end(), [](const at::Tensor &grad) { return grad.defined(); })) {
            return {at::Tensor()};
        }
        check_gradients(*geometry, grads, name());
        const bool packable = !at::GradMode::is_enabled() && !fp_torch_modes_active() &&
                              std::all_of(grads.begin(), grads.end(), [this](const at::Tensor &grad) {
                                  return !grad.defined() || (is_plain_tensor(grad) &&
                                                             grad.scalar_type() == options.dtype().toScalarType() &&
                                                             grad.device() == options.device());
                              });
        if (!packable) {
            return {flatten_by_ops(*geometry, grads, options, 0.0)};
        }
        if (options.device().is_cpu()) {
            return {flatten_in_place(*geometry, grads, options, 0.0)};
        }
        const at::Tensor flat = at::empty({geometry->total}, options);
        pack_batched(flat, *geometry, grads, {});
        return {flat};
    }
};

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
flatten_by_ops(const Geometry &geometry, const std::vector<at::Tensor> &pieces, const at::TensorOptions &options,
               double fill)
{
    std::vector<at::Tensor> parts;
    parts.reserve(2 * pieces.size() + 1);
    int64_t end = 0;
    const auto add = [&](int64_t numel, double value) {
        if (numel > 0) {
            parts.push_back(at::full({numel}, value, options));
        }
    };
    for (size_t i = 0; i < pieces.size(); i++) {
        const View &view = geometry.views[i];
        add(view.offset - end, fill);
        if (pieces[i].defined()) {
            parts.push_back(in_storage_order(pieces[i], view));
        }
        else {
            add(view.numel, 0.0);
        }
        end = view.offset + view.numel;
    }
    add(geometry.total - end, fill);
    return at::cat(parts);
}

at::Tensor
flatten_in_place(const Geometry &geometry, const std::vector<at::Tensor> &pieces, const at::TensorOptions &options,
                 double fill)
{
    const at::Tensor flat = at::empty({geometry.total}, options);
    const at::Tensor fill_item = fill == 0.0 ? at::Tensor() : at::full({1}, fill, options);
    const Sources sources = sources_of(geometry, pieces);
    pack(flat, flat.scalar_type(), sources.segments, {}, fill_item.defined() ? fill_item.const_data_ptr() : nullptr);
    for (const size_t i : sources.strided) {
        const View &view = geometry.views[i];
        alias(flat, view.shape, view.stride, view.offset).copy_(pieces[i]);
    }
    return flat;
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

namespace {

// Lets out[i] be make(flat, i), new references, for each view of geometry; none is left there on failure.
template <class Prepare>
int
make_each(PyObject *flat_object, const fp_geometry *geometry, PyObject **out, Prepare &&prepare)
{
    size_t made = 0;
    const int status = fp::guarded(-1, [&] {
        const at::Tensor &flat = fp::unpack(flat_object);
        const fp::Geometry &shape = *geometry->shared;
        fp::check_memory(flat);
        TORCH_CHECK_VALUE(flat.dim() == 1 && flat.numel() == shape.total && flat.stride(0) == 1,
                          "expected the unsharded flat parameter of ", shape.total, " elements, got shape ",
                          flat.sizes());
        auto make = prepare(flat);
        for (; made < shape.views.size(); made++) {
            out[made] = make(made);
            if (out[made] == nullptr) {
                return -1;
            }
        }
        return 0;
    });
    while (status < 0 && made > 0) {
        Py_CLEAR(out[--made]);
    }
    return status;
}

// The views of one flat, behind one new node if it requires grad.
class Views {
  public:
    Views(const at::Tensor &flat, const fp_geometry *geometry)
        : flat_(flat), base_(flat.is_view() ? at::Tensor(flat._base()) : flat), places_(geometry->shared->views),
          tracked_(flat.requires_grad())
    {
        if (!tracked_) {
            return;
        }
        node_->geometry = geometry->shared;
        node_->options = flat.options();
        node_->add_next_edge(torch::autograd::impl::gradient_edge(flat));
        node_->reserve_inputs(places_.size());
    }

    // See fp_torch_make_views().
    void take_again(PyObject *const *spare, const char *idle)
    {
        spare_ = spare;
        taken_.assign(places_.size(), 0);
        fp::ViewsBackward *const earlier = tracked_ ? node_behind(spare[0]) : nullptr;
        if (earlier != nullptr && !earlier->has_hooks()) {
            for (size_t i = 0; i < places_.size(); i++) {
                taken_[i] = idle[i] != 0 && is_as_made(spare[i], earlier, i);
            }
        }
    }

    PyObject *operator()(size_t i)
    {
        if (!taken_.empty() && taken_[i]) {
            const at::Tensor &view = THPVariable_Unpack(spare_[i]);
            track(view);
            return Py_NewRef(spare_[i]);
        }
        const fp::View &place = places_[i];
        at::Tensor view = torch::autograd::make_variable_differentiable_view(
            fp::alias(flat_, place.shape, place.stride, flat_.storage_offset() + place.offset),
            torch::autograd::ViewInfo(base_, nullptr, nullptr), std::nullopt, /*shared_view_info=*/true,
            torch::autograd::CreationMeta::MULTI_OUTPUT_NODE);
        if (tracked_) {
            track(view);
        }
        return THPVariable_Wrap(std::move(view));
    }

  private:
    static torch::autograd::DifferentiableViewMeta *meta_of(PyObject *view)
    {
        return torch::autograd::impl::get_view_autograd_meta(THPVariable_Unpack(view));
    }

    static fp::ViewsBackward *node_behind(PyObject *view)
    {
        const auto *meta = meta_of(view);
        return meta == nullptr ? nullptr : dynamic_cast<fp::ViewsBackward *>(meta->grad_fn_.get());
    }

    bool is_as_made(PyObject *object, const fp::ViewsBackward *earlier, size_t i) const
    {
        const at::Tensor &view = THPVariable_Unpack(object);
        const auto *meta = meta_of(object);
        return meta != nullptr && view.use_count() == 1 && meta->grad_fn_.get() == earlier && meta->output_nr_ == i &&
               meta->hooks_.empty() && !meta->retains_grad_ && !meta->grad_.defined() && !meta->fw_grad_ &&
               meta->name_.empty() && meta->has_bw_view() &&
               meta->get_creation_meta() == torch::autograd::CreationMeta::MULTI_OUTPUT_NODE &&
               meta->get_backward_view().base_.unsafeGetTensorImpl() == base_.unsafeGetTensorImpl() &&
               fp::is_at(view, flat_, places_[i].shape, places_[i].stride, flat_.storage_offset() + places_[i].offset);
    }

    void track(const at::Tensor &view)
    {
        torch::autograd::impl::set_gradient_edge(view, {node_, node_->add_input_metadata(view)});
    }

    const at::Tensor flat_, base_;
    const std::vector<fp::View> &places_;
    const bool tracked_;
    decltype(fp::make_node<fp::ViewsBackward>()) node_ = fp::make_node<fp::ViewsBackward>();
    PyObject *const *spare_ = nullptr;
    std::vector<char> taken_;
};

} // namespace

extern "C" int
fp_torch_make_views(PyObject *flat_object, const fp_geometry *geometry, PyObject *const *spare, const char *idle,
                    PyObject **out)
{
    return make_each(flat_object, geometry, out, [&](const at::Tensor &flat) {
        auto views = std::make_unique<Views>(flat, geometry);
        if (spare != nullptr) {
            views->take_again(spare, idle);
        }
        return [views = std::move(views)](size_t i) { return (*views)(i); };
    });
}

extern "C" int
fp_torch_make_leaves(PyObject *flat_object, const fp_geometry *geometry, int requires_grad, PyObject **out)
{
    return make_each(flat_object, geometry, out, [&](const at::Tensor &flat) {
        return [&](size_t i) {
            const fp::View &place = geometry->shared->views[i];
            at::Tensor leaf = fp::alias(flat, place.shape, place.stride, flat.storage_offset() + place.offset);
            leaf.unsafeGetTensorImpl()->set_version_counter(torch::autograd::impl::version_counter(flat));
            leaf.set_requires_grad(requires_grad != 0);
            return THPVariable_Wrap(std::move(leaf));
        };
    });
}

extern "C" PyObject *
fp_torch_flatten(PyObject *const *tensors, const fp_geometry *geometry, double fill)
{
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        const fp::Geometry &shape = *geometry->shared;
        at::NoGradGuard no_grad;
        std::vector<at::Tensor> pieces = fp::unpack_all(tensors, static_cast<Py_ssize_t>(shape.views.size()));
        for (size_t i = 0; i < pieces.size(); i++) {
            TORCH_CHECK_VALUE(pieces[i].sizes() == c10::IntArrayRef(shape.views[i].shape) &&
                                  pieces[i].scalar_type() == pieces[0].scalar_type() &&
                                  pieces[i].device() == pieces[0].device(),
                              "expected tensor ", i, " to have shape ", c10::IntArrayRef(shape.views[i].shape),
                              " and dtype ", pieces[0].scalar_type(), " on ", pieces[0].device(), ", got ",
                              pieces[i].sizes(), ", ", pieces[i].scalar_type(), " on ", pieces[i].device());
        }
        const at::TensorOptions options = pieces[0].options();
        at::Tensor flat;
        if (!options.device().is_cpu()) {
            flat = fp::flatten_by_ops(shape, pieces, options, fill);
        }
        else {
            const fp::WithoutGil released;
            flat = fp::flatten_in_place(shape, pieces, options, fill);
        }
        return THPVariable_Wrap(std::move(flat));
    });
}
