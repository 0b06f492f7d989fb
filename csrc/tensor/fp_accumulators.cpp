// tensor/fp_accumulators.cpp -- note the nodes that accumulate the gradient of one tensor. autograd makes a new node when
// the dtype or device of the tensor changes, and older graphs keep the older node. See fp_graph.h.
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_graph.h"

namespace fp {
namespace {

template <class Node>
std::weak_ptr<Node>
weak(const std::shared_ptr<Node> &node)
{
    return node;
}

template <class Node>
c10::weak_intrusive_ptr<Node>
weak(const c10::intrusive_ptr<Node> &node)
{
    return c10::weak_intrusive_ptr<Node>(node);
}

using Nodes = std::vector<decltype(weak(std::declval<NodePtr>()))>; // in the order of notes

constexpr const char *capsule_name = "flatparam.accumulators";

void
destroy(PyObject *capsule)
{
    delete static_cast<Nodes *>(PyCapsule_GetPointer(capsule, capsule_name));
}

} // namespace
} // namespace fp

PyObject *
fp_graph_note_accumulator(PyObject *known, PyObject *tensor)
{
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        TORCH_CHECK_TYPE(fp::is_tensor(tensor), "expected a tensor, got ", Py_TYPE(tensor)->tp_name);
        const fp::NodePtr node = torch::autograd::impl::try_get_grad_accumulator(THPVariable_Unpack(tensor));
        THPObjectPtr capsule(Py_NewRef(known)); // freed at each return but the last
        if (known == Py_None) {
            auto made = std::make_unique<fp::Nodes>();
            capsule = PyCapsule_New(made.get(), fp::capsule_name, fp::destroy);
            if (capsule.get() == nullptr) {
                return nullptr;
            }
            made.release();
        }
        auto *nodes = static_cast<fp::Nodes *>(PyCapsule_GetPointer(capsule.get(), fp::capsule_name));
        if (nodes == nullptr) {
            return nullptr;
        }
        nodes->erase(std::remove_if(nodes->begin(), nodes->end(), [](const auto &each) { return each.expired(); }),
                     nodes->end());
        if (node && std::none_of(nodes->begin(), nodes->end(), [&](const auto &each) { return each.lock() == node; })) {
            nodes->push_back(fp::weak(node));
        }
        return capsule.release();
    });
}

PyObject *
fp_graph_accumulators(PyObject *known)
{
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        THPObjectPtr found(PyList_New(0));
        if (found.get() == nullptr || known == Py_None) {
            return found.release();
        }
        const auto *nodes = static_cast<const fp::Nodes *>(PyCapsule_GetPointer(known, fp::capsule_name));
        if (nodes == nullptr) {
            return nullptr;
        }
        for (const auto &each : *nodes) {
            if (const fp::NodePtr node = each.lock()) {
                THPObjectPtr object(torch::autograd::functionToPyObject(node));
                if (object.get() == nullptr || PyList_Append(found.get(), object.get()) < 0) {
                    return nullptr;
                }
            }
        }
        return found.release();
    });
}
