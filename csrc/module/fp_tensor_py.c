/* module/fp_tensor_py.c -- wrappers of csrc/tensor, and of two functions of desync/fp_watch.h, as functions of _C. */
#include "core/fp_alloc.h"
#include "tensor/fp_flatten.h"
#include "tensor/fp_gradients.h"
#include "tensor/fp_graph.h"
#include "tensor/fp_runs.h"
#include "tensor/fp_shards.h"
#include "tensor/fp_torch.h"
#include "desync/fp_watch.h"
#include "module/fp_tables.h"

static PyObject *
is_plain(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return PyBool_FromLong(fp_torch_all_plain(args, nargs));
}

static PyObject *
is_plain_tensor(PyObject *module, PyObject *object)
{
    return PyBool_FromLong(fp_torch_is_plain(object));
}

static PyObject *
allocate(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t numel;
    FP_TRY_NULL(fp_read_args("allocate", args, nargs, "Oi", &numel));
    const int status = fp_torch_allocate(args[0], numel);
    return status == 2 ? Py_NewRef(Py_None) : fp_bool_unless(status);
}

static PyObject *
free_storage(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *reason = NULL;
    FP_TRY_NULL(fp_check_nargs_between("free", nargs, 1, 3));
    if (nargs > 1 && args[1] != Py_None) {
        reason = fp_as_text(args[1]); /* owned */
        FP_NEED_NULL(reason);
    }
    const int keeps_size = nargs > 2 ? PyObject_IsTrue(args[2]) : 0;
    const char *text = reason == NULL ? NULL : PyUnicode_AsUTF8(reason);
    const int status = keeps_size < 0 ? -1 : fp_torch_free(args[0], text, keeps_size);
    Py_XDECREF(reason);
    return status < 0 ? NULL : PyBool_FromLong(status);
}

static PyObject *
is_leaf(PyObject *module, PyObject *object)
{
    return PyBool_FromLong(fp_torch_is_leaf(object));
}

static PyObject *
lacks_memory(PyObject *module, PyObject *object)
{
    const int found = fp_torch_lacks_memory(object);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *
storage_numel(PyObject *module, PyObject *tensor)
{
    const int64_t numel = fp_torch_storage_numel(tensor);
    return numel < 0 ? NULL : PyLong_FromLongLong(numel);
}

static PyObject *
storage_holders(PyObject *module, PyObject *tensor)
{
    const int64_t holders = fp_torch_storage_holders(tensor);
    return holders < 0 ? NULL : PyLong_FromLongLong(holders);
}

static PyObject *
has_freed(PyObject *module, PyObject *unused)
{
    const int found = fp_torch_has_freed();
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *
digest(PyObject *module, PyObject *tensor)
{
    uint64_t found;
    return fp_torch_digest(tensor, &found) < 0 ? NULL : PyLong_FromUnsignedLongLong(found);
}

static PyObject *
same_storage(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("same_storage", nargs, 2));
    return fp_bool_unless(fp_torch_same_storage(args[0], args[1]));
}

static PyObject *
clear_grads(PyObject *module, PyObject *params)
{
    PyObject *items = PySequence_Tuple(params); /* a copy: the end of a gradient may run code that changes a list */
    const int plain = items == NULL ? -1 : fp_torch_clear_grads(fp_items(items), PyTuple_GET_SIZE(items));
    Py_XDECREF(items);
    return fp_bool_unless(plain);
}

static PyObject *
mark_zeros(PyObject *module, PyObject *grad)
{
    return fp_none_unless(fp_gradients_mark_zeros(grad));
}

static PyObject *
is_zeroed(PyObject *module, PyObject *grad)
{
    return fp_bool_unless(fp_gradients_is_zeroed(grad));
}

static PyObject *
grad_summary(PyObject *module, PyObject *params)
{
    int none, any;
    PyObject *items = PySequence_Tuple(params);
    const int plain = items == NULL ? -1 : fp_torch_grad_summary(fp_items(items), PyTuple_GET_SIZE(items), &none, &any);
    Py_XDECREF(items);
    if (plain <= 0) {
        return plain < 0 ? NULL : Py_NewRef(Py_None);
    }
    return Py_BuildValue("(NN)", PyBool_FromLong(none), PyBool_FromLong(any));
}

static PyObject *
versions(PyObject *module, PyObject *params)
{
    PyObject *items = PySequence_Tuple(params), *sum = NULL;
    if (items != NULL && fp_torch_all_plain(fp_items(items), PyTuple_GET_SIZE(items))) {
        sum = PyLong_FromLongLong(fp_param_versions(fp_items(items), NULL, PyTuple_GET_SIZE(items)));
    }
    else if (items != NULL) {
        sum = Py_NewRef(Py_None);
    }
    Py_XDECREF(items);
    return sum;
}

static PyObject *
survey(PyObject *module, PyObject *tensors)
{
    PyObject *out = NULL, *items = PySequence_Tuple(tensors);
    Py_ssize_t trained = 0;
    FP_NEED_NULL(items);
    const Py_ssize_t n = PyTuple_GET_SIZE(items);
    int64_t *numels = fp_new_array(n, sizeof *numels);
    const int fit = numels == NULL ? -1 : fp_torch_survey(fp_items(items), n, numels, &trained);
    if (fit >= 0) {
        out = fit ? Py_BuildValue("(Nn)", fp_int64_tuple(numels, n), trained) : Py_NewRef(Py_None);
    }
    fp_free(numels);
    Py_DECREF(items);
    return out;
}

static PyObject *
grad_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    double order;
    int in_fp64;
    FP_TRY_NULL(fp_read_args("grad_norm", args, nargs, "OdbO", &order, &in_fp64));
    PyObject *items = PySequence_Tuple(args[0]);
    PyObject *norm =
        items == NULL ? NULL : fp_gradients_norm(fp_items(items), PyTuple_GET_SIZE(items), order, in_fp64, args[3]);
    Py_XDECREF(items);
    return norm;
}

static PyObject *
clip_grads(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    double root, max_norm;
    FP_TRY_NULL(fp_read_args("clip_grads", args, nargs, "OOdd", &root, &max_norm));
    PyObject *items = PySequence_Tuple(args[0]);
    PyObject *norm =
        items == NULL ? NULL : fp_gradients_clip(fp_items(items), PyTuple_GET_SIZE(items), args[1], root, max_norm);
    Py_XDECREF(items);
    return norm;
}

static PyObject *
convert(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int accumulate;
    FP_TRY_NULL(fp_read_args("convert", args, nargs, "OOb", &accumulate));
    return fp_none_unless(fp_torch_convert(args[0], args[1], accumulate));
}

static PyObject *
lend(PyObject *module, PyObject *tensor)
{
    return fp_bool_unless(fp_torch_lend(tensor));
}

static PyObject *
lending_exchange(PyObject *module, PyObject *capsule)
{
    return fp_torch_lending_exchange(capsule);
}

static PyObject *
explain_shards(PyObject *module, PyObject *explain)
{
    fp_torch_explain_shards(explain);
    Py_RETURN_NONE;
}

static PyObject *
wait_device(PyObject *module, PyObject *device)
{
    const char *name = PyUnicode_AsUTF8(device);
    return name == NULL ? NULL : fp_none_unless(fp_wait_device(name));
}

static PyObject *
time_out(PyObject *module, PyObject *args)
{
    const char *group, *device;
    if (!PyArg_ParseTuple(args, "ss:time_out", &group, &device)) {
        return NULL;
    }
    const double seconds = fp_time_out(group, device);
    return seconds < 0.0 ? NULL : PyFloat_FromDouble(seconds);
}

static PyObject *
let_go(PyObject *module, PyObject *group)
{
    const char *name = PyUnicode_AsUTF8(group);
    return name == NULL ? NULL : fp_none_unless(fp_let_go(name));
}

static PyObject *
unseen_by_checkpoints(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    fp_hidden *hidden = NULL;
    if (nargs < 1) {
        return PyErr_Format(PyExc_TypeError, "unseen_by_checkpoints() expected a callable and its arguments");
    }
    FP_TRY_NULL(fp_hide_checkpoints(&hidden));
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)nargs - 1, names);
    fp_show_checkpoints(hidden);
    return result;
}

static PyObject *
note_accumulator(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("note_accumulator", nargs, 2));
    return fp_graph_note_accumulator(args[0], args[1]);
}

static PyObject *
accumulators(PyObject *module, PyObject *known)
{
    return fp_graph_accumulators(known);
}

static PyObject *
runs(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int steps, joins, packs;
    FP_TRY_NULL(fp_read_args("runs", args, nargs, "OOObbb", &steps, &joins, &packs));
    return fp_runs_find(args[0], args[1], args[2], steps, joins, packs);
}

PyMethodDef fp_tensor_methods[] = {
    {"note_accumulator", FP_METHOD(note_accumulator), METH_FASTCALL,
     "note_accumulator($module, known, tensor, /)\n--\n\n"
     "Note the node that accumulates the gradient of tensor now, if a graph has one. Return the notes.\n\n"
     "known: the notes that the last call for this tensor returned, or None. They keep no node alive."},
    {"accumulators", accumulators, METH_O,
     "accumulators($module, known, /)\n--\n\n"
     "Return a list of the noted nodes that live, in the order in which note_accumulator() noted them."},
    {"unseen_by_checkpoints", FP_METHOD(unseen_by_checkpoints), METH_FASTCALL | METH_KEYWORDS,
     "unseen_by_checkpoints($module, call, /, *args, **kwargs)\n--\n\n"
     "Return call(*args, **kwargs). Selective activation checkpoints do not see its operations, so they save none of "
     "its results."},
    {"wait_device", wait_device, METH_O,
     "wait_device($module, device, /)\n--\n\n"
     "Wait until the current stream of device, as 'cuda:1', has done all work that was queued. Ctrl-C ends the "
     "wait.\n\nIt returns at once for the host, and in the capture of a CUDA graph."},
    {"time_out", time_out, METH_VARARGS,
     "time_out($module, group, device, /)\n--\n\n"
     "Return the seconds after which a collective over group fails on a type of device, as 'cuda'.\n\n"
     "group: the name under which torch registered it. Infinite: there is no such group, or its backend tells no "
     "time-out."},
    {"let_go", let_go, METH_O,
     "let_go($module, group, /)\n--\n\n"
     "Let another thread wait for the end of a group that is destroyed next: its collectives may never end.\n\n"
     "group: the name under which torch registered it."},
    {"is_plain", FP_METHOD(is_plain), METH_FASTCALL,
     "is_plain($module, *tensors)\n--\n\n"
     "Return whether all are plain tensors and no dispatch or function mode is on: loops in C then do what torch's "
     "operations would."},
    {"is_plain_tensor", is_plain_tensor, METH_O,
     "is_plain_tensor($module, object, /)\n--\n\n"
     "Return whether object is a plain tensor: strided, of no subclass, with a storage. Modes do not matter."},
    {"is_leaf", is_leaf, METH_O,
     "is_leaf($module, object, /)\n--\n\n"
     "Return tensor.is_leaf, whatever modes are on; True for an object that is no tensor."},
    {"allocate", FP_METHOD(allocate), METH_FASTCALL,
     "allocate($module, tensor, numel, /)\n--\n\n"
     "Give the freed storage of tensor memory for numel elements of its dtype, in place. The values are undefined.\n\n"
     "True: done. False: it has just that much memory. None, with nothing done: it has another amount, or tensor is "
     "not plain."},
    {"free", FP_METHOD(free_storage), METH_FASTCALL,
     "free($module, tensor, reason=None, keeps_size=False, /)\n--\n\nFree the storage of tensor in place.\n\n"
     "reason: the message of the RuntimeError that an access to the freed data raises. "
     "keeps_size: the storage still tells its size, so that views of it can be made.\n\n"
     "False, with nothing done: tensor is not plain, or does not begin its storage."},
    {"lacks_memory", lacks_memory, METH_O,
     "lacks_memory($module, object, /)\n--\n\n"
     "Return whether the storage of a plain tensor has less memory than its elements need: it was freed or resized. "
     "False for any other object."},
    {"storage_numel", storage_numel, METH_O,
     "storage_numel($module, tensor, /)\n--\n\n"
     "Return the number of elements of tensor's dtype for which its storage has memory."},
    {"storage_holders", storage_holders, METH_O,
     "storage_holders($module, tensor, /)\n--\n\n"
     "Return the number of tensors over the storage of tensor, of Python and of C++."},
    {"has_freed", has_freed, METH_NOARGS,
     "has_freed($module, /)\n--\n\n"
     "Return whether a storage lives that flatparam has freed: a weight may be kept longer than its model."},
    {"digest", digest, METH_O,
     "digest($module, tensor, /)\n--\n\n"
     "Return a 64-bit digest of the values of a dense tensor on the host, to compare tensors of one size and the same "
     "strides. Of more than 16 KiB it reads 64 bytes in each 8 KiB."},
    {"same_storage", FP_METHOD(same_storage), METH_FASTCALL,
     "same_storage($module, a, b, /)\n--\n\nReturn whether two tensors have one storage, or storages at one address."},
    {"clear_grads", clear_grads, METH_O,
     "clear_grads($module, params, /)\n--\n\nSet .grad of each parameter to None. "
     "False, with nothing done, unless is_plain(*params)."},
    {"mark_zeros", mark_zeros, METH_O,
     "mark_zeros($module, grad, /)\n--\n\n"
     "Replace the zeros of grad, which is shown next, by -0.0, so that is_zeroed() can tell whether users set it to "
     "zeros. csrc/tensor/fp_gradients.h has the rule."},
    {"is_zeroed", is_zeroed, METH_O,
     "is_zeroed($module, grad, /)\n--\n\nReturn whether grad was set to zeros since mark_zeros()."},
    {"grad_summary", grad_summary, METH_O,
     "grad_summary($module, params, /)\n--\n\nReturn (no parameter has a gradient, some parameter requires one). "
     "None unless is_plain(*params)."},
    {"versions", versions, METH_O,
     "versions($module, params, /)\n--\n\n"
     "Return the sum of the version counters of params, which count changes in place. None unless is_plain(*params)."},
    {"survey", survey, METH_O,
     "survey($module, tensors, /)\n--\n\n"
     "Return (numel of each, number of those that require grad), or None if Python must look at each tensor. "
     "Not None: all are plain, contiguous, of one floating-point or complex dtype and one device, and no two share "
     "memory."},
    {"runs", FP_METHOD(runs), METH_FASTCALL,
     "runs($module, params, state, keys, steps, joins, packs, /)\n--\n\n"
     "Return (params, grads, one list for each key, others, apart): the tensors of an optimizer's step, with one for "
     "each run of parameters that lie side by side.\n\n"
     "steps: whether the first key is the number of the step. joins: False: each parameter is a run. None: torch has "
     "to step. False: a state is missing. "
     "packs: return a list of lists of parameters whose states could lie side by side, and do not, if there are some. "
     "csrc/tensor/fp_runs.h has the rule."},
    {"grad_norm", FP_METHOD(grad_norm), METH_FASTCALL,
     "grad_norm($module, params, order, in_fp64, device, /)\n--\n\n"
     "Return the norm of the gradients of params, to the power of order unless order is infinite. "
     "It is a 0-dim tensor on device in fp64 (in_fp64) or fp32."},
    {"clip_grads", FP_METHOD(clip_grads), METH_FASTCALL,
     "clip_grads($module, params, sum, root, max_norm, /)\n--\n\n"
     "Multiply the gradients of params by max_norm / norm, if that is less than 1, and return norm. "
     "norm is sum, a 0-dim tensor, to the power of root. It is returned in the widest real dtype of the gradients."},
    {"convert", FP_METHOD(convert), METH_FASTCALL,
     "convert($module, target, source, accumulate, /)\n--\n\n"
     "target = source, or target += source if accumulate, converted to target's dtype. Both are 1-D and equally long, "
     "in separate memory; else ValueError. On the CPU it is one pass over memory."},
    {"explain_shards", explain_shards, METH_O,
     "explain_shards($module, explain, /)\n--\n\n"
     "Set the function explain(tensor) that returns the message of the RuntimeError for a shard, or None if tensor is "
     "none."},
    {"lend", lend, METH_O,
     "lend($module, tensor, /)\n--\n\n"
     "Note that code outside has taken the address of tensor, and a reference to it. flatparam leaves this memory to "
     "it, should it free and fill the storage. Return whether flatparam frees this storage at all."},
    {"lending_exchange", lending_exchange, METH_O,
     "lending_exchange($module, capsule, /)\n--\n\n"
     "Return a capsule for torch.Tensor.__dlpack_c_exchange_api__ that calls lend() for each exported tensor, and else "
     "does what capsule does."},
    {NULL, NULL, 0, NULL},
};
