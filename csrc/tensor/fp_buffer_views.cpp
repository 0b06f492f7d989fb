// tensor/fp_buffer_views.cpp -- the views of one flat parameter: make them behind one node, and take user writes; see
// fp_flat_buffer.h.
#include "tensor/fp_flat_buffer.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tensor/fp_convert.hpp"

namespace fp {
namespace {

// Write values, which begin at element offset of the unsharded tensor, to this rank's shard. An element of the shard that is
// equal after a cast to the dtype of values stays, as the shard may be more precise. Returns whether an element has changed.
bool
write_to_shard(const fp_flat_buffer &flat, const at::Tensor &shard, int64_t offset, const at::Tensor &values)
{
    const int64_t begin = flat.primary.rank * flat.shard_numel;
    const int64_t first = std::max(begin, offset);
    const int64_t last = std::min(begin + flat.shard_numel, offset + values.numel());
    if (first >= last) {
        return false;
    }
    check_memory(shard, name_of(flat));
    check_memory(values, name_of(flat));
    const at::Tensor target = alias(shard, last - first, int64_t{1}, shard.storage_offset() + first - begin);
    const at::Tensor mine =
        alias(values, last - first, int64_t{1}, values.storage_offset() + first - offset).to(shard.device());
    const at::Tensor now = at::empty_like(mine);
    convert(now, target, {});
    if (has_same_bytes(now, mine)) {
        return false;
    }
    if (mine.scalar_type() == shard.scalar_type()) {
        target.copy_(mine);
        return true;
    }
    const auto bytes = mine.element_size();
    const at::ScalarType bits = bytes == 1 ? at::kByte : bytes == 2 ? at::kShort : bytes == 4 ? at::kInt : at::kLong;
    target.copy_(at::where(now.view(bits).eq(mine.view(bits)), target, mine.to(shard.scalar_type())));
    return true;
}

// Set requires_grad of the views' base. In no_grad torch takes it from the base for views of the views. A gradient of the base
// itself would not be reduced, so a backward that computes one is refused.
void
set_base_requires_grad(const at::Tensor &base, bool requires_grad, const std::string &unit)
{
    if (requires_grad == base.requires_grad()) {
        return;
    }
    base.set_requires_grad(requires_grad);
    if (requires_grad) {
        base.register_hook([unit](const at::Tensor &) {
            TORCH_CHECK(false, unit,
                        ": the base of its parameters (`_base`) was computed with, and the gradient of the base would "
                        "be lost: compute with the parameters");
        });
    }
}

/* Whether view has no place in the graph that the forward records: torch.utils.swap_tensors() has given it another tensor. */
bool
is_swapped(const fp_flat_buffer &flat, const at::Tensor &view)
{
    const auto *meta = torch::autograd::impl::get_autograd_meta(view);
    return flat.node && (meta == nullptr || meta->grad_fn_ != flat.node);
}

} // namespace

void
show_version(fp_flat_buffer &flat, PyObject *const *views)
{
    const int64_t version = flat.unsharded._version();
    if (version == flat.shown_version) {
        return;
    }
    for (size_t i = 0; views != nullptr && i < flat.geometry->views.size(); i++) {
        if (auto *meta = torch::autograd::impl::get_view_autograd_meta(THPVariable_Unpack(views[i]))) {
            meta->set_attr_version(static_cast<uint32_t>(version));
        }
    }
    flat.shown_version = version;
}

void
change_version(fp_flat_buffer &flat, PyObject *const *views)
{
    const bool seen = flat.seen_version == flat.unsharded._version();
    flat.unsharded.unsafeGetTensorImpl()->bump_version();
    flat.seen_version += seen;
    show_version(flat, views);
}

bool
is_view_at(const fp_flat_buffer &flat, PyObject *view, size_t i)
{
    return is_at(THPVariable_Unpack(view), flat.unsharded, flat.geometry->views[i]);
}

bool
has_same_bytes(const at::Tensor &a, const at::Tensor &b)
{
    return at::equal(a.view(at::kByte), b.view(at::kByte));
}

} // namespace fp

extern "C" {

int
fp_flat_buffer_views(fp_flat_buffer *flat, fp_unit_ref *ref, int index, int untracked, PyObject *leaf, PyObject **out)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        fp::NodePtr node;
        if (!untracked && leaf == nullptr) {
            node = fp::make_node<fp::ViewsBackward>(flat->geometry, ref->shared, index);
        }
        else if (!untracked) {
            node = fp::make_node<fp::ViewsBackward>(flat->geometry, fp::unpack(leaf));
            node->set_sequence_nr(UINT64_MAX); /* it serves later forwards, too: it runs as soon as it is ready */
        }
        const int status = untracked ? fp::make_leaves(flat->unsharded, *flat->geometry, out)
                                     : fp::make_views(flat->unsharded, *flat->geometry, node, out);
        if (status == 0) {
            fp::set_base_requires_grad(flat->unsharded, !untracked, ref->shared->name);
            flat->node = std::move(node);
            flat->unit = ref->shared;
        }
        return status;
    });
}

int
fp_flat_buffer_has_hooks(const fp_flat_buffer *flat) noexcept
{
    return flat->node && static_cast<fp::ViewsBackward &>(*flat->node).has_hooks() ? 1 : 0;
}

int
fp_flat_buffer_run_here(fp_flat_buffer *flat, PyObject *const *views)
{
    return fp::guarded(-1, [&] {
        if (flat->node) {
            static_cast<fp::ViewsBackward &>(*flat->node).run_on_current_stream(THPVariable_Unpack(views[0]));
        }
    });
}

int
fp_flat_buffer_has_node(const fp_flat_buffer *flat) noexcept
{
    return flat->node != nullptr;
}

void
fp_flat_buffer_run_after(fp_flat_buffer *flat, uint64_t began) noexcept
{
    if (flat->node) {
        flat->node->set_sequence_nr(began);
    }
}

int
fp_flat_buffer_is_reached(const fp_flat_buffer *flat) noexcept
{
    auto *node = flat->node.get();
    const auto *info = torch::autograd::get_current_graph_task_exec_info();
    if (node == nullptr || info == nullptr) {
        return 0;
    }
    if (info->empty()) { /* empty: the task runs all of its nodes */
        const auto *nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
        return nodes != nullptr && nodes->count(node) != 0;
    }
    const auto found = info->find(node);
    return found != info->end() && found->second.should_execute();
}

void
fp_flat_buffer_refuse_graphs(fp_flat_buffer *flat, PyObject *const *views)
{
    fp::change_version(*flat, views);
}

int
fp_flat_buffer_is_changed(const fp_flat_buffer *flat) noexcept
{
    return flat->unsharded._version() != flat->seen_version;
}

int
fp_flat_buffer_is_written(const fp_flat_buffer *flat, PyObject *const *views) noexcept
{
    return fp_flat_buffer_is_changed(flat) || fp_flat_buffer_moved_view(flat, views) >= 0;
}

Py_ssize_t
fp_flat_buffer_moved_view(const fp_flat_buffer *flat, PyObject *const *views) noexcept
{
    for (size_t i = 0; i < flat->geometry->views.size(); i++) {
        if (!fp::is_view_at(*flat, views[i], i)) {
            return static_cast<Py_ssize_t>(i);
        }
    }
    return -1;
}

int64_t
fp_flat_buffer_holders(const fp_flat_buffer *flat, PyObject *const *views) noexcept
{
    if (!flat->unsharded.defined()) {
        return 0;
    }
    int64_t holders = static_cast<int64_t>(flat->unsharded.storage().use_count());
    for (size_t i = 0; i < flat->geometry->views.size(); i++) { /* a graph may save a view, or a view of it */
        holders += static_cast<int64_t>(THPVariable_Unpack(views[i]).use_count());
    }
    return holders;
}

void
fp_flat_buffer_forget_written(fp_flat_buffer *flat) noexcept
{
    if (flat->unsharded.defined()) {
        flat->seen_version = flat->unsharded._version();
    }
}

int
fp_flat_buffer_take_written(fp_flat_buffer *flat, PyObject *shard_object, PyObject *const *views, int leaves,
                            Py_ssize_t *misfit)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        const size_t n = flat->geometry->views.size();
        *misfit = -1;
        fp::wait_for_gather(*flat);
        const bool whole = flat->is_gathered(), borrowed = flat->data == FP_DATA_BORROWED;
        bool changed = false;
        if (flat->unsharded._version() != flat->seen_version) {
            flat->seen_version = flat->unsharded._version();
            fp::show_version(*flat, views);
            if (whole) {
                changed = fp::write_to_shard(*flat, shard, 0, flat->unsharded_data);
            }
            else if (!borrowed) {
                *misfit = static_cast<Py_ssize_t>(n);
            }
        }
        std::vector<std::pair<size_t, at::Tensor>> given;
        for (size_t i = 0; i < n; i++) {
            if (fp::is_view_at(*flat, views[i], i)) {
                continue;
            }
            const fp::View &place = flat->geometry->views[i];
            const at::Tensor view = THPVariable_Unpack(views[i]);
            if (!fp::is_swapped(*flat, view) && fp::is_plain_tensor(view) &&
                view.sizes() == c10::IntArrayRef(place.shape) && view.scalar_type() == flat->unsharded.scalar_type() &&
                view.device() == flat->unsharded.device() && fp::has_memory(view)) {
                const at::Tensor values = at::empty({place.numel}, flat->unsharded_data.options());
                fp::alias(values, place.shape, place.stride, 0)
                    .copy_(fp::alias(view, view.sizes(), view.strides(), view.storage_offset()));
                given.emplace_back(i, values);
            }
            else {
                *misfit = static_cast<Py_ssize_t>(i);
                if (fp::is_swapped(*flat, view)) {
                    torch::autograd::impl::set_gradient_edge(view, {flat->node, static_cast<uint32_t>(i)});
                }
            }
            view.set_data(fp::alias(flat->unsharded, place));
        }
        if (leaves && borrowed && !given.empty()) {
            fp::leave_memory(*flat, shard_object, views);
        }
        for (const auto &[i, values] : given) {
            const fp::View &place = flat->geometry->views[i];
            changed = (!borrowed && fp::write_to_shard(*flat, shard, place.offset, values)) || changed;
            if (borrowed || whole) {
                fp::check_memory(flat->unsharded_data, fp::name_of(*flat));
                const at::Tensor target = fp::alias(flat->unsharded_data, place.numel, int64_t{1},
                                                    flat->unsharded_data.storage_offset() + place.offset);
                changed = (borrowed && !fp::has_same_bytes(target, values)) || changed;
                target.copy_(values);
            }
        }
        if (changed) {
            shard.unsafeGetTensorImpl()->bump_version();
        }
        if (whole && !given.empty()) {
            flat->secondary_shard.reset(); /* release() makes a new one of the gathered values */
        }
        return changed ? 1 : 0;
    });
}

} // extern "C"
