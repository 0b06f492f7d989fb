// tensor/fp_tensors.cpp -- the geometry; read and set data, gradients and storages of many tensors at once. See fp_torch.h.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "tensor/fp_bridge.hpp"

extern "C" {
#include "core/fp_digest.h"
}

namespace fp {

at::Tensor
real_empty(c10::IntArrayRef shape, const at::TensorOptions &options)
{
    const c10::impl::ExcludeDispatchKeyGuard no_mode(c10::python_ks);
    return at::empty(shape, options);
}

bool
is_plain_tensor(const at::Tensor &tensor)
{
    using c10::DispatchKeySet;
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta() || tensor.is_inference() ||
        tensor.is_quantized() || tensor.is_nested() || !tensor.has_storage()) {
        return false;
    }
    const DispatchKeySet special(
        {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched,
         c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return !tensor.key_set().has_any(special) && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

size_t
memory_of(c10::StorageImpl *storage)
{
    return address_of(storage) == nullptr ? 0 : storage->nbytes();
}

// The allocator for storage's memory. A storage that torch has moved to shared memory has none; it gets the device's.
static c10::Allocator *
allocator_of(const c10::StorageImpl *storage)
{
    c10::Allocator *const own = const_cast<c10::StorageImpl *>(storage)->allocator();
    return own != nullptr ? own : c10::GetAllocator(storage->device_type());
}

bool
has_own_memory(const c10::StorageImpl *storage)
{
    return storage->resizable() && const_cast<c10::StorageImpl *>(storage)->allocator() != nullptr;
}

void
resize_storage(c10::StorageImpl *storage, size_t bytes, const char *reason, bool keeps_size, c10::DataPtr given)
{
    if (storage->nbytes() != bytes || memory_of(storage) != bytes) {
        TORCH_CHECK(storage->resizable(), "this storage cannot be resized: it borrows its memory");
        const c10::OptionalDeviceGuard device(storage->device());
        storage->set_data_ptr_noswap(bytes == 0               ? c10::DataPtr(nullptr, storage->device())
                                     : given.get() != nullptr ? std::move(given)
                                                              : allocator_of(storage)->allocate(bytes));
    }
    const bool guarded = set_freed_reason(storage, bytes == 0 ? reason : nullptr);
    if (!(guarded && keeps_size)) {
        storage->set_nbytes(bytes);
    }
    if (bytes == 0) {
        note_reused(storage);
    }
}

size_t
bytes_for(const at::Tensor &tensor)
{
    return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                            static_cast<size_t>(tensor.storage_offset()));
}

bool
has_memory(const at::Tensor &tensor)
{
    return !tensor.has_storage() || tensor.is_meta() || tensor.is_nested() ||
           tensor.key_set().has(c10::DispatchKey::Python) ||
           tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
           memory_of(storage_of(tensor)) >= bytes_for(tensor);
}

void
check_memory(const at::Tensor &tensor, const char *name)
{
    TORCH_CHECK_VALUE(has_memory(tensor), name == nullptr ? "" : name, name == nullptr ? "" : ": ",
                      "expected a tensor with memory for its ", tensor.numel(), " elements, got one whose storage has ",
                      memory_of(storage_of(tensor)), " bytes of ", bytes_for(tensor),
                      ": it was freed or resized outside of flatparam, and its values are lost");
}

// a == b. The operator calls memcmp, which takes longer for a few numbers.
static bool
are_same(c10::IntArrayRef a, c10::IntArrayRef b)
{
    bool same = a.size() == b.size();
    for (size_t i = 0; same && i < a.size(); i++) {
        same = a.data()[i] == b.data()[i];
    }
    return same;
}

bool
is_at(const at::Tensor &tensor, const at::Tensor &source, c10::IntArrayRef shape, c10::IntArrayRef stride,
      int64_t offset)
{
    return storage_of(tensor) == storage_of(source) && tensor.storage_offset() == offset &&
           tensor.dtype() == source.dtype() && are_same(tensor.sizes(), shape) && are_same(tensor.strides(), stride);
}

namespace {

// Throw TypeError unless the n objects are plain tensors whose set_data() takes source's data.
void
check_targets(PyObject *const *objects, Py_ssize_t n, const at::Tensor &source)
{
    const bool may_require_grad = torch::autograd::isDifferentiableType(source.scalar_type());
    for (Py_ssize_t i = 0; i < n; i++) {
        const bool requires_grad = unpack(objects[i]).requires_grad();
        TORCH_CHECK_TYPE(may_require_grad || !requires_grad, "tensor ", i, " requires grad, which data of type ",
                         source.scalar_type(), " cannot have");
    }
}

// A second tensor over source's memory, with its version counter. A callback that gives source other data does not change it.
at::Tensor
pinned_down(const at::Tensor &source)
{
    at::Tensor same = alias(source, source.sizes(), source.strides(), source.storage_offset());
    same.unsafeGetTensorImpl()->set_version_counter(torch::autograd::impl::version_counter(source));
    return same;
}

// tensor.data = data. The release of the old data may run Python code, which may free tensor (torch.utils.swap_tensors).
void
set_data(const at::Tensor &tensor, const at::Tensor &data)
{
    const at::Tensor kept = tensor;
    kept.set_data(data);
}

// Move tensor to its place in source's storage, unless it is there. As with .data, it may require grad.
void
point(const at::Tensor &tensor, const at::Tensor &source, c10::IntArrayRef shape, c10::IntArrayRef stride,
      int64_t offset)
{
    if (!is_at(tensor, source, shape, stride, offset)) {
        set_data(tensor, alias(source, shape, stride, offset));
    }
}

void
check_total(const at::Tensor &flat, const Geometry &geometry, const char *what)
{
    TORCH_CHECK_VALUE(flat.dim() == 1 && flat.numel() == geometry.total && flat.is_contiguous(), "expected ", what,
                      " of ", geometry.total, " elements, got shape ", flat.sizes());
    check_memory(flat, what);
}

void
check_pieces(const at::Tensor &shard, Py_ssize_t n, const int64_t *starts, const int64_t *numels, const char *what)
{
    TORCH_CHECK_VALUE(shard.dim() == 1 && shard.is_contiguous(), "expected ", what, " to be 1-D, got shape ",
                      shard.sizes());
    for (Py_ssize_t i = 0; i < n; i++) {
        TORCH_CHECK_VALUE(numels[i] < 0 || (starts[i] >= 0 && starts[i] <= shard.numel() - numels[i]), "piece ", i,
                          " [", starts[i], ", ", starts[i], " + ", numels[i], ") is outside ", what, " of ",
                          shard.numel(), " elements");
    }
    check_memory(shard, what);
}

bool
same_storage(const at::Tensor &a, const at::Tensor &b)
{
    return storage_of(a) == storage_of(b) || address_of(storage_of(a)) == address_of(storage_of(b));
}

// param.grad = the view of grad; where torch would refuse that assignment, or by_data, set the data of the present gradient.
void
set_grad(const at::Tensor &param, const at::Tensor &grad, c10::IntArrayRef shape, c10::IntArrayRef stride,
         int64_t offset, bool by_data)
{
    const bool matches =
        !by_data && param.sizes() == shape && param.dtype() == grad.dtype() && param.device() == grad.device();
    at::Tensor &slot = param.mutable_grad();
    if (!matches && slot.defined()) {
        set_data(slot, alias(grad, shape, stride, offset));
        return;
    }
    at::Tensor view = alias(grad, shape, stride, offset);
    if (matches) {
        view.unsafeGetTensorImpl()->set_version_counter(torch::autograd::impl::version_counter(grad));
    }
    slot = std::move(view);
}

constexpr int64_t unit_stride = 1;

} // namespace
} // namespace fp

extern "C" {

fp_geometry *
fp_torch_geometry_new(const fp_view *views, Py_ssize_t n, int64_t total)
{
    return fp::guarded<fp_geometry *>(nullptr, [&] {
        TORCH_CHECK_VALUE(n > 0 && total >= 0, "expected at least one view and a total of at least 0, got ", n, " and ",
                          total);
        auto geometry = std::make_shared<fp::Geometry>();
        geometry->total = total;
        int64_t end = 0;
        for (Py_ssize_t i = 0; i < n; i++) {
            fp::View view;
            view.offset = views[i].offset;
            view.shape.assign(views[i].shape, views[i].shape + views[i].ndim);
            view.stride.resize(view.shape.size());
            view.numel = 1;
            for (size_t d = view.shape.size(); d-- > 0;) {
                TORCH_CHECK_VALUE(view.shape[d] >= 0, "view ", i, " has a negative size ", view.shape[d]);
                view.stride[d] = view.numel;
                TORCH_CHECK_VALUE(!__builtin_mul_overflow(view.numel, std::max<int64_t>(view.shape[d], 1), &view.numel),
                                  "view ", i, " has more elements than 64 bits count");
            }
            if (std::find(view.shape.begin(), view.shape.end(), 0) != view.shape.end()) {
                view.numel = 0;
            }
            if (views[i].stride != nullptr) {
                const std::vector<int64_t> row_major = view.stride;
                view.stride.assign(views[i].stride, views[i].stride + views[i].ndim);
                view.contiguous = view.stride == row_major;
                std::vector<size_t> order(view.shape.size());
                std::iota(order.begin(), order.end(), size_t{0});
                std::sort(order.begin(), order.end(),
                          [&](size_t a, size_t b) { return view.stride[a] < view.stride[b]; });
                int64_t expected = 1;
                for (const size_t d : order) {
                    if (view.shape[d] > 1 && view.numel > 0) {
                        TORCH_CHECK_VALUE(view.stride[d] == expected, "view ", i, " is not dense: shape ",
                                          c10::IntArrayRef(view.shape), " strides ", c10::IntArrayRef(view.stride));
                        expected *= view.shape[d];
                    }
                }
            }
            TORCH_CHECK_VALUE(view.offset >= end && view.numel <= total - view.offset, "view ", i, " of ", view.numel,
                              " elements at offset ", view.offset, " overlaps the one before it or ends after ", total);
            end = view.offset + view.numel;
            geometry->views.push_back(std::move(view));
        }
        return new fp_geometry{std::move(geometry)};
    });
}

void
fp_torch_geometry_free(fp_geometry *geometry)
{
    delete geometry;
}

int64_t
fp_torch_geometry_total(const fp_geometry *geometry) noexcept
{
    return geometry->shared->total;
}

int
fp_torch_is_plain(PyObject *object) noexcept
{
    return object != nullptr && THPVariableClass != nullptr && THPVariable_CheckExact(object) &&
           fp::is_plain_tensor(THPVariable_Unpack(object));
}

int
fp_torch_all_plain(PyObject *const *objects, Py_ssize_t n) noexcept
{
    return !fp_torch_modes_active() && std::all_of(objects, objects + n, fp_torch_is_plain);
}

int
fp_torch_alias(PyObject *const *tensors, const fp_geometry *geometry, PyObject *flat_object)
{
    return fp::guarded(-1, [&] {
        const fp::Geometry &shape = *geometry->shared;
        const at::Tensor flat = fp::pinned_down(fp::unpack(flat_object));
        fp::check_total(flat, shape, "the unsharded flat parameter");
        fp::check_targets(tensors, static_cast<Py_ssize_t>(shape.views.size()), flat);
        for (const fp::View &view : shape.views) {
            fp::point(THPVariable_Unpack(*tensors++), flat, view.shape, view.stride,
                      flat.storage_offset() + view.offset);
        }
    });
}

int
fp_torch_alias_pieces(PyObject *const *tensors, Py_ssize_t n, PyObject *shard_object, const int64_t *starts,
                      const int64_t *numels)
{
    return fp::guarded(-1, [&] {
        const at::Tensor shard = fp::pinned_down(fp::unpack(shard_object));
        fp::check_pieces(shard, n, starts, numels, "the sharded flat parameter");
        fp::check_targets(tensors, n, shard);
        at::Tensor empty;
        for (Py_ssize_t i = 0; i < n; i++) {
            const at::Tensor &target = THPVariable_Unpack(tensors[i]);
            if (numels[i] >= 0) {
                fp::point(target, shard, numels[i], fp::unit_stride, shard.storage_offset() + starts[i]);
            }
            else if (target.dim() != 1 || target.numel() != 0 || target.dtype() != shard.dtype() ||
                     target.device() != shard.device() || target.storage().nbytes() != 0) {
                if (!empty.defined()) {
                    empty = fp::real_empty({0}, shard.options());
                }
                fp::set_data(target, empty);
            }
        }
    });
}

int
fp_torch_lie_in(PyObject *const *tensors, const fp_geometry *geometry, PyObject *flat) noexcept
{
    const std::vector<fp::View> &views = geometry->shared->views;
    const auto n = static_cast<Py_ssize_t>(views.size());
    bool same = fp_torch_all_plain(&flat, 1) && fp_torch_all_plain(tensors, n);
    for (size_t i = 0; same && i < views.size(); i++) {
        same = fp::is_at(THPVariable_Unpack(tensors[i]), THPVariable_Unpack(flat), views[i]);
    }
    return same;
}

int
fp_torch_alias_flat(PyObject *flat_object, PyObject *source_object, int64_t numel)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &flat = fp::unpack(flat_object);
        const at::Tensor source = fp::pinned_down(fp::unpack(source_object));
        const int64_t wanted = numel < 0 ? source.numel() : numel;
        TORCH_CHECK_VALUE(source.dim() == 1 && source.is_contiguous() && wanted <= source.numel(),
                          "expected a 1-D tensor of at least ", wanted, " elements, got shape ", source.sizes());
        fp::check_targets(&flat_object, 1, source);
        fp::point(flat, source, wanted, fp::unit_stride, source.storage_offset());
    });
}

int
fp_torch_alias_like(PyObject *tensor, PyObject *source)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &origin = fp::unpack(source);
        fp::check_targets(&tensor, 1, origin);
        fp::point(fp::unpack(tensor), origin, origin.sizes(), origin.strides(), origin.storage_offset());
    });
}

int
fp_torch_scan(PyObject *const *params, const fp_geometry *geometry, PyObject *owner_object, PyObject *grad_object,
              char *needed)
{
    return fp::guarded(-1, [&] {
        const fp::Geometry &shape = *geometry->shared;
        const at::Tensor &owner = fp::unpack(owner_object);
        const at::Tensor grad = grad_object == nullptr ? at::Tensor() : fp::unpack(grad_object);
        std::vector<at::Tensor> inside; /* tensors in the same storage, at another place */
        const auto is_moved = [&](const at::Tensor &tensor, const at::Tensor &whole, size_t i) {
            if (!tensor.has_storage() || !fp::same_storage(tensor, whole)) {
                return true;
            }
            const fp::View &view = shape.views[i];
            const bool as_put = tensor.dim() == static_cast<int64_t>(view.shape.size()) ? fp::same_layout(tensor, view)
                                                                                        : tensor.is_contiguous();
            if (whole.numel() < shape.total || /* a shard: its pieces may lie anywhere in it */
                (as_put && tensor.numel() == view.numel &&
                 tensor.storage_offset() == whole.storage_offset() + view.offset)) {
                return false;
            }
            inside.push_back(tensor);
            return true;
        };
        for (size_t i = 0; i < shape.views.size(); i++) {
            if (needed[i]) {
                continue;
            }
            const at::Tensor &param = fp::unpack(params[i]);
            const at::Tensor &own = param.unsafeGetTensorImpl()->grad();
            const bool moved = is_moved(param, owner, i);
            const bool grad_moved = own.defined() ? !grad.defined() || is_moved(own, grad, i) : grad.defined();
            needed[i] = moved || grad_moved;
        }
        const fp::Plainly plainly;
        std::vector<at::Tensor> copies;
        for (const at::Tensor &tensor : inside) {
            fp::check_memory(tensor);
            copies.push_back(tensor.clone());
        }
        for (size_t i = 0; i < inside.size(); i++) { /* after the last copy: tensors may overlap */
            fp::set_data(inside[i], copies[i]);
        }
        return 0;
    });
}

int
fp_torch_set_grads(PyObject *const *params, const fp_geometry *geometry, PyObject *grad_object)
{
    return fp::guarded(-1, [&] {
        const fp::Geometry &shape = *geometry->shared;
        const at::Tensor grad = fp::pinned_down(fp::unpack(grad_object));
        fp::check_total(grad, shape, "the unsharded flat gradient");
        const std::vector<at::Tensor> targets = fp::unpack_all(params, static_cast<Py_ssize_t>(shape.views.size()));
        for (size_t i = 0; i < targets.size(); i++) {
            const fp::View &view = shape.views[i];
            fp::set_grad(targets[i], grad, view.shape, view.stride, grad.storage_offset() + view.offset, false);
        }
    });
}

int
fp_torch_set_grad_pieces(PyObject *const *params, const fp_geometry *geometry, PyObject *grad_object,
                         const int64_t *starts, const int64_t *numels, const char *none, int by_data)
{
    return fp::guarded(-1, [&] {
        const std::vector<fp::View> &views = geometry->shared->views;
        const auto n = static_cast<Py_ssize_t>(views.size());
        if (!fp_torch_all_plain(&grad_object, 1) || !fp_torch_all_plain(params, n)) {
            return 1;
        }
        const at::Tensor grad = fp::pinned_down(fp::unpack(grad_object));
        fp::check_pieces(grad, n, starts, numels, "the sharded flat gradient");
        const auto is_whole = [&](const at::Tensor &param, size_t i) {
            return numels[i] == views[i].numel && param.sizes() == c10::IntArrayRef(views[i].shape);
        };
        const auto gets_none = [&](const at::Tensor &param, size_t i) {
            return numels[i] < 0 || none[i] || !param.requires_grad();
        };
        for (size_t i = 0; i < views.size(); i++) {
            const at::Tensor &param = THPVariable_Unpack(params[i]);
            TORCH_CHECK_VALUE(
                gets_none(param, i) || is_whole(param, i) || (param.dim() == 1 && param.numel() == numels[i]),
                "expected parameter ", i, " to have ", numels[i], " elements in one dimension or its shape ",
                c10::IntArrayRef(views[i].shape), ", got shape ", param.sizes());
        }
        for (size_t i = 0; i < views.size(); i++) {
            const at::Tensor &param = THPVariable_Unpack(params[i]);
            if (gets_none(param, i)) {
                fp::drop_grad(param);
                continue;
            }
            fp::set_grad(param, grad, param.sizes(),
                         is_whole(param, i) ? c10::IntArrayRef(views[i].stride) : fp::unit_stride,
                         grad.storage_offset() + starts[i], by_data || param.dtype() != grad.dtype());
        }
        return 0;
    });
}

int
fp_torch_grad_summary(PyObject *const *params, Py_ssize_t n, int *all_none, int *any_requires_grad)
{
    return fp::guarded(-1, [&] {
        *all_none = 1;
        *any_requires_grad = 0;
        if (!fp_torch_all_plain(params, n)) {
            return 0;
        }
        for (Py_ssize_t i = 0; i < n; i++) {
            const at::Tensor &param = THPVariable_Unpack(params[i]);
            *all_none &= !param.unsafeGetTensorImpl()->grad().defined();
            *any_requires_grad |= param.requires_grad();
        }
        return 1;
    });
}

int
fp_torch_clear_grads(PyObject *const *params, Py_ssize_t n)
{
    return fp::guarded(-1, [&] {
        if (!fp_torch_all_plain(params, n)) {
            return 0;
        }
        std::for_each(params, params + n, [](PyObject *param) { fp::drop_grad(THPVariable_Unpack(param)); });
        return 1;
    });
}

int
fp_torch_is_leaf(PyObject *object) noexcept
{
    return !fp::is_tensor(object) || THPVariable_Unpack(object).is_leaf();
}

int
fp_torch_allocate(PyObject *object, int64_t numel)
{
    return fp::guarded(-1, [&] {
        if (!fp_torch_is_plain(object)) {
            return 2;
        }
        const at::Tensor &tensor = THPVariable_Unpack(object);
        const auto item_bytes = static_cast<int64_t>(tensor.element_size());
        TORCH_CHECK_VALUE(numel >= 0 && numel <= std::numeric_limits<int64_t>::max() / item_bytes,
                          "a storage cannot have ", numel, " elements");
        const auto wanted = static_cast<size_t>(numel * item_bytes);
        c10::StorageImpl *storage = fp::storage_of(tensor);
        const size_t present = fp::memory_of(storage);
        if (present != 0 && present != wanted) {
            return 2;
        }
        TORCH_CHECK_VALUE(fp::bytes_for(tensor) <= wanted, "expected a tensor whose elements lie in ", wanted,
                          " bytes, got strides ", tensor.strides(), " and offset ", tensor.storage_offset(),
                          ": its data were replaced outside of flatparam");
        fp::resize_storage(storage, wanted, nullptr, false);
        return present == wanted ? 0 : 1;
    });
}

int
fp_torch_free(PyObject *object, const char *reason, int keeps_size)
{
    return fp::guarded(-1, [&] {
        if (!fp_torch_is_plain(object) || THPVariable_Unpack(object).storage_offset() != 0) {
            return 0;
        }
        const at::Tensor &tensor = THPVariable_Unpack(object);
        c10::StorageImpl *storage = fp::storage_of(tensor);
        if (!fp::has_own_memory(storage) && fp::is_reused(storage)) {
            fp::move_to_storage(tensor, fp::freed_source(tensor.options(), storage->nbytes(), reason, keeps_size != 0));
        }
        else {
            fp::resize_storage(storage, 0, reason, keeps_size != 0);
        }
        return 1;
    });
}

int
fp_torch_lacks_memory(PyObject *object)
{
    return fp::guarded(
        -1, [&] { return fp_torch_is_plain(object) && !fp::has_memory(THPVariable_Unpack(object)) ? 1 : 0; });
}

int64_t
fp_torch_storage_numel(PyObject *tensor_object)
{
    return fp::guarded(int64_t{-1}, [&] {
        const at::Tensor &tensor = fp::unpack(tensor_object);
        return static_cast<int64_t>(fp::memory_of(fp::storage_of(tensor)) / tensor.itemsize());
    });
}

int
fp_torch_same_storage(PyObject *a, PyObject *b)
{
    return fp::guarded(-1, [&] { return fp::same_storage(fp::unpack(a), fp::unpack(b)) ? 1 : 0; });
}

int
fp_torch_digest(PyObject *object, uint64_t *out)
{
    return fp::guarded(-1, [&] {
        const at::Tensor &tensor = fp::unpack(object);
        TORCH_CHECK_TYPE(tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense(),
                         "expected a dense tensor on the host, got strides ", tensor.strides(), " on ",
                         tensor.device());
        const size_t bytes = tensor.nbytes();
        fp::check_memory(tensor);
        *out = fp_digest(bytes == 0 ? nullptr : tensor.const_data_ptr(), bytes);
    });
}

} // extern "C"
