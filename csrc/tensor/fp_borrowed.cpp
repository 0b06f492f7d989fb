// tensor/fp_borrowed.cpp -- note memory whose address code outside has taken (NumPy, DLPack): flatparam must not free it or
// write to it, and leaves it to the borrower. fp_torch_lend() notes it, fp_torch_free() and fp_flat_buffer.cpp look for it.
#include <ATen/dlpack.h>

#include <algorithm>
#include <unordered_map>

#include "tensor/fp_bridge.hpp"

namespace fp {
namespace {

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

// The storages that flatparam frees and fills again. Weak references keep the address, so that no other storage gets it.
// Used with the GIL held; never destroyed, as storages may be freed at the end of the process.
std::unordered_map<const c10::StorageImpl *, Weak> &
reused()
{
    static auto *storages = new std::unordered_map<const c10::StorageImpl *, Weak>;
    return *storages;
}

// How many references the storage's Python object has; 0: there is no such object. One of them is the storage's own.
template <class Storage>
Py_ssize_t
python_references(Storage *storage)
{
    if constexpr (requires { storage->pyobj_slot()->load_pyobj(); }) {
        PyObject *object = storage->pyobj_slot()->load_pyobj();
        return object == nullptr ? 0 : Py_REFCNT(object);
    }
    else {
        return 0;
    }
}

} // namespace

void
note_reused(c10::StorageImpl *storage)
{
    if (reused().contains(storage)) {
        return;
    }
    std::erase_if(reused(), [](const auto &known) { return known.second.expired(); });
    reused().emplace(storage, Weak(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)));
}

bool
is_reused(const c10::StorageImpl *storage)
{
    return reused().contains(storage);
}

bool
has_borrower(c10::StorageImpl *storage)
{
    return python_references(storage) > 1 && memory_of(storage) != 0;
}

at::Tensor
freed_source(const at::TensorOptions &options, size_t bytes, const char *reason, bool keeps_size)
{
    at::Tensor source = real_empty({0}, options);
    c10::StorageImpl *storage = storage_of(source);
    if (set_freed_reason(storage, reason) && keeps_size) {
        storage->set_nbytes(bytes);
    }
    note_reused(storage);
    return source;
}

void
move_to_storage(const at::Tensor &tensor, const at::Tensor &source)
{
    at::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_allow_tensor_metadata_change(true);
    impl->set_storage_keep_dtype(source.storage());
}

} // namespace fp

extern "C" {

int64_t
fp_torch_storage_holders(PyObject *object)
{
    return fp::guarded(int64_t{-1}, [&] {
        const at::Tensor &tensor = fp::unpack(object);
        return static_cast<int64_t>(tensor.storage().use_count()) -
               (fp::python_references(fp::storage_of(tensor)) > 0 ? 1 : 0);
    });
}

int
fp_torch_has_freed(void)
{
    return fp::guarded(-1, [] {
        return static_cast<int>(std::ranges::any_of(fp::reused(), [](const auto &known) {
            const auto storage = known.second.lock();
            return storage.defined() && fp::memory_of(storage.get()) == 0;
        }));
    });
}

int
fp_torch_lend(PyObject *object)
{
    return fp::guarded(-1, [&] {
        if (!fp::is_tensor(object)) {
            return 0;
        }
        const at::Tensor &tensor = THPVariable_Unpack(object);
        c10::StorageImpl *storage = tensor.has_storage() ? fp::storage_of(tensor) : nullptr;
        if (!fp::is_reused(storage) || fp::memory_of(storage) == 0) {
            return 0;
        }
        storage->set_resizable(false); /* as torch does for NumPy */
        return 1;
    });
}

static DLPackExchangeAPI exchange; /* torch's table, with export_and_lend in it; static, as users keep its address */
static DLPackManagedTensorFromPyObjectNoSync export_tensor; /* torch's function, which export_and_lend calls */

static int
export_and_lend(void *object, DLManagedTensorVersioned **out)
{
    const int status = export_tensor(object, out);
    if (status == 0 && fp_torch_lend(static_cast<PyObject *>(object)) < 0) {
        PyErr_Clear(); /* the export itself has succeeded */
    }
    return status;
}

PyObject *
fp_torch_lending_exchange(PyObject *capsule)
{
    static const char name[] = "dlpack_exchange_api";
    const auto *theirs = static_cast<const DLPackExchangeAPI *>(PyCapsule_GetPointer(capsule, name));
    if (theirs == nullptr) {
        return nullptr;
    }
    if (theirs->header.version.major != DLPACK_MAJOR_VERSION || theirs == &exchange) {
        return Py_NewRef(capsule);
    }
    exchange = *theirs;
    export_tensor = exchange.managed_tensor_from_py_object_no_sync;
    exchange.managed_tensor_from_py_object_no_sync = export_and_lend;
    return PyCapsule_New(&exchange, name, nullptr);
}

} // extern "C"
