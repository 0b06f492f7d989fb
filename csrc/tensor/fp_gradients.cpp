// tensor/fp_gradients.cpp -- .grad of parameters as pieces of a shard's or a unit's gradient; see fp_gradients.h.
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tensor/fp_convert.hpp"
#include "tensor/fp_gradients.h"
#include "tensor/fp_graph.hpp"

namespace fp {
namespace {

// Set the piece of parameter i in whole, a gradient of the shard, to 0.
void
clear_piece(const at::Tensor &whole, const fp_param_pieces &of, size_t i)
{
    if (of.numels[i] > 0) {
        check_memory(whole);
        alias(whole, of.numels[i], int64_t{1}, whole.storage_offset() + of.starts[i]).zero_();
    }
}

// Drop the part of parameter i in the reduced gradient that is put aside.
void
clear_aside(const fp_put_aside &aside, const fp_param_pieces &of, size_t i)
{
    if (aside.deferred_reduced != nullptr && aside.has[i] != 0) {
        clear_piece(unpack(aside.deferred_reduced), of, i);
    }
    aside.has[i] = 0;
}

// grad as a dense tensor: a user may have set a sparse one.
at::Tensor
strided(const at::Tensor &grad)
{
    check_memory(grad);
    return grad.layout() == at::kStrided ? grad : grad.to_dense();
}

// A view of a 1-D tensor. offset: in its storage, in elements.
struct Place {
    c10::IntArrayRef sizes, strides;
    int64_t offset;
};

at::Tensor
at_place(const at::Tensor &whole, const Place &place)
{
    return alias(whole, place.sizes, place.strides, place.offset);
}

// Whether grad is the view of whole at that place.
bool
is_shown(const at::Tensor &grad, const at::Tensor &whole, const Place &place)
{
    return grad.defined() && is_plain_tensor(grad) && is_at(grad, whole, place.sizes, place.strides, place.offset);
}

// The place of parameter i in grad, a gradient of the shard: with the strides of the geometry if target has the parameter's
// whole shape, else in the shape of target.
Place
piece_of(const at::Tensor &grad, const at::Tensor &target, const fp_param_pieces &of, size_t i)
{
    const View &view = of.geometry->shared->views[i];
    const int64_t numel = std::max<int64_t>(of.numels[i], 0), offset = grad.storage_offset() + of.starts[i];
    if (numel == view.numel && target.sizes() == c10::IntArrayRef(view.shape)) {
        return {view.shape, view.stride, offset};
    }
    TORCH_CHECK_VALUE(target.numel() == numel && target.is_non_overlapping_and_dense(), "expected parameter ", i,
                      " to have ", numel, " elements, dense, or its shape ", c10::IntArrayRef(view.shape),
                      ", got shape ", target.sizes());
    return {target.sizes(), target.strides(), offset};
}

// The place of parameter i in the accumulated gradient. own < 0: that is the unsharded gradient; else the place is the
// piece of the shard, which begins at own.
Place
place_in(const at::Tensor &accumulated, const fp_param_pieces &of, size_t i, int64_t own)
{
    static constexpr int64_t none = 0, unit_stride = 1;
    const View &view = of.geometry->shared->views[i];
    if (own < 0) {
        return {view.shape, view.stride, accumulated.storage_offset() + view.offset};
    }
    return of.numels[i] > 0 ? Place{of.numels[i], unit_stride, accumulated.storage_offset() + own + of.starts[i]}
                            : Place{none, unit_stride, accumulated.storage_offset() + own};
}

// target = own, a gradient that a user has set: it may have any strides and layout, and lie in target.
void
take(const at::Tensor &target, const at::Tensor &own, size_t i)
{
    TORCH_CHECK_VALUE(own.sizes() == target.sizes(), "expected the gradient of parameter ", i, " to have shape ",
                      target.sizes(), ", got ", own.sizes());
    check_memory(target);
    const at::Tensor values = strided(own);
    target.copy_(values.is_alias_of(target) ? values.clone() : values);
}

at::Tensor
zeros_like_shard(const at::Tensor &shard, const at::Tensor &grad)
{
    return at::zeros({shard.numel()}, at::TensorOptions(grad.device()).dtype(grad.scalar_type()));
}

// Whether .grad of parameter i shows its part of the reduced gradient that is put aside.
bool
is_aside(const fp_put_aside &aside, const at::Tensor &param, const fp_param_pieces &of, size_t i)
{
    const at::Tensor &grad = param.unsafeGetTensorImpl()->grad();
    if (!grad.defined() || aside.deferred_reduced == nullptr || aside.has[i] == 0) {
        return false;
    }
    const at::Tensor &whole = unpack(aside.deferred_reduced);
    return is_shown(grad, whole, piece_of(whole, param, of, i));
}

// Put aside .grad of parameter i, a gradient of its piece, as its reduced gradient.
void
put_aside(fp_put_aside &aside, const at::Tensor &shard, const at::Tensor &param, const fp_param_pieces &of, size_t i)
{
    const at::Tensor own = param.unsafeGetTensorImpl()->grad();
    if (aside.deferred_reduced == nullptr) {
        aside.deferred_reduced = THPVariable_Wrap(zeros_like_shard(shard, own));
    }
    if (of.numels[i] > 0) {
        const at::Tensor &whole = unpack(aside.deferred_reduced);
        take(at_place(whole, piece_of(whole, param, of, i)), own, i);
    }
    aside.has[i] = static_cast<char>(of.numels[i] >= 0);
}

// Set to 0 the part of view in accumulated, which begins at element first of the unsharded gradient.
void
clear_range(const at::Tensor &accumulated, const View &view, int64_t first)
{
    const int64_t begin = std::max(view.offset - first, int64_t{0});
    const int64_t end = std::min(view.offset + view.numel - first, accumulated.numel());
    if (begin < end) {
        check_memory(accumulated);
        alias(accumulated, end - begin, int64_t{1}, accumulated.storage_offset() + begin).zero_();
    }
}

// The tensor of model's numel and device in which the gradients of all params with which[i] lie as pieces; undefined if
// there is no such tensor.
at::Tensor
shown_together(const std::vector<at::Tensor> &params, const fp_param_pieces &of, const char *which,
               const at::Tensor &model, at::ScalarType dtype)
{
    at::Tensor whole;
    for (size_t i = 0; i < params.size(); i++) {
        if (of.numels[i] < 0 || which[i] == 0) {
            continue;
        }
        const at::Tensor &own = params[i].unsafeGetTensorImpl()->grad();
        if (!own.defined() || !is_plain_tensor(own) || own.scalar_type() != dtype || own.device() != model.device() ||
            own.numel() != of.numels[i]) {
            return at::Tensor();
        }
        if (!whole.defined()) {
            const int64_t offset = own.storage_offset() - of.starts[i];
            const auto room = static_cast<int64_t>(memory_of(storage_of(own)) / own.itemsize());
            if (offset < 0 || offset + model.numel() > room) {
                return at::Tensor();
            }
            whole = alias(own, model.numel(), int64_t{1}, offset);
        }
        if (!is_shown(own, whole, piece_of(whole, params[i], of, i))) {
            return at::Tensor();
        }
    }
    return whole;
}

// What .grad of a parameter is: not its place in the accumulated gradient; that, unchanged; that, set to zeros in place; that,
// changed in place to other values.
enum class Shows { nothing, accumulated, zeros, written };

// A complex tensor as pairs of reals; others as they are.
at::Tensor
in_reals(const at::Tensor &tensor)
{
    return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// A gradient from Python, detached. ValueError if its storage was freed.
at::Tensor
given(PyObject *object)
{
    at::Tensor grad = unpack(object).detach();
    check_memory(grad);
    return grad;
}

// Whether a gradient that was changed in place has other values than zeros: a 0-dim tensor on its device.
at::Tensor
is_edited(const at::Tensor &grad, bool marked)
{
    check_memory(grad);
    return marked ? at::logical_or(grad.ne(0), in_reals(grad).signbit().view(grad.sizes())).any() : grad.any();
}

// What each parameter shows. marked: fp_gradients_mark_zeros() was called for accumulated. The host waits for a device once
// for all.
std::vector<Shows>
shown_of(const at::Tensor &accumulated, bool marked, const std::vector<at::Tensor> &params, const fp_param_pieces &of,
         int64_t own)
{
    std::vector<Shows> shows(params.size(), Shows::nothing);
    std::vector<at::Tensor> on_device;
    std::vector<size_t> places;
    for (size_t i = 0; i < params.size(); i++) {
        const at::Tensor &grad = params[i].unsafeGetTensorImpl()->grad();
        if (!is_shown(grad, accumulated, place_in(accumulated, of, i, own))) {
            continue;
        }
        shows[i] = grad._version() == 0 ? Shows::accumulated : Shows::zeros;
        if (grad._version() != 0 && grad.is_cpu()) {
            shows[i] = is_edited(grad, marked).item<bool>() ? Shows::written : Shows::zeros;
        }
        else if (grad._version() != 0) {
            on_device.push_back(is_edited(grad, marked));
            places.push_back(i);
        }
    }
    if (!places.empty()) {
        const at::Tensor answers = at::stack(on_device).cpu();
        for (size_t k = 0; k < places.size(); k++) {
            shows[places[k]] = answers.const_data_ptr<bool>()[k] ? Shows::written : Shows::zeros;
        }
    }
    return shows;
}

// Call the hooks of register_hook() with grad, and write their result to it.
void
call_hooks(torch::autograd::AutogradMeta &meta, const at::Tensor &grad, const char *name)
{
    torch::autograd::variable_list now = {grad};
    for (size_t k = 0; k < meta.hooks_.size(); k++) {
        if (dynamic_cast<const UnitHook *>(meta.hooks_[k].get()) == nullptr) {
            now = (*meta.hooks_[k])(now);
        }
    }
    check_memory(grad, name);
    if (!now.at(0).is_same(grad)) {
        grad.copy_(strided(now[0]));
    }
}

// Call the hooks of register_hook() of the parameters with which[i] with their pieces of grad, and write the results to it.
void
call_hooks_of(const std::vector<at::Tensor> &targets, const fp_param_pieces &of, const char *which,
              const at::Tensor &grad, const char *name)
{
    for (size_t i = 0; i < targets.size(); i++) {
        if (of.numels[i] >= 0 && which[i] != 0 && has_hooks_of_users(targets[i])) {
            auto *meta = torch::autograd::impl::get_autograd_meta(targets[i]);
            call_hooks(*meta, at_place(grad, piece_of(grad, targets[i], of, i)), name);
        }
    }
}

// Add one gradient of the shard. is_part: .grad must not keep its memory.
void
add_pieces(const std::vector<at::Tensor> &targets, const fp_param_pieces &of, const char *which,
           const at::Tensor &reduced, double divisor, at::ScalarType dtype, bool is_part)
{
    const at::Tensor together = shown_together(targets, of, which, reduced, dtype);
    if (together.defined()) {
        add_divided(together, reduced, divisor);
        return;
    }
    at::Tensor grad = divided(reduced, divisor, dtype);
    if (is_part && grad.is_same(reduced)) {
        grad = grad.clone();
    }
    std::vector<at::Tensor> pieces(targets.size()); /* all sums are made before the first .grad changes */
    for (size_t i = 0; i < targets.size(); i++) {
        if (of.numels[i] < 0 || which[i] == 0) {
            continue;
        }
        pieces[i] = at_place(grad, piece_of(grad, targets[i], of, i));
        const at::Tensor &earlier = targets[i].unsafeGetTensorImpl()->grad();
        if (earlier.defined()) {
            TORCH_CHECK_VALUE(earlier.sizes() == pieces[i].sizes(), "expected the gradient of parameter ", i,
                              " to have shape ", pieces[i].sizes(), ", got ", earlier.sizes());
            pieces[i].add_(strided(earlier));
        }
    }
    for (size_t i = 0; i < targets.size(); i++) {
        if (pieces[i].defined()) {
            targets[i].mutable_grad() = std::move(pieces[i]);
        }
    }
}

} // namespace
} // namespace fp

extern "C" {

int
fp_gradients_set(PyObject *tensor, PyObject *grad)
{
    return fp::guarded(-1, [&] {
        if (grad == nullptr || grad == Py_None) {
            fp::drop_grad(fp::unpack(tensor));
        }
        else {
            fp::unpack(tensor).mutable_grad() = fp::unpack(grad);
        }
    });
}

Py_ssize_t
fp_gradients_find_freed(const fp_param_pieces *of) noexcept
{
    Py_ssize_t i = 0;
    while (i < of->n && fp::has_memory(THPVariable_Unpack(of->params[i]).unsafeGetTensorImpl()->grad())) {
        i++;
    }
    return i;
}

int
fp_param_take_requires_grad(PyObject *view_object, PyObject *owner)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &view = THPVariable_Unpack(view_object); /* may be a subclass, or the tensor of an extension */
        if (!view.requires_grad() || !view.is_leaf()) {
            return 0;
        }
        const bool used = view.grad().defined() || torch::autograd::impl::try_get_grad_accumulator(view) != nullptr;
        fp::drop_grad(view);
        view.set_requires_grad(false);
        if (owner != nullptr) {
            fp::unpack(owner).set_requires_grad(true);
        }
        return used ? 2 : 1;
    });
}

int
fp_gradients_add_pieces(const fp_param_pieces *of, const char *which, const fp_reduced *reduced, const char *name)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &all = fp::unpack(reduced->tensor);
        const auto dtype = reduced->dtype < 0 ? all.scalar_type() : static_cast<at::ScalarType>(reduced->dtype);
        const std::vector<at::Tensor> targets = fp::unpack_all(of->params, of->n);
        std::vector<at::Tensor> hooked; /* with hooks of register_post_accumulate_grad_hook() */
        bool changes = false;           /* one has hooks of register_hook() */
        for (size_t i = 0; name != nullptr && i < targets.size(); i++) {
            const auto *meta = torch::autograd::impl::get_autograd_meta(targets[i]);
            if (meta == nullptr || of->numels[i] < 0 || which[i] == 0) {
                continue;
            }
            if (meta->post_acc_grad_hooks_ != nullptr) {
                hooked.push_back(targets[i]);
            }
            changes = changes || fp::has_hooks_of_users(targets[i]);
        }
        const int64_t n = std::max(reduced->parts, 1), numel = all.numel() / n;
        const double divisor = changes ? 1.0 : reduced->divisor;
        std::vector<at::Tensor> parts;
        for (int64_t k = 0; k < n; k++) { /* all hooks have run before the first .grad changes */
            parts.push_back(n == 1 ? all : fp::alias(all, numel, int64_t{1}, all.storage_offset() + k * numel));
            if (changes) {
                parts.back() = fp::divided(std::move(parts.back()), reduced->divisor, dtype);
                fp::call_hooks_of(targets, *of, which, parts.back(), name);
            }
        }
        for (const at::Tensor &part : parts) {
            fp::add_pieces(targets, *of, which, part, divisor, dtype, n > 1);
        }
        for (const at::Tensor &target : hooked) {
            const auto &hook = torch::autograd::impl::get_autograd_meta(target)->post_acc_grad_hooks_;
            if (hook != nullptr && target.grad().defined()) {
                (*hook)(target);
            }
        }
    });
}

PyObject *
fp_gradients_collect(const fp_param_pieces *of, PyObject *shard_object, char *has)
{
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        const std::vector<at::Tensor> targets = fp::unpack_all(of->params, of->n);
        at::Tensor some;
        for (size_t i = 0; i < targets.size(); i++) {
            const at::Tensor &own = targets[i].unsafeGetTensorImpl()->grad();
            has[i] = static_cast<char>(own.defined() && of->numels[i] >= 0);
            some = has[i] != 0 ? own : some;
        }
        if (!some.defined()) {
            Py_RETURN_NONE;
        }
        at::Tensor all = fp::shown_together(targets, *of, has, shard, shard.scalar_type());
        if (all.defined()) {
            return THPVariable_Wrap(std::move(all));
        }
        all = fp::zeros_like_shard(shard, some);
        for (size_t i = 0; i < targets.size(); i++) {
            if (has[i] != 0 && of->numels[i] > 0) {
                fp::take(fp::at_place(all, fp::piece_of(all, targets[i], *of, i)), targets[i].grad(), i);
            }
        }
        return THPVariable_Wrap(std::move(all));
    });
}

int
fp_gradients_clear_piece(const fp_param_pieces *of, Py_ssize_t i, PyObject *grad)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        fp::clear_piece(fp::unpack(grad), *of, static_cast<size_t>(i));
    });
}

int
fp_gradients_show_accumulated(const fp_param_pieces *of, const char *which, PyObject *accumulated_object, int64_t own)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &accumulated = fp::unpack(accumulated_object);
        const std::vector<at::Tensor> targets = fp::unpack_all(of->params, of->n);
        for (size_t i = 0; i < targets.size(); i++) {
            if (which[i] != 0) {
                targets[i].mutable_grad() = fp::at_place(accumulated, fp::place_in(accumulated, *of, i, own));
            }
        }
    });
}

int
fp_gradients_mark_zeros(PyObject *accumulated_object)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor accumulated = fp::in_reals(fp::given(accumulated_object));
        accumulated.masked_fill_(accumulated.eq(0), -0.0);
    });
}

int
fp_gradients_is_zeroed(PyObject *grad_object)
{
    return fp::guarded(-1, [&] { return fp::is_edited(fp::given(grad_object), true).item<bool>() ? 0 : 1; });
}

Py_ssize_t
fp_gradients_check_accumulated(const fp_param_pieces *of, PyObject *accumulated_object, PyObject *shard_object,
                               fp_put_aside *put_aside, int drops_zeros)
{
    return fp::guarded<Py_ssize_t>(-1, [&]() -> Py_ssize_t {
        const fp::Plainly plainly;
        const at::Tensor &accumulated = fp::unpack(accumulated_object), &shard = fp::unpack(shard_object);
        fp_put_aside &aside = *put_aside;
        const bool is_sharded = shard.numel() != of->geometry->shared->total;
        const bool has_reduced = aside.deferred_reduced != nullptr;
        const std::vector<at::Tensor> targets = fp::unpack_all(of->params, of->n);
        fp::check_memory(accumulated);
        const std::vector<fp::Shows> shows = fp::shown_of(accumulated, has_reduced, targets, *of, -1);
        Py_ssize_t shown = 0;
        for (size_t i = 0; i < targets.size(); i++) {
            const at::Tensor &own = targets[i].unsafeGetTensorImpl()->grad();
            const bool frozen = !targets[i].requires_grad();
            aside.frozen_share[i] = 0;
            if (shows[i] == fp::Shows::zeros) {
                fp::clear_aside(aside, *of, i);
                if (drops_zeros) {
                    continue;
                }
            }
            if (shows[i] != fp::Shows::nothing) {
                if (shows[i] == fp::Shows::written && has_reduced) {
                    return -2 - static_cast<Py_ssize_t>(i);
                }
                aside.frozen_share[i] = static_cast<char>(frozen);
                shown++;
                continue;
            }
            at::Tensor place = fp::at_place(accumulated, fp::place_in(accumulated, *of, i, -1));
            if (fp::is_aside(aside, targets[i], *of, i)) {
                place.zero_(); /* it was frozen when the accumulated gradient was shown */
                continue;
            }
            if (own.defined() && own.has_storage() &&
                (own.is_alias_of(accumulated) ||
                 (aside.deferred_reduced != nullptr && own.is_alias_of(fp::unpack(aside.deferred_reduced))))) {
                targets[i].mutable_grad() = fp::strided(own).clone(); /* a copy: its memory is cleared below */
            }
            if (own.defined() && !is_sharded && !frozen && own.sizes() == place.sizes()) {
                fp::take(place, own, i); /* the user's gradient is reduced instead */
                fp::clear_aside(aside, *of, i);
                shown++;
            }
            else {
                place.zero_();
                fp::clear_aside(aside, *of, i);
                if (own.defined()) {
                    fp::put_aside(aside, shard, targets[i], *of, i);
                }
            }
        }
        return shown;
    });
}

Py_ssize_t
fp_gradients_check_pieces(const fp_param_pieces *of, PyObject *accumulated_object, PyObject *shard_object,
                          fp_put_aside *put_aside, int64_t first, int64_t own, const char *name)
{
    return fp::guarded<Py_ssize_t>(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &accumulated = fp::unpack(accumulated_object), &shard = fp::unpack(shard_object);
        fp_put_aside &aside = *put_aside;
        const std::vector<at::Tensor> targets = fp::unpack_all(of->params, of->n);
        const std::vector<fp::Shows> shows =
            fp::shown_of(accumulated, aside.deferred_reduced != nullptr, targets, *of, own);
        Py_ssize_t shown = 0;
        for (size_t i = 0; i < targets.size(); i++) {
            const at::Tensor &grad = targets[i].unsafeGetTensorImpl()->grad();
            aside.frozen_share[i] = 0;
            if (shows[i] == fp::Shows::accumulated) {
                aside.frozen_share[i] = static_cast<char>(!targets[i].requires_grad());
                shown++;
                continue;
            }
            if (fp::is_aside(aside, targets[i], *of, i)) {
                continue; /* it was frozen when the accumulated gradient was shown */
            }
            if (grad.defined() && shows[i] == fp::Shows::nothing && !targets[i].requires_grad()) {
                fp::clear_aside(aside, *of, i);
                fp::put_aside(aside, shard, targets[i], *of, i);
                continue;
            }
            TORCH_CHECK_VALUE(!grad.defined() || shows[i] == fp::Shows::zeros, name, ": the gradient of parameter ", i,
                              " was changed between micro-batches in no_sync. There ",
                              "it is a sum over some of the ranks only: it can be cleared, on all ranks alike, not ",
                              "edited");
            fp::clear_aside(aside, *of, i);
            fp::clear_range(accumulated, of->geometry->shared->views[i], first);
            aside.cleared[i] = static_cast<char>(aside.cleared[i] || of->numels[i] > 0);
        }
        return shown;
    });
}

int
fp_gradients_clear_accumulated(const fp_geometry *geometry, Py_ssize_t i, PyObject *accumulated, int64_t first)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        fp::clear_range(fp::unpack(accumulated), geometry->shared->views[static_cast<size_t>(i)], first);
    });
}

int
fp_gradients_drop_frozen(fp_gradients *gradients, PyObject *const *params, Py_ssize_t n)
{
    return fp::guarded(-1, [&] {
        for (Py_ssize_t i = 0; i < n; i++) {
            at::Tensor &grad = gradients->list[static_cast<size_t>(i)];
            if (grad.defined() && !THPVariable_Unpack(params[i]).requires_grad()) {
                grad.reset();
            }
        }
    });
}

int64_t
fp_param_versions(PyObject *const *tensors, const int64_t *numels, Py_ssize_t n) noexcept
{
    int64_t sum = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const c10::VariableVersion &version = THPVariable_Unpack(tensors[i]).unsafeGetTensorImpl()->version_counter();
        const bool counts = version.enabled() && (numels == nullptr || numels[i] > 0);
        sum += counts ? static_cast<int64_t>(version.current_version()) : 0;
    }
    return sum;
}

Py_ssize_t
fp_param_moved(const fp_param_pieces *of, PyObject *shard_object) noexcept
{
    Py_ssize_t i = 0;
    try {
        const at::Tensor &shard = THPVariable_Unpack(shard_object);
        for (; i < of->n; i++) {
            const at::Tensor &param = THPVariable_Unpack(of->params[i]);
            if (of->numels[i] <= 0) {
                if (param.numel() != 0) {
                    return i;
                }
                continue;
            }
            const fp::View &view = of->geometry->shared->views[static_cast<size_t>(i)];
            const bool as_put = param.dim() == static_cast<int64_t>(view.shape.size()) ? fp::same_layout(param, view)
                                                                                       : param.is_contiguous();
            if (!as_put || !fp::is_piece(param, shard, of->starts[i], of->numels[i]) ||
                param.dtype() != shard.dtype()) {
                return i;
            }
        }
    }
    catch (...) { /* data without a layout or memory: not a piece of ours */
        return i;
    }
    return -1;
}

int
fp_param_requires_grad(PyObject *tensor) noexcept
{
    return THPVariable_Unpack(tensor).requires_grad();
}

int
fp_param_is_low(PyObject *tensor) noexcept
{
    return fp::is_low(THPVariable_Unpack(tensor).scalar_type());
}

int
fp_param_is_tensor(PyObject *object) noexcept
{
    return fp::is_tensor(object) ? 1 : 0;
}

} // extern "C"
