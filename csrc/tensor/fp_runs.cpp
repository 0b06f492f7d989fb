// tensor/fp_runs.cpp -- see fp_runs.h.
//
// Nothing is kept from step to step: a check that it still holds would read the same tensors and dicts again. For 4,000
// parameters these are some 100,000 cache lines. Parameter after parameter takes 2 ms, as each load waits for the one before.
// So each stage of StepStates::find() goes over a block of parameters, and prefetches the lines that the next stage reads. This
// takes 0.7 to 0.95 ms after a step that has emptied the caches (1.5 to 1.7 ms without prefetching): 0.2 us a parameter, where
// torch's fused step takes 6 us (AdamW, one core of an EPYC, torch 2.13).
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <array>

#include "tensor/fp_bridge.hpp"
#include "tensor/fp_runs.h"

namespace fp {
namespace {

constexpr Py_ssize_t MOST_KEYS = 4; // the step and three states
constexpr Py_ssize_t BLOCK = 64;
constexpr int NEAR = 16; // entries of the optimizer's state to compare before a parameter is looked up by its hash

// A parameter with a gradient. state: its dict. tensors: the parameter, its gradient, and a state for each key, nullptr if it
// is missing; values: those states as objects. All pointers are borrowed.
struct StepPiece {
    PyObject *param, *state;
    std::array<PyObject *, MOST_KEYS> values;
    std::array<const at::Tensor *, 2 + MOST_KEYS> tensors;
};

struct StepRun {
    StepPiece first;
    int64_t numel;
    Py_ssize_t count;
};

enum class Search { all, not_ours, missing, failed }; // not_ours: a state is no dict or no tensor, so torch has to step

// Begin to load the first cache lines of object, which the next stage reads.
void
prefetch(const void *object, size_t lines)
{
    for (size_t i = 0; i < lines; i++) {
        __builtin_prefetch(static_cast<const char *>(object) + 64 * i);
    }
}

void
prefetch(const at::Tensor &tensor)
{
    prefetch(tensor.unsafeGetTensorImpl(), (sizeof(c10::TensorImpl) + 63) / 64);
}

bool
is_plain_host(const at::Tensor &tensor)
{
    return is_plain_tensor(tensor) && tensor.is_cpu() && tensor.is_contiguous();
}

// Whether the elements of tensor and param lie in memory in one order: torch's fused kernels pair them in that order.
bool
is_laid_out_as(const at::Tensor &tensor, const at::Tensor &param)
{
    return tensor.layout() == at::kStrided && tensor.numel() == param.numel() &&
           ((tensor.is_contiguous() && param.is_contiguous()) ||
            (tensor.sizes() == param.sizes() && tensor.strides() == param.strides()));
}

// Whether tensor begins where before ends. before: a tensor for which is_plain_host() is true.
bool
follows(const at::Tensor &tensor, const at::Tensor &before)
{
    return storage_of(tensor) == storage_of(before) &&
           tensor.storage_offset() == before.storage_offset() + before.numel() &&
           tensor.key_set() == before.key_set() && tensor.dtype() == before.dtype() && tensor.is_contiguous();
}

// The address of a number of steps; nullptr if the tensor is not one fp32 element in host memory.
float *
step_of(const at::Tensor &tensor)
{
    const bool is_one = tensor.numel() == 1 && tensor.scalar_type() == at::kFloat && is_plain_host(tensor);
    return is_one && has_memory(tensor) ? static_cast<float *>(tensor.mutable_data_ptr()) : nullptr;
}

// Joins pieces to runs. It also notes chains: pieces that lie side by side and have equal steps, and whose states could lie
// side by side. A run is a part of a chain.
class StepRuns {
  public:
    StepRuns(size_t keys, bool steps, bool packs, bool joins)
        : kinds_(2 + keys), steps_(steps), packs_(packs), joins_(joins)
    {
    }

    void append(const StepPiece &piece);
    void end_chain();
    PyObject *lists() const;

    std::vector<std::vector<PyObject *>> chains; // the parameters of each chain whose states are scattered

  private:
    bool is_for_kernel(const StepPiece &piece) const;
    bool is_packable(const StepPiece &piece) const;
    bool states_follow(const StepPiece &piece) const;
    bool has_last_step(const StepPiece &piece, bool follows_last);

    size_t kinds_;
    bool steps_, packs_, joins_;
    std::vector<StepRun> runs_;
    std::vector<PyObject *> apart_;          // as in fp_runs_find()
    std::vector<const at::Tensor *> joined_; // the parameters of all runs, without the first of each
    StepPiece last_{};
    float *last_step_ = nullptr;
    std::vector<PyObject *> chain_;
    bool is_scattered_ = false;
};

// Whether torch's fused kernel steps piece right. Its SGD on the host does not change whole vectors of bf16 and fp16.
bool
StepRuns::is_for_kernel(const StepPiece &piece) const
{
    const at::Tensor &param = *piece.tensors[0];
    const bool is_half = param.scalar_type() == at::kHalf || param.scalar_type() == at::kBFloat16;
    bool fits = !(is_half && !steps_ && param.is_cpu()) && !param.is_complex() && param.layout() == at::kStrided &&
                param.is_non_overlapping_and_dense();
    for (size_t k = 1; fits && k < kinds_; k++) {
        const bool is_step = steps_ && k == 2;
        fits = is_step || (piece.tensors[k] != nullptr && is_laid_out_as(*piece.tensors[k], param));
    }
    return fits;
}

// Whether the states of piece may move into one tensor with those of others.
bool
StepRuns::is_packable(const StepPiece &piece) const
{
    const at::Tensor &param = *piece.tensors[0];
    bool fits = param.numel() > 0 && is_plain_host(param) && (!steps_ || step_of(*piece.tensors[2]) != nullptr);
    for (size_t k = steps_ ? 3 : 2; fits && k < kinds_; k++) {
        const at::Tensor &state = *piece.tensors[k];
        fits = state.numel() == param.numel() && state.dtype() == param.dtype() && is_plain_host(state);
    }
    return fits;
}

bool
StepRuns::states_follow(const StepPiece &piece) const
{
    bool all = true;
    for (size_t k = 2; all && k < kinds_; k++) {
        const int64_t numel = steps_ && k == 2 ? 1 : piece.tensors[0]->numel();
        all = piece.tensors[k]->numel() == numel && follows(*piece.tensors[k], *last_.tensors[k]);
    }
    return all;
}

// Whether piece has made as many steps as last_. Of SGD no steps are counted.
bool
StepRuns::has_last_step(const StepPiece &piece, bool follows_last)
{
    if (!steps_) {
        return true;
    }
    const at::Tensor &tensor = *piece.tensors[2];
    const bool is_next = follows_last && last_step_ != nullptr && has_memory(tensor);
    float *const step = is_next ? last_step_ + 1 : step_of(tensor);
    const float *const before = last_step_ != nullptr ? last_step_ : step_of(*last_.tensors[2]);
    last_step_ = step;
    return step != nullptr && *step == *before; // nullptr: somebody has made the storage shorter
}

void
StepRuns::end_chain()
{
    if (is_scattered_) {
        chains.push_back(chain_);
    }
    chain_.clear();
    last_step_ = nullptr;
    is_scattered_ = false;
}

void
StepRuns::append(const StepPiece &piece)
{
    const at::Tensor &param = *piece.tensors[0], &grad = *piece.tensors[1];
    const bool is_whole = kinds_ == 2 || piece.tensors[2] != nullptr;
    // is_packable() need not be asked of later pieces of a chain: what follows a plain host tensor is one, too
    const bool is_beside = joins_ && is_whole && !chain_.empty() && param.numel() > 0 &&
                           follows(param, *last_.tensors[0]) && (chain_.size() > 1 || is_packable(last_));
    const bool follows_last = is_beside && states_follow(piece);
    const bool all_follow = follows_last && grad.numel() == param.numel() && follows(grad, *last_.tensors[1]);
    if (!all_follow && !is_for_kernel(piece)) {
        apart_.push_back(piece.param);
        return;
    }
    const bool is_chained =
        (follows_last || (is_beside && packs_ && is_packable(piece))) && has_last_step(piece, follows_last);
    if (!is_chained) {
        end_chain();
    }
    chain_.push_back(piece.param);
    is_scattered_ = is_scattered_ || (is_chained && !follows_last);
    if (is_chained && all_follow && (runs_.back().count > 1 || is_plain_host(grad))) {
        runs_.back().numel += param.numel();
        runs_.back().count++;
        joined_.push_back(&param);
    }
    else {
        runs_.push_back({piece, param.numel(), 1});
    }
    last_ = piece;
}

// A 1-D tensor of numel elements in first's memory, from the element skipped on. It has first's version counter.
at::Tensor
over(const at::Tensor &first, int64_t numel, int64_t skipped = 0)
{
    constexpr int64_t stride = 1;
    at::Tensor whole = alias(first, {&numel, 1}, {&stride, 1}, first.storage_offset() + skipped);
    whole.unsafeGetTensorImpl()->set_version_counter(torch::autograd::impl::version_counter(first));
    return whole;
}

// Throws the Python exception that is set if object is nullptr.
PyObject *
or_throw(PyObject *object)
{
    if (object == nullptr) {
        throw python_error();
    }
    return object;
}

// make: returns the new reference that becomes item i, or nullptr with an exception.
template <typename Make>
PyObject *
new_list(size_t n, const Make &make)
{
    THPObjectPtr list(or_throw(PyList_New(static_cast<Py_ssize_t>(n))));
    for (size_t i = 0; i < n; i++) {
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), or_throw(make(i)));
    }
    return list.release();
}

PyObject *
new_list(const std::vector<PyObject *> &items)
{
    return new_list(items.size(), [&](size_t i) { return Py_NewRef(items[i]); });
}

PyObject *
StepRuns::lists() const
{
    THPObjectPtr out(or_throw(PyTuple_New(static_cast<Py_ssize_t>(kinds_) + 2)));
    const auto others = [&](size_t r) {
        const Py_ssize_t rest = runs_[r].count - 1;
        return !steps_     ? PyLong_FromSsize_t(rest + 1)
               : rest == 0 ? Py_NewRef(Py_None)
                           : THPVariable_Wrap(over(*runs_[r].first.tensors[2], rest, 1));
    };
    for (size_t k = 0; k < kinds_; k++) {
        const auto tensors = [&](size_t r) {
            const at::Tensor &first = *runs_[r].first.tensors[k];
            const bool as_given = runs_[r].count == 1 || (steps_ && k == 2);
            return THPVariable_Wrap(as_given ? first : over(first, runs_[r].numel));
        };
        PyTuple_SET_ITEM(out.get(), static_cast<Py_ssize_t>(k), new_list(runs_.size(), tensors));
    }
    PyTuple_SET_ITEM(out.get(), static_cast<Py_ssize_t>(kinds_), new_list(runs_.size(), others));
    PyTuple_SET_ITEM(out.get(), static_cast<Py_ssize_t>(kinds_) + 1, new_list(apart_));
    for (const at::Tensor *const param : joined_) {
        param->unsafeGetTensorImpl()->bump_version(); // torch increases that of the run's first parameter
    }
    return out.release();
}

// Finds the gradients and states of a block of parameters.
class StepStates {
  public:
    StepStates(PyObject *state, PyObject *keys, bool steps)
        : state_(state), keys_(keys), n_keys_(PyTuple_GET_SIZE(keys)), steps_(steps)
    {
    }

    Search find(PyObject *const *params, Py_ssize_t n, std::array<StepPiece, BLOCK> *pieces, size_t *found);

  private:
    PyObject *of(PyObject *param);
    Search read(StepPiece *piece) const;

    PyObject *state_, *keys_;
    Py_ssize_t n_keys_, cursor_ = 0;
    bool steps_;
    PyObject *next_ = nullptr, *next_state_ = nullptr; // the entry of state_ that was found last: cursor_ is behind it
};

// The dict of param, or nullptr. Optimizers have states in the order of their parameters, so the next entries are compared
// first: a lookup by hash takes longer.
PyObject *
StepStates::of(PyObject *param)
{
    Py_ssize_t cursor = cursor_;
    PyObject *key = next_, *value = next_state_;
    bool has_more = true;
    for (int i = 0; has_more && key != param && (next_ == nullptr || i < NEAR); i++) {
        has_more = PyDict_Next(state_, &cursor, &key, &value) != 0;
    }
    if (!has_more || key != param) {
        return PyDict_GetItemWithError(state_, param);
    }
    cursor_ = cursor, next_ = key, next_state_ = value;
    return value;
}

Search
StepStates::read(StepPiece *piece) const
{
    Py_ssize_t cursor = 0;
    for (Py_ssize_t k = 0; k < n_keys_; k++) {
        PyObject *const key = PyTuple_GET_ITEM(keys_, k), *name = nullptr, *value = nullptr;
        if (!PyDict_Next(piece->state, &cursor, &name, &value) || name != key) {
            value = PyDict_GetItemWithError(piece->state, key);
        }
        if (value == nullptr || value == Py_None) {
            return PyErr_Occurred() ? Search::failed : Search::missing;
        }
        piece->values[static_cast<size_t>(k)] = value;
        prefetch(value, 1);
    }
    return Search::all;
}

Search
StepStates::find(PyObject *const *params, Py_ssize_t n, std::array<StepPiece, BLOCK> *pieces, size_t *found)
{
    size_t m = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        prefetch(params[i], 1);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        TORCH_CHECK_TYPE(is_tensor(params[i]), "expected a tensor, got ", Py_TYPE(params[i])->tp_name);
        (*pieces)[static_cast<size_t>(i)].param = params[i];
        (*pieces)[static_cast<size_t>(i)].tensors[0] = &THPVariable_Unpack(params[i]);
        prefetch(*(*pieces)[static_cast<size_t>(i)].tensors[0]);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        prefetch((*pieces)[static_cast<size_t>(i)].tensors[0]->unsafeGetTensorImpl()->autograd_meta(), 1);
    }
    for (size_t i = 0; i < static_cast<size_t>(n); i++) {
        const at::Tensor &grad = (*pieces)[i].tensors[0]->unsafeGetTensorImpl()->grad();
        if (grad.defined()) {
            (*pieces)[m] = (*pieces)[i];
            (*pieces)[m++].tensors[1] = &grad;
            prefetch(grad);
        }
    }
    *found = m;
    if (n_keys_ == 0) {
        return Search::all;
    }
    for (size_t i = 0; i < m; i++) {
        StepPiece &piece = (*pieces)[i];
        piece.state = of(piece.param);
        if (piece.state == nullptr ? PyErr_Occurred() != nullptr : !PyDict_Check(piece.state)) {
            return piece.state == nullptr ? Search::failed : Search::not_ours;
        }
        prefetch(piece.state, 1);
    }
    for (size_t i = 0; i < m; i++) {
        if ((*pieces)[i].state != nullptr) {
            prefetch(reinterpret_cast<PyDictObject *>((*pieces)[i].state)->ma_keys, 2);
        }
    }
    for (size_t i = 0; i < m; i++) {
        StepPiece &piece = (*pieces)[i];
        const Search result = piece.state == nullptr ? Search::missing : read(&piece);
        if (result == Search::missing && !steps_) {
            piece.values[0] = nullptr;
        }
        else if (result != Search::all) {
            return result;
        }
    }
    for (size_t i = 0; i < m; i++) {
        for (size_t k = 0; k < static_cast<size_t>(n_keys_); k++) {
            PyObject *const value = (*pieces)[i].values[k];
            if (value != nullptr && !is_tensor(value)) {
                return Search::not_ours;
            }
            (*pieces)[i].tensors[2 + k] = value == nullptr ? nullptr : &THPVariable_Unpack(value);
            if (value != nullptr) {
                prefetch(*(*pieces)[i].tensors[2 + k]);
            }
        }
    }
    return Search::all;
}

} // namespace
} // namespace fp

PyObject *
fp_runs_find(PyObject *params, PyObject *state, PyObject *keys, int steps, int joins, int packs)
{
    return fp::guarded<PyObject *>(nullptr, [&]() -> PyObject * {
        TORCH_CHECK_TYPE(PyList_Check(params) && PyDict_Check(state) && PyTuple_Check(keys),
                         "expected a list, a dict and a tuple, got ", Py_TYPE(params)->tp_name, ", ",
                         Py_TYPE(state)->tp_name, " and ", Py_TYPE(keys)->tp_name);
        TORCH_CHECK_VALUE(PyTuple_GET_SIZE(keys) <= fp::MOST_KEYS, "expected at most ", fp::MOST_KEYS, " keys, got ",
                          PyTuple_GET_SIZE(keys));
        fp::StepStates states(state, keys, steps != 0);
        fp::StepRuns runs(static_cast<size_t>(PyTuple_GET_SIZE(keys)), steps != 0, packs != 0,
                          joins != 0 && !fp_torch_modes_active());
        std::array<fp::StepPiece, fp::BLOCK> pieces;
        for (Py_ssize_t begin = 0; begin < PyList_GET_SIZE(params); begin += fp::BLOCK) {
            size_t m = 0;
            const Py_ssize_t n = std::min(PyList_GET_SIZE(params) - begin, fp::BLOCK);
            const fp::Search found = states.find(PySequence_Fast_ITEMS(params) + begin, n, &pieces, &m);
            if (found != fp::Search::all) {
                return found == fp::Search::failed ? nullptr
                                                   : Py_NewRef(found == fp::Search::missing ? Py_False : Py_None);
            }
            for (size_t i = 0; i < m; i++) {
                if (pieces[i].tensors[1]->layout() != at::kStrided) {
                    return Py_NewRef(Py_None);
                }
                runs.append(pieces[i]);
            }
        }
        runs.end_chain();
        const auto &chains = runs.chains;
        return chains.empty() ? runs.lists()
                              : fp::new_list(chains.size(), [&](size_t i) { return fp::new_list(chains[i]); });
    });
}
