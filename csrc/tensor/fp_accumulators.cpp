// tensor/fp_accumulators.cpp -- the nodes that accumulate the gradient of one tensor: autograd makes another one for each dtype
// and device that the tensor has had, while graphs keep those of before.
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/variable.h>

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

using Nodes = std::vector<decltype(weak(std::declval<NodePtr>()))>; // in the order in which they were noted

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
        PyObject *capsule = known;
        if (known == Py_None) {
            auto made = std::make_unique<fp::Nodes>();
            capsule = PyCapsule_New(made.get(), fp::capsule_name, fp::destroy);
            if (capsule == nullptr) {
                return nullptr;
            }
            made.release();
        }
        auto *nodes = static_cast<fp::Nodes *>(PyCapsule_GetPointer(capsule, fp::capsule_name));
        if (nodes == nullptr) {
            return nullptr;
        }
        nodes->erase(std::remove_if(nodes->begin(), nodes->end(), [](const auto &each) { return each.expired(); }),
                     nodes->end());
        if (node && std::none_of(nodes->begin(), nodes->end(), [&](const auto &each) { return each.lock() == node; })) {
            nodes->push_back(fp::weak(node));
        }
        return known == Py_None ? capsule : Py_NewRef(capsule);
    });
}

PyObject *
fp_graph_accumulators(PyObject *known)
{
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        PyObject *found = PyList_New(0);
        if (found == nullptr || known == Py_None) {
            return found;
        }
        const auto *nodes = static_cast<const fp::Nodes *>(PyCapsule_GetPointer(known, fp::capsule_name));
        int status = nodes == nullptr ? -1 : 0;
        for (size_t i = 0; status == 0 && i < nodes->size(); i++) {
            if (const fp::NodePtr node = (*nodes)[i].lock()) {
                PyObject *object = torch::autograd::functionToPyObject(node);
                status = object == nullptr ? -1 : PyList_Append(found, object);
                Py_XDECREF(object);
            }
        }
        if (status < 0) {
            Py_CLEAR(found);
        }
        return found;
    });
}
