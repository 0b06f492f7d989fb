/* module/fp_tensor_py.c -- wrappers of csrc/tensor: tensors and their storages, signs of life. */
#include "core/fp_alloc.h"
#include "tensor/fp_flatten.h"
#include "tensor/fp_gradients.h"
#include "tensor/fp_graph.h"
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
    if (fp_read_args("allocate", args, nargs, "Oi", &numel) < 0) {
        return NULL;
    }
    const int status = fp_torch_allocate(args[0], numel);
    return status == 2 ? Py_NewRef(Py_None) : fp_bool_unless(status);
}

static PyObject *
free_storage(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *reason = NULL;
    if (fp_check_nargs_between("free", nargs, 1, 3) < 0) {
        return NULL;
    }
    if (nargs > 1 && args[1] != Py_None) {
        reason = fp_as_text(args[1]); /* owned */
        if (reason == NULL) {
            return NULL;
        }
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
digest(PyObject *module, PyObject *tensor)
{
    uint64_t found;
    return fp_torch_digest(tensor, &found) < 0 ? NULL : PyLong_FromUnsignedLongLong(found);
}

static PyObject *
same_storage(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (fp_check_nargs("same_storage", nargs, 2) < 0) {
        return NULL;
    }
    return fp_bool_unless(fp_torch_same_storage(args[0], args[1]));
}

static PyObject *
clear_grads(PyObject *module, PyObject *params)
{
    PyObject *items = PySequence_Tuple(params); /* a copy of ours: what is released may change a list */
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
    if (items == NULL) {
        return NULL;
    }
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
    if (fp_read_args("grad_norm", args, nargs, "OdbO", &order, &in_fp64) < 0) {
        return NULL;
    }
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
    if (fp_read_args("clip_grads", args, nargs, "OOdd", &root, &max_norm) < 0) {
        return NULL;
    }
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
    if (fp_read_args("convert", args, nargs, "OOb", &accumulate) < 0) {
        return NULL;
    }
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
unseen_by_checkpoints(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    fp_hidden *hidden = NULL;
    if (nargs < 1) {
        return PyErr_Format(PyExc_TypeError, "unseen_by_checkpoints() expected a callable and its arguments");
    }
    if (fp_hide_checkpoints(&hidden) < 0) {
        return NULL;
    }
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)nargs - 1, names);
    fp_show_checkpoints(hidden);
    return result;
}

static PyObject *
note_accumulator(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return fp_check_nargs("note_accumulator", nargs, 2) < 0 ? NULL : fp_graph_note_accumulator(args[0], args[1]);
}

static PyObject *
accumulators(PyObject *module, PyObject *known)
{
    return fp_graph_accumulators(known);
}

PyMethodDef fp_tensor_methods[] = {
    {"note_accumulator", FP_METHOD(note_accumulator), METH_FASTCALL,
     "note_accumulator($module, known, tensor, /)\n--\n\nNote the node that accumulates the gradient of tensor now, if "
     "a graph has one.\n\nknown: what the last call for this tensor returned, or None. It keeps no node alive."},
    {"accumulators", accumulators, METH_O,
     "accumulators($module, known, /)\n--\n\nReturn those nodes that note_accumulator() has noted and that live, the "
     "first noted first."},
    {"unseen_by_checkpoints", FP_METHOD(unseen_by_checkpoints), METH_FASTCALL | METH_KEYWORDS,
     "unseen_by_checkpoints($module, call, /, *args, **kwargs)\n--\n\nReturn call(*args, **kwargs). No selective "
     "activation checkpoint keeps anything of it."},
    {"wait_device", wait_device, METH_O,
     "wait_device($module, device, /)\n--\n\nWait until the current stream of device, as 'cuda:1', has done all that "
     "it was "
     "given.\n\nNothing is waited for in a capture of a CUDA graph, and where device is the host."},
    {"time_out", time_out, METH_VARARGS,
     "time_out($module, group, device, /)\n--\n\nReturn the seconds after which a collective fails on a type of "
     "device.\n\n"
     "group: the name under which C++ knows it. Infinite: there is no such group, or its backend does not say."},
    {"is_plain", FP_METHOD(is_plain), METH_FASTCALL,
     "is_plain($module, *tensors)\n--\n\nWhether all are dense tensors of no subclass, and no dispatch or function "
     "mode is on: loops in C do with them what torch's operations would."},
    {"is_plain_tensor", is_plain_tensor, METH_O,
     "is_plain_tensor($module, object, /)\n--\n\nWhether it is a dense tensor of no subclass, whatever modes are on."},
    {"is_leaf", is_leaf, METH_O,
     "is_leaf($module, object, /)\n--\n\nAs tensor.is_leaf, whatever modes are on; True of what is no tensor."},
    {"allocate", FP_METHOD(allocate), METH_FASTCALL,
     "allocate($module, tensor, numel, /)\n--\n\nGive the freed storage of tensor room for numel elements of its "
     "dtype. Contents are not kept.\n\nFalse: it has just that room already; None, with nothing done: it has other "
     "room, or tensor is not plain."},
    {"free", FP_METHOD(free_storage), METH_FASTCALL,
     "free($module, tensor, reason=None, keeps_size=False, /)\n--\n\nFree the storage of tensor in place. "
     "reason: what a RuntimeError says when freed data is accessed. keeps_size: then let a freed storage say its "
     "size.\n\nFalse, with nothing done: tensor is not plain, or does not begin its storage."},
    {"lacks_memory", lacks_memory, METH_O,
     "lacks_memory($module, object, /)\n--\n\nWhether the storage of a plain tensor is too small for it: it was freed, "
     "or "
     "resized. False of any other object."},
    {"storage_numel", storage_numel, METH_O,
     "storage_numel($module, tensor, /)\n--\n\nHow many elements of tensor's dtype its storage has memory for."},
    {"digest", digest, METH_O,
     "digest($module, tensor, /)\n--\n\nA number of 64 bits that tells the values of dense tensors on the host apart, "
     "of one size and strides. Of more than 16 KiB it reads a line of 64 bytes in each 8 KiB."},
    {"same_storage", FP_METHOD(same_storage), METH_FASTCALL,
     "same_storage($module, a, b, /)\n--\n\nWhether both use one storage, or storages at one address."},
    {"clear_grads", clear_grads, METH_O,
     "clear_grads($module, params, /)\n--\n\nSet each parameter's .grad to None; False, with nothing done, "
     "unless is_plain(*params)."},
    {"mark_zeros", mark_zeros, METH_O,
     "mark_zeros($module, grad, /)\n--\n\nMake the zeros of grad, which is shown next, -0.0: is_zeroed() then tells "
     "whether it was set to zeros. csrc/tensor/fp_gradients.h has the rule."},
    {"is_zeroed", is_zeroed, METH_O,
     "is_zeroed($module, grad, /)\n--\n\nWhether grad was set to zeros since mark_zeros()."},
    {"grad_summary", grad_summary, METH_O,
     "grad_summary($module, params, /)\n--\n\n(no parameter has a gradient, some parameter requires one); None "
     "unless is_plain(*params)."},
    {"versions", versions, METH_O,
     "versions($module, params, /)\n--\n\nThe sum of their versions, which counts changes in place; None unless all "
     "are "
     "plain and no mode is on."},
    {"survey", survey, METH_O,
     "survey($module, tensors, /)\n--\n\n(elements of each, how many require grad) of tensors that can be flattened "
     "without a closer look: plain, contiguous, of one floating-point or complex dtype and one device, each in memory "
     "of its own. Else None."},
    {"grad_norm", FP_METHOD(grad_norm), METH_FASTCALL,
     "grad_norm($module, params, order, in_fp64, device, /)\n--\n\nThe norm of the gradients of params, to the power "
     "of order unless that is infinite: a scalar on device, computed in fp64 or fp32."},
    {"clip_grads", FP_METHOD(clip_grads), METH_FASTCALL,
     "clip_grads($module, params, sum, root, max_norm, /)\n--\n\nScale the gradients of params by max_norm / norm, "
     "where that is less than 1. The norm, sum to the power of root, in the widest real dtype of the gradients."},
    {"convert", FP_METHOD(convert), METH_FASTCALL,
     "convert($module, target, source, accumulate, /)\n--\n\ntarget = source, or target += source: 1-D, equally long, "
     "of any dtypes; in one pass over memory on the CPU."},
    {"explain_shards", explain_shards, METH_O,
     "explain_shards($module, explain, /)\n--\n\nexplain(tensor) says what a RuntimeError is to say of a shard, or "
     "None."},
    {"lend", lend, METH_O,
     "lend($module, tensor, /)\n--\n\nSomebody has the address of tensor, and a reference to it: if flatparam frees "
     "and fills its storage, it leaves the memory to them. Whether it does."},
    {"lending_exchange", lending_exchange, METH_O,
     "lending_exchange($module, capsule, /)\n--\n\nThe capsule of torch.Tensor.__dlpack_c_exchange_api__, such that "
     "what is exported through it is lent."},
    {NULL, NULL, 0, NULL},
};
