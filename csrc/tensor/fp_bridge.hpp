// tensor/fp_bridge.hpp -- shared by the C++ files of the bridge: unpacking, the exception barrier, the geometry, and
// everything that differs between torch versions.
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

struct View {
    int64_t offset = 0;
    int64_t numel = 0;
    bool contiguous = true;
    std::vector<int64_t> shape, stride;
};

struct Geometry {
    std::vector<View> views;
    int64_t total = 0;
};

// Whether object is a tensor, of a subclass too. THPVariable_Check would believe what it says its __class__ is.
inline bool
is_tensor(PyObject *object)
{
    auto *const tensors = reinterpret_cast<PyTypeObject *>(THPVariableClass);
    return tensors != nullptr && PyType_IsSubtype(Py_TYPE(object), tensors);
}

// The tensor behind a plain tensor object; throws TypeError for anything else (subclasses and wrappers included).
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

// The barrier: runs body, which may return nothing for 0; a C++ exception becomes a Python one and failure is returned.
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

// The address of a storage's memory, nullptr if freed; never throws, whatever set_freed_reason asked for.
inline const void *
address_of(c10::StorageImpl *storage)
{
    return storage->_mutable_data_ptr_no_checks().get();
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
// This torch can let accesses throw, and has no function that takes it back. An explicit instantiation may name what is private.
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

// Let every access to the data of storage throw reason, or (nullptr) let it be accessed again. Returns whether they throw.
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

// A tensor over the storage of source, without autograd: what an as_strided kernel returns. No copy.
at::Tensor alias(const at::Tensor &source, c10::IntArrayRef shape, c10::IntArrayRef stride, int64_t offset);

// The same at one place of a flat tensor.
inline at::Tensor
alias(const at::Tensor &flat, const View &place)
{
    return alias(flat, place.shape, place.stride, flat.storage_offset() + place.offset);
}

// The bytes of memory that a storage has: none if it is freed, also where it has kept its size.
size_t memory_of(c10::StorageImpl *storage);

// Whether storage is as torch makes one: nobody reads its memory by its address, and it is not the memory of a file that other
// processes may have too.
bool has_own_memory(const c10::StorageImpl *storage);

// Give storage room for bytes, 0: free it; see fp_torch_resize_storage. Throws, and changes nothing, if it borrows its
// memory, or somebody else does (a NumPy array). given: memory for it; null: its allocator has some.
void resize_storage(c10::StorageImpl *storage, size_t bytes, const char *reason, bool keeps_size,
                    c10::DataPtr given = c10::DataPtr());

// A storage that flatparam frees and fills again is noted; with the GIL held.
void note_reused(c10::StorageImpl *storage);
bool is_reused(const c10::StorageImpl *storage);

// Whether somebody outside has the Python object of a storage that has memory, and that tensors of ours have too.
bool has_borrower(c10::StorageImpl *storage);

// An empty tensor whose storage is like one of bytes that resize_storage has freed.
at::Tensor freed_source(const at::TensorOptions &options, size_t bytes, const char *reason, bool keeps_size);

// Let tensor lie in source's storage, with the history and the Python object that it has.
void move_to_storage(const at::Tensor &tensor, const at::Tensor &source);

// The bytes of memory that tensor needs from the beginning of its storage on.
size_t bytes_for(const at::Tensor &tensor);

// Whether the storage of tensor has memory for all of its elements: users can free and resize each storage that they reach. What
// has no memory of its own (sparse tensors, those on the meta device, wrappers of Python) does.
bool has_memory(const at::Tensor &tensor);

// Throws ValueError, which begins with name, unless it has. Whoever reads or writes memory that a user can reach calls this
// before: torch's operations look at the size of no storage.
void check_memory(const at::Tensor &tensor, const char *name = nullptr);

// Views of flat at the places of geometry, new references: differentiable ones, tracked by node if there is one; or leaves.
// They share flat's version counter. ValueError unless flat is 1-D and of geometry's length; -1 with a Python exception.
// spare, idle: see fp_torch_make_views().
int make_views(const at::Tensor &flat, const Geometry &geometry, const NodePtr &node, PyObject **out,
               PyObject *const *spare = nullptr, const char *idle = nullptr);
int make_leaves(const at::Tensor &flat, const Geometry &geometry, PyObject **out);

// One 1-D tensor with the pieces at their places and zeros between them, made of torch operations only: differentiable,
// for any device, layout or wrapper. Undefined pieces count as zeros.
at::Tensor flatten_by_ops(const Geometry &geometry, const std::vector<at::Tensor> &pieces,
                          const at::TensorOptions &options);

bool is_plain_tensor(const at::Tensor &tensor);

// Whether tensor is at offset of source's storage in this shape, with these strides and source's dtype.
bool is_at(const at::Tensor &tensor, const at::Tensor &source, c10::IntArrayRef shape, c10::IntArrayRef stride,
           int64_t offset);

inline bool
is_at(const at::Tensor &tensor, const at::Tensor &flat, const View &place)
{
    return is_at(tensor, flat, place.shape, place.stride, flat.storage_offset() + place.offset);
}

// Whether tensor lies in memory as view says, so that its bytes can be copied in one run.
bool same_layout(const at::Tensor &tensor, const View &view);

inline c10::StorageImpl *
storage_of(const at::Tensor &tensor)
{
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Whether piece is the numel elements from start on of whole's memory.
inline bool
is_piece(const at::Tensor &piece, const at::Tensor &whole, int64_t start, int64_t numel)
{
    return piece.has_storage() && storage_of(piece) == storage_of(whole) && piece.numel() == numel &&
           piece.storage_offset() == whole.storage_offset() + start;
}

// param.grad = None. Releasing a gradient may run Python code, which shall not find it there any more.
inline void
drop_grad(const at::Tensor &param)
{
    if (param.unsafeGetTensorImpl()->grad().defined()) {
        const at::Tensor dropped = std::move(param.mutable_grad());
    }
}

// Throws ValueError unless gradients are those of the views of geometry, some perhaps undefined. The engine sees to that,
// but who calls the node called what directly may pass anything.
void check_gradients(const Geometry &geometry, const std::vector<at::Tensor> &gradients, const std::string &what);

// Whether many gradients cannot be added in this dtype.
inline bool
is_low(at::ScalarType dtype)
{
    return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// at::empty(), of which no mode of Python (FakeTensorMode, in which torch.export runs) makes something else.
at::Tensor real_empty(c10::IntArrayRef shape, const at::TensorOptions &options);

// Outside of autograd, of inference mode and of torch.func's transforms, whatever the caller is in.
struct Plainly {
    c10::InferenceMode inference{false};
    at::NoGradGuard no_grad;
    c10::impl::ExcludeDispatchKeyGuard no_transform{c10::DispatchKeySet(
        {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

// The GIL for a thread of autograd, which has none.
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

// The GIL given back while this thread works on memory or waits.
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

// What call gives, made without the GIL.
template <class Call>
auto
unlocked(Call &&call)
{
    const WithoutGil released;
    return call();
}

} // namespace fp

// The C name for a shared Geometry.
struct fp_geometry {
    std::shared_ptr<const fp::Geometry> shared;
};
