/* fp_testing_py.c -- flatparam._C_testing: what only tests and benchmarks ask of the core. Builds for development
 * have it, in the same library as flatparam._C, whose allocations and SIMD level it shares; an installation has not.
 * Its functions take memory only as objects with the buffer protocol, checked against the sizes asked for. */
#include "fp_testing.h"

#include <string.h>

#include "core/fp_alloc.h"
#include "core/fp_pack.h"
#include "core/fp_simd.h"

/* From this many bytes on the interpreter lock is released: the buffers stay exported, so nobody can free them. */
enum { RELEASE_GIL_BYTES = 1 << 20 };

static const char *const dtype_names[FP_DTYPE_COUNT] = {"float64", "float32", "bfloat16", "float16"};

int
fp_testing_dtype(PyObject *object, fp_dtype *out)
{
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected the name of a dtype, got %.200s", Py_TYPE(object)->tp_name);
        return -1;
    }
    for (int i = 0; i < FP_DTYPE_COUNT; i++) {
        if (PyUnicode_CompareWithASCIIString(object, dtype_names[i]) == 0) {
            *out = (fp_dtype)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "expected float64, float32, bfloat16 or float16, got %R", object);
    return -1;
}

int
fp_testing_buffer(PyObject *object, int writable, Py_buffer *out)
{
    if (PyObject_GetBuffer(object, out, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) {
        return 0;
    }
    out->obj = NULL;
    if (PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyErr_Format(PyExc_TypeError, "expected a contiguous %sbuffer, got %.200s", writable ? "writable " : "",
                     Py_TYPE(object)->tp_name);
    }
    return -1;
}

/* The memory of one call: everything that has to be given back at its end. Zero it before use. */
typedef struct {
    PyObject *items; /* owned tuple of the caller's segments */
    Py_ssize_t n;
    Py_buffer *buffers;   /* one a segment; obj is NULL where there is none */
    fp_segment *segments; /* pointers into buffers */
    Py_buffer flat;
    int64_t begin, end;
} packing;

static void
packing_release(packing *call)
{
    for (Py_ssize_t i = 0; call->buffers != NULL && i < call->n; i++) {
        PyBuffer_Release(&call->buffers[i]); /* does nothing where obj is NULL */
    }
    fp_free(call->buffers);
    fp_free(call->segments);
    PyBuffer_Release(&call->flat);
    Py_XDECREF(call->items);
}

/* 1 if numel elements of item_bytes lie in a buffer of length bytes. */
static int
holds(Py_ssize_t length, int64_t numel, size_t item_bytes)
{
    return numel >= 0 && (uint64_t)numel <= (uint64_t)length / item_bytes;
}

/* Fill segment i from (buffer or None, start, numel). */
static int
get_segment(PyObject *module, packing *call, Py_ssize_t i, size_t item_bytes)
{
    PyObject *item = PyTuple_GET_ITEM(call->items, i); /* borrowed */
    fp_segment *segment = &call->segments[i];
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3) {
        PyErr_Format(PyExc_TypeError, "segment %zd: expected a tuple (buffer or None, start, numel)", i);
        return -1;
    }
    PyObject *memory = PyTuple_GET_ITEM(item, 0);
    if (fp_as_int64(PyTuple_GET_ITEM(item, 1), &segment->start) < 0 ||
        fp_as_int64(PyTuple_GET_ITEM(item, 2), &segment->numel) < 0) {
        return -1;
    }
    if (memory == Py_None) {
        return 0;
    }
    if (fp_testing_buffer(memory, 0, &call->buffers[i]) < 0) {
        return -1;
    }
    if (!holds(call->buffers[i].len, segment->numel, item_bytes)) {
        return fp_fail(module, FP_EINVAL, "segment %zd: %lld elements of %zu bytes do not fit a buffer of %zd bytes", i,
                       (long long)segment->numel, item_bytes, call->buffers[i].len);
    }
    segment->data = call->buffers[i].buf;
    return 0;
}

/* FP_EINVAL for a segment that shares memory with flat, unless it is its own place there and of the same type. */
static int
check_overlap(PyObject *module, const packing *call, size_t segment_bytes, size_t flat_bytes, int same_type)
{
    const uintptr_t flat = (uintptr_t)call->flat.buf;
    const uintptr_t flat_end = flat + (uintptr_t)call->flat.len;
    for (Py_ssize_t i = 0; i < call->n; i++) {
        const fp_segment *segment = &call->segments[i];
        const uintptr_t data = (uintptr_t)segment->data;
        if (segment->data == NULL || segment->numel == 0 || data >= flat_end ||
            data + (size_t)segment->numel * segment_bytes <= flat) {
            continue;
        }
        if (!same_type || segment->start > call->end || data - flat != (size_t)segment->start * flat_bytes) {
            return fp_fail(module, FP_EINVAL, "segment %zd overlaps the flat buffer at another place", i);
        }
    }
    return 0;
}

/* Borrow all memory of a call and check every size. What was borrowed is in call also on failure. */
static int
packing_init(PyObject *module, packing *call, PyObject *segments, size_t segment_bytes, PyObject *flat,
             size_t flat_bytes, PyObject *begin, PyObject *end, int same_type)
{
    if (fp_as_int64(begin, &call->begin) < 0 || fp_as_int64(end, &call->end) < 0) {
        return -1;
    }
    call->items = PySequence_Tuple(segments); /* ours: an __index__ or a buffer's getter may change the caller's list */
    if (call->items == NULL) {
        return -1;
    }
    call->buffers = fp_calloc((size_t)PyTuple_GET_SIZE(call->items), sizeof *call->buffers);
    call->segments = fp_calloc((size_t)PyTuple_GET_SIZE(call->items), sizeof *call->segments);
    if (call->buffers == NULL || call->segments == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->n = PyTuple_GET_SIZE(call->items);
    for (Py_ssize_t i = 0; i < call->n; i++) {
        if (get_segment(module, call, i, segment_bytes) < 0) {
            return -1;
        }
    }
    if (fp_testing_buffer(flat, 1, &call->flat) < 0) {
        return -1;
    }
    if (call->begin < 0 || call->begin > call->end || !holds(call->flat.len, call->end, flat_bytes)) {
        return fp_fail(module, FP_EINVAL, "elements [%lld, %lld) are no range of a buffer of %zd elements",
                       (long long)call->begin, (long long)call->end, call->flat.len / (Py_ssize_t)flat_bytes);
    }
    return check_overlap(module, call, segment_bytes, flat_bytes, same_type);
}

/* 1 if the range is big enough to let other threads run. */
static int
is_big(const packing *call, size_t flat_bytes)
{
    return (size_t)(call->end - call->begin) * flat_bytes >= RELEASE_GIL_BYTES;
}

/* The exception for a refused list, or None. */
static PyObject *
packing_result(PyObject *module, fp_status status)
{
    if (fp_fail(module, status, "segments must be sorted, without overlaps, and not negative") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* None or a number: opts->scale. */
static int
as_scale(PyObject *object, fp_pack_opts *opts)
{
    opts->has_scale = object != Py_None;
    return opts->has_scale ? fp_as_double(object, &opts->scale) : 0;
}

/* pack(segments, segment_dtype, flat, flat_dtype, begin, end, scale=None, accumulate=False) */
static PyObject *
fp_py_pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *result = NULL;
    packing call = {0};
    fp_pack_opts opts = {0};
    fp_dtype segment_dtype, flat_dtype;
    fp_status status;

    if (fp_check_nargs_between("pack", nargs, 6, 8) < 0 || fp_testing_dtype(args[1], &segment_dtype) < 0 ||
        fp_testing_dtype(args[3], &flat_dtype) < 0 || (nargs > 6 && as_scale(args[6], &opts) < 0) ||
        (nargs > 7 && fp_as_bool(args[7], &opts.accumulate) < 0)) {
        return NULL;
    }
    const size_t segment_bytes = fp_dtype_bytes(segment_dtype), flat_bytes = fp_dtype_bytes(flat_dtype);
    if (packing_init(module, &call, args[0], segment_bytes, args[2], flat_bytes, args[4], args[5],
                     segment_dtype == flat_dtype) == 0) {
        PyThreadState *others = is_big(&call, flat_bytes) ? PyEval_SaveThread() : NULL;
        status = fp_pack(call.segments, (size_t)call.n, segment_dtype, call.flat.buf, flat_dtype, call.begin, call.end,
                         &opts);
        if (others != NULL) {
            PyEval_RestoreThread(others);
        }
        result = packing_result(module, status);
    }
    packing_release(&call);
    return result;
}

/* pack_raw(segments, item_bytes, flat, begin, end, fill=None) */
static PyObject *
fp_py_pack_raw(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *result = NULL;
    packing call = {0};
    Py_buffer fill = {0};
    int64_t item_bytes;
    fp_status status;

    if (fp_check_nargs_between("pack_raw", nargs, 5, 6) < 0 || fp_as_int64(args[1], &item_bytes) < 0) {
        return NULL;
    }
    if (item_bytes < 1) {
        fp_fail(module, FP_EINVAL, "expected item_bytes >= 1, got %lld", (long long)item_bytes);
        return NULL;
    }
    if (nargs > 5 && args[5] != Py_None) {
        if (fp_testing_buffer(args[5], 0, &fill) < 0) {
            return NULL;
        }
        if (fill.len != item_bytes) {
            fp_fail(module, FP_EINVAL, "expected %lld bytes of fill, got %zd", (long long)item_bytes, fill.len);
            goto done;
        }
    }
    if (packing_init(module, &call, args[0], (size_t)item_bytes, args[2], (size_t)item_bytes, args[3], args[4], 1) ==
        0) {
        PyThreadState *others = is_big(&call, (size_t)item_bytes) ? PyEval_SaveThread() : NULL;
        status = fp_pack_raw(call.segments, (size_t)call.n, item_bytes, call.flat.buf, call.begin, call.end, fill.buf);
        if (others != NULL) {
            PyEval_RestoreThread(others);
        }
        result = packing_result(module, status);
    }
done:
    packing_release(&call);
    PyBuffer_Release(&fill);
    return result;
}

/* simd_levels() -> names of the levels that work here, the best one last */
static PyObject *
fp_py_simd_levels(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (fp_check_nargs("simd_levels", nargs, 0) < 0) {
        return NULL;
    }
    PyObject *names = PyList_New(0);
    if (names == NULL) {
        return NULL;
    }
    for (int level = 0; level < FP_SIMD_COUNT; level++) {
        if (!fp_simd_supported((fp_simd_level)level)) {
            continue;
        }
        PyObject *name = PyUnicode_FromString(fp_simd_name((fp_simd_level)level));
        if (name == NULL || PyList_Append(names, name) < 0) {
            Py_XDECREF(name);
            Py_DECREF(names);
            return NULL;
        }
        Py_DECREF(name);
    }
    return names;
}

/* simd_level(name=None) -> the level in use, after switching to name if one is given */
static PyObject *
fp_py_simd_level(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (fp_check_nargs_between("simd_level", nargs, 0, 1) < 0) {
        return NULL;
    }
    if (nargs == 1 && args[0] != Py_None) {
        int found = 0;
        if (!PyUnicode_Check(args[0])) {
            PyErr_Format(PyExc_TypeError, "expected the name of a level, got %.200s", Py_TYPE(args[0])->tp_name);
            return NULL;
        }
        for (int level = 0; level < FP_SIMD_COUNT && !found; level++) {
            found = PyUnicode_CompareWithASCIIString(args[0], fp_simd_name((fp_simd_level)level)) == 0 &&
                    fp_simd_set_level((fp_simd_level)level) == FP_OK;
        }
        if (!found) {
            PyErr_Format(PyExc_ValueError, "expected one of simd_levels(), got %R", args[0]);
            return NULL;
        }
    }
    return PyUnicode_FromString(fp_simd_name(fp_simd_get_level()));
}

/* alloc_fail_at(k): the k-th allocation of the core from now on fails, once; 0 switches that off */
static PyObject *
fp_py_alloc_fail_at(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t k;
    if (fp_read_args("alloc_fail_at", args, nargs, "i", &k) < 0) {
        return NULL;
    }
    fp_alloc_fail_at(k);
    Py_RETURN_NONE;
}

/* alloc_live() -> blocks of the core that are in use */
static PyObject *
fp_py_alloc_live(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (fp_check_nargs("alloc_live", nargs, 0) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong(fp_alloc_live());
}

static PyMethodDef testing_methods[] = {
    {"pack", FP_METHOD(fp_py_pack), METH_FASTCALL,
     "pack(segments, segment_dtype, flat, flat_dtype, begin, end, scale=None, accumulate=False, /)\n--\n\n"
     "Compute elements [begin, end) of flat from segments (buffer or None, start, numel), sorted by start."},
    {"pack_raw", FP_METHOD(fp_py_pack_raw), METH_FASTCALL,
     "pack_raw(segments, item_bytes, flat, begin, end, fill=None, /)\n--\n\n"
     "Copy segments into elements [begin, end) of flat as raw items of item_bytes bytes."},
    {"kernel_pack", FP_METHOD(fp_py_kernel_pack), METH_FASTCALL,
     "kernel_pack(pieces, flat, flat_dtype, begin, end, before=1.0, scale=None, accumulate=False, /)\n--\n\n"
     "What the accelerator's kernel does with pieces (buffer or None, dtype, start, numel, ((numel, stride), ...))."},
    {"kernel_norm", FP_METHOD(fp_py_kernel_norm), METH_FASTCALL,
     "kernel_norm(arrays, is_max, /)\n--\n\nThe sum of squares, or the largest magnitude, of (buffer, dtype, numel)."},
    {"kernel_scale", FP_METHOD(fp_py_kernel_scale), METH_FASTCALL,
     "kernel_scale(arrays, factor, in_fp64, /)\n--\n\nMultiply the elements of (buffer, dtype, numel) by a factor."},
    {"use_kernels", fp_py_use_kernels, METH_O,
     "use_kernels(address, /)\n--\n\nCall the fp_kernels at this address where the bodies were called; 0: the bodies "
     "again."},
    {"is_relaxed", fp_py_is_relaxed, METH_NOARGS,
     "is_relaxed()\n--\n\nThe address of a C function: whether the calling thread spares captures, by these kernels."},
    {"host_kernels", FP_METHOD(fp_py_host_kernels), METH_FASTCALL,
     "host_kernels(used, too_old=False, /)\n--\n\nHave the simulated device use these kernels, or none, or say that it "
     "is too old for them; return how often each was called."},
    {"counts", fp_py_counts, METH_O,
     "counts(root, /)\n--\n\nHow often units were gathered, secondary shards refreshed, gradients reduced: a dict."},
    {"accumulated_bytes", fp_py_accumulated_bytes, METH_O,
     "accumulated_bytes(unit, /)\n--\n\nThe bytes of accumulated gradients: (on the device, in host memory)."},
    {"secondary_shards", fp_py_secondary_shards, METH_O,
     "secondary_shards(unit, /)\n--\n\nThis rank's secondary shard of each flat parameter, or None."},
    {"simd_levels", FP_METHOD(fp_py_simd_levels), METH_FASTCALL,
     "simd_levels()\n--\n\nNames of the SIMD levels that work on this processor, the best one last."},
    {"simd_level", FP_METHOD(fp_py_simd_level), METH_FASTCALL,
     "simd_level(name=None, /)\n--\n\nThe SIMD level in use; with a name, switch to it first."},
    {"alloc_fail_at", FP_METHOD(fp_py_alloc_fail_at), METH_FASTCALL,
     "alloc_fail_at(k, /)\n--\n\nMake the k-th allocation of the core from now on fail, once; 0: off."},
    {"alloc_live", FP_METHOD(fp_py_alloc_live), METH_FASTCALL,
     "alloc_live()\n--\n\nHow many blocks of the core are in use."},
    {NULL, NULL, 0, NULL},
};

static int
testing_exec(PyObject *module)
{
    PyObject *shipped = PyImport_ImportModule("flatparam._C");
    if (shipped == NULL) {
        return -1;
    }
    fp_get_state(module)->ShardError = PyObject_GetAttrString(shipped, "ShardError");
    Py_DECREF(shipped);
    return fp_get_state(module)->ShardError == NULL ? -1 : 0;
}

static int
testing_clear(PyObject *module)
{
    Py_CLEAR(fp_get_state(module)->ShardError);
    return 0;
}

static PyModuleDef_Slot testing_slots[] = {
    {Py_mod_exec, (void *)testing_exec},
    {0, NULL},
};

static PyModuleDef testing_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "flatparam._C_testing",
    .m_size = sizeof(fp_module_state),
    .m_methods = testing_methods,
    .m_slots = testing_slots,
    .m_clear = testing_clear,
};

PyMODINIT_FUNC PyInit__C_testing(void);

PyMODINIT_FUNC
PyInit__C_testing(void)
{
    return PyModuleDef_Init(&testing_module);
}
