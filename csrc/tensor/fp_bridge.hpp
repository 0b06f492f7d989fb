// tensor/fp_bridge.hpp -- shared by the C++ files: unpack tensors, stop exceptions at the border to C, the geometry, storages
// that are freed and filled again, and differences between versions of torch. The GIL is held unless a comment says
// otherwise. Functions throw C++ exceptions; the extern "C" functions that call them catch these in guarded().
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

extern "C" {
#include "python/fp_gil.h"
}
#include "tensor/fp_torch.h"

namespace fp {

// The place of one tensor in a flat tensor, in elements. Always dense.
struct View {
    int64_t offset = 0; // the first element, counted in the flat tensor
    int64_t numel = 0;
    bool contiguous = true; // row-major
    std::vector<int64_t> shape, stride;
};

// The places of all tensors in a flat tensor of total elements, sorted by offset; gaps are padding. It never changes, and is
// shared by nodes and flat buffers.
struct Geometry {
    std::vector<View> views;
    int64_t total = 0;
};

// Whether object is a tensor, also of a subclass. THPVariable_Check would believe the object's __class__ attribute.
inline bool
is_tensor(PyObject *object)
{
    auto *const tensors = reinterpret_cast<PyTypeObject *>(THPVariableClass);
    return tensors != nullptr && PyType_IsSubtype(Py_TYPE(object), tensors);
}

// The tensor of a plain object (fp_torch_is_plain); TypeError for all others, subclasses and wrappers too.
inline const at::Tensor &
unpack(PyObject *object)
{
    TORCH_CHECK_TYPE(fp_torch_is_plain(object), "expected a plain dense torch.Tensor or Parameter, got ",
                     object == nullptr ? "NULL" : Py_TYPE(object)->tp_name);
    return THPVariable_Unpack(object);
}

inline std::vector<at::Tensor>
unpack_all(PyObject *const *objects, Py_ssize_t n)
{
    std::vector<at::Tensor> tensors;
    tensors.reserve(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; i++) {
        tensors.push_back(unpack(objects[i]));
    }
    return tensors;
}

// The barrier between C++ and C: run body and return its result (0 if it returns nothing). A C++ exception becomes a Python
// one, and failure is returned.
template <class Result, class Body>
Result
guarded(Result failure, Body &&body) noexcept
{
    try {
        if constexpr (std::is_void_v<decltype(body())>) {
            body();
            return Result{};
        }
        else {
            return body();
        }
    }
    catch (const std::exception &) {
        torch::translate_exception_to_python(std::current_exception());
    }
    catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "flatparam: unknown C++ exception");
    }
    return failure;
}

// Run body, a clean-up that calls no Python, so that a Python exception that is set stays. A C++ exception is dropped: the
// device has failed, and the next call that uses the device raises the error.
template <class Body>
void
unless_failed(Body &&body) noexcept
{
    try {
        body();
    }
    catch (...) {
    }
}

// Autograd nodes: held by c10::intrusive_ptr from torch 2.13 on, by std::shared_ptr with deleteNode before.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class... Args>
auto
make_node(Args &&...args)
{
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>) {
        return c10::make_intrusive<T>(std::forward<Args>(args)...);
    }
    else {
        return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](auto *node) { deleteNode(node); });
    }
}

// The address of a storage's memory; nullptr: freed. Unlike torch's functions it does not throw after set_freed_reason().
inline const void *
address_of(c10::StorageImpl *storage)
{
    return storage->_mutable_data_ptr_no_checks().get();
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
// This torch can let accesses throw, but has no function to allow them again. An explicit instantiation may name private
// members.
namespace {
template <bool c10::StorageImpl::*throws, void (c10::StorageImpl::*refresh)()> struct LetsAccess {
    friend void clear_freed_reason(c10::StorageImpl &storage)
    {
        storage.*throws = false;
        (storage.*refresh)();
    }
};
void clear_freed_reason(c10::StorageImpl &storage);
template struct LetsAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                           &c10::StorageImpl::refresh_has_data_ptr_check>;
} // namespace
#else
inline void
clear_freed_reason(c10::StorageImpl &storage)
{
    storage.clear_data_ptr_access_error_msg_();
}
#endif

// Let every access to the data of storage throw reason, or allow it again (nullptr). Returns whether accesses throw.
inline bool
set_freed_reason(c10::StorageImpl *storage, const char *reason)
{
    if (reason == nullptr) {
        clear_freed_reason(*storage);
    }
    else {
        storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(reason));
    }
    return reason != nullptr;
}

// A new tensor over the storage of source, without autograd and without a copy, as the kernel of as_strided makes it.
// offset: in the storage, in elements.
at::Tensor alias(const at::Tensor &source, c10::IntArrayRef shape, c10::IntArrayRef stride, int64_t offset);

// alias() of flat at the place of one tensor in it.
inline at::Tensor
alias(const at::Tensor &flat, const View &place)
{
    return alias(flat, place.shape, place.stride, flat.storage_offset() + place.offset);
}

// The bytes of memory of a storage: 0 if it is freed, also where it still tells its size.
size_t memory_of(c10::StorageImpl *storage);

// Whether storage may be freed: its memory was not lent (fp_torch_lend), and is no file that other processes may map.
bool has_own_memory(const c10::StorageImpl *storage);

// Give storage memory for so many bytes; 0: free it. reason, keeps_size: as for fp_torch_free(). given: the memory; null:
// from its allocator. Throws and changes nothing if the storage borrows its memory, or has lent it (a NumPy array).
void resize_storage(c10::StorageImpl *storage, size_t bytes, const char *reason, bool keeps_size,
                    c10::DataPtr given = c10::DataPtr());

void note_reused(c10::StorageImpl *storage);     // note that flatparam frees and fills this storage again
bool is_reused(const c10::StorageImpl *storage); // whether it was noted

// Whether code outside refers to the Python object of a storage that has memory, and may read it by its address.
bool has_borrower(c10::StorageImpl *storage);

// An empty tensor with a new freed storage: as resize_storage() frees one of so many bytes. reason, keeps_size: see there.
at::Tensor freed_source(const at::TensorOptions &options, size_t bytes, const char *reason, bool keeps_size);

// Let tensor use source's storage. It keeps its shape, its autograd history and its Python object.
void move_to_storage(const at::Tensor &tensor, const at::Tensor &source);

// The bytes that the storage of tensor needs for all its elements, counted from the beginning of the storage.
size_t bytes_for(const at::Tensor &tensor);

// Whether the storage of tensor has memory for all elements: users can free and resize each storage that they can reach. true
// for tensors without such a storage (sparse and meta tensors, wrappers in Python).
bool has_memory(const at::Tensor &tensor);

// Throw ValueError, which begins with name, unless has_memory(). Call it before each read or write of memory that a user can
// reach: torch's operations do not look at the size of a storage.
void check_memory(const at::Tensor &tensor, const char *name = nullptr);

// Write views of flat at the places of geometry to out, new references: make_views() differentiable ones, behind node if
// there is one; make_leaves() leaves. They share flat's version counter. 0; -1 with a Python exception, and nothing in out;
// ValueError is thrown unless flat is 1-D and of geometry's length. spare, idle: see fp_torch_make_views().
int make_views(const at::Tensor &flat, const Geometry &geometry, const NodePtr &node, PyObject **out,
               PyObject *const *spare = nullptr, const char *idle = nullptr);
int make_leaves(const at::Tensor &flat, const Geometry &geometry, PyObject **out);

// A 1-D tensor with the pieces at their places, and zeros between them and for undefined pieces. It uses operations of torch
// alone: slow, differentiable, and for any device, layout or wrapper.
at::Tensor flatten_by_ops(const Geometry &geometry, const std::vector<at::Tensor> &pieces,
                          const at::TensorOptions &options);

bool is_plain_tensor(const at::Tensor &tensor);

// Whether tensor lies in source's storage at offset (elements), in this shape, with these strides and source's dtype.
bool is_at(const at::Tensor &tensor, const at::Tensor &source, c10::IntArrayRef shape, c10::IntArrayRef stride,
           int64_t offset);

inline bool
is_at(const at::Tensor &tensor, const at::Tensor &flat, const View &place)
{
    return is_at(tensor, flat, place.shape, place.stride, flat.storage_offset() + place.offset);
}

// Whether tensor's elements have view's order in memory, so that they can be copied in one run.
bool same_layout(const at::Tensor &tensor, const View &view);

inline c10::StorageImpl *
storage_of(const at::Tensor &tensor)
{
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Whether piece is elements [start, start + numel) of whole's memory.
inline bool
is_piece(const at::Tensor &piece, const at::Tensor &whole, int64_t start, int64_t numel)
{
    return piece.has_storage() && storage_of(piece) == storage_of(whole) && piece.numel() == numel &&
           piece.storage_offset() == whole.storage_offset() + start;
}

// param.grad = None. The release of a gradient may run Python code, which must not find the gradient there.
inline void
drop_grad(const at::Tensor &param)
{
    if (param.unsafeGetTensorImpl()->grad().defined()) {
        const at::Tensor dropped = std::move(param.mutable_grad());
    }
}

// Throw ValueError unless gradients fit the views of geometry; some may be undefined. The engine guarantees that, a direct
// call of the node from Python does not. what: the name of the node, for the error.
void check_gradients(const Geometry &geometry, const std::vector<at::Tensor> &gradients, const std::string &what);

// Whether dtype is bf16 or fp16: too coarse to add many gradients in it.
inline bool
is_low(at::ScalarType dtype)
{
    return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// at::empty() past Python's dispatch modes: FakeTensorMode, in which torch.export runs, would return a tensor without memory.
at::Tensor real_empty(c10::IntArrayRef shape, const at::TensorOptions &options);

// While one lives, this thread is outside of autograd, of inference mode and of torch.func's transforms.
struct Plainly {
    c10::InferenceMode inference{false};
    at::NoGradGuard no_grad;
    c10::impl::ExcludeDispatchKeyGuard no_transform{c10::DispatchKeySet(
        {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

// While one lives, this thread of autograd has the GIL. Autograd calls nodes and hooks without it.
struct WithGil {
    PyGILState_STATE state = fp_gil_ensure();
    WithGil() = default;
    WithGil(const WithGil &) = delete;
    WithGil &operator=(const WithGil &) = delete;
    ~WithGil()
    {
        PyGILState_Release(state);
    }
};

// While one lives, this thread has released the GIL: it works on memory, or waits.
struct WithoutGil {
    PyThreadState *state = PyEval_SaveThread();
    WithoutGil() = default;
    WithoutGil(const WithoutGil &) = delete;
    WithoutGil &operator=(const WithoutGil &) = delete;
    ~WithoutGil()
    {
        fp_gil_restore(state);
    }
};

// The result of call(), which runs without the GIL.
template <class Call>
auto
unlocked(Call &&call)
{
    const WithoutGil released;
    return call();
}

} // namespace fp

// The C handle of a shared Geometry.
struct fp_geometry {
    std::shared_ptr<const fp::Geometry> shared;
};
