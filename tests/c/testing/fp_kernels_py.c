/* fp_kernels_py.c -- the accelerator's kernels run on the host: by Python, and by the runtime on a simulated device. */
#include "core/fp_alloc.h"
#include "tensor/fp_torch.h"
#include "fp_host_kernels.h"
#include "fp_testing.h"

static int packed, measured, scaled; /* calls so far */
static int too_old;                  /* the device, for what was compiled */

enum { ARGUMENT_BYTES = 4000 };

static int
run_pack(const fp_pack_job *job, const fp_table *table, void *stream)
{
    const fp_index index = fp_pack_index(job, table);
    fp_host_pack(job, table->memory, &index);
    return 0;
}

static int
run_norm(const fp_norm_job *job, const fp_table *table, void *stream)
{
    const fp_index index = fp_norm_index(job, table);
    fp_host_norm(job, table->memory, &index);
    return 0;
}

static int
run_scale(const fp_scale_job *job, const fp_table *table, void *stream)
{
    const fp_index index = fp_scale_index(job, table);
    fp_host_scale(job, table->memory, &index);
    return 0;
}

static int
count(int *calls, const fp_table *table)
{
    (*calls)++;
    return table->bytes > ARGUMENT_BYTES;
}

static int
asked_pack(const fp_pack_job *job, const fp_table *table, void *stream)
{
    return count(&packed, table) || run_pack(job, table, stream);
}

static int
asked_norm(const fp_norm_job *job, const fp_table *table, void *stream)
{
    return count(&measured, table) || run_norm(job, table, stream);
}

static int
asked_scale(const fp_scale_job *job, const fp_table *table, void *stream)
{
    return count(&scaled, table) || run_scale(job, table, stream);
}

static int
host_works(int device)
{
    return device == 0 && !too_old;
}

static const char *
host_message(int error)
{
    return error == 0 ? "none" : "the table is too large";
}

static _Thread_local int capture_mode;

static int
host_set_capture_mode(int mode)
{
    const int before = capture_mode;
    capture_mode = mode;
    return before;
}

static int
host_is_relaxed(void)
{
    return capture_mode == FP_CAPTURE_MODE_RELAXED;
}

/* Where the simulated device finds host_is_relaxed(). */
PyObject *
fp_py_is_relaxed(PyObject *module, PyObject *ignored)
{
    return PyLong_FromVoidPtr((void *)(uintptr_t)host_is_relaxed);
}

static const fp_kernels host_kernels = {.argument_bytes = ARGUMENT_BYTES,
                                        .works = host_works,
                                        .pack = asked_pack,
                                        .norm = asked_norm,
                                        .scale = asked_scale,
                                        .message = host_message,
                                        .set_capture_mode = host_set_capture_mode};

PyObject *
fp_py_host_kernels(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    int used;
    too_old = 0;
    if (fp_check_nargs_between("host_kernels", nargs, 1, 2) < 0 || fp_as_bool(args[0], &used) < 0 ||
        (nargs > 1 && fp_as_bool(args[1], &too_old) < 0)) {
        return NULL;
    }
    fp_torch_use_kernels(used ? &host_kernels : NULL);
    return Py_BuildValue("{s:i,s:i,s:i}", "pack", packed, "norm", measured, "scale", scaled);
}

static const fp_kernels bodies = {.pack = run_pack, .norm = run_norm, .scale = run_scale};
static const fp_kernels *tested = &bodies; /* what kernel_pack(), kernel_norm() and kernel_scale() call */

/* use_kernels(address): call these fp_kernels from now on; 0: the bodies. */
PyObject *
fp_py_use_kernels(PyObject *module, PyObject *address)
{
    const fp_kernels *given = PyLong_AsVoidPtr(address);
    if (given == NULL && PyErr_Occurred()) {
        return NULL;
    }
    tested = given != NULL ? given : &bodies;
    Py_RETURN_NONE;
}

/* The memory of one call. Zero it before use. */
typedef struct {
    PyObject *items; /* owned tuple of the caller's pieces */
    Py_buffer *buffers;
    void *memory; /* the table */
    Py_buffer flat;
    fp_table table;
    int64_t end; /* of the last piece */
} asked;

static void
asked_release(asked *call)
{
    for (Py_ssize_t i = 0; call->buffers != NULL && i < PyTuple_GET_SIZE(call->items); i++) {
        PyBuffer_Release(&call->buffers[i]);
    }
    fp_free(call->buffers);
    fp_free(call->memory);
    PyBuffer_Release(&call->flat);
    Py_XDECREF(call->items);
}

/* Read dims, a tuple of (numel, stride), for piece; *last becomes its last element's offset. */
static int
get_dims(PyObject *module, PyObject *dims, fp_piece *piece, fp_piece_dim *out, int64_t *last)
{
    int64_t numel = 1;
    *last = 0;
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(dims); d++) {
        PyObject *pair = PyTuple_GET_ITEM(dims, d); /* borrowed */
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
            fp_as_int64(PyTuple_GET_ITEM(pair, 0), &out[d].numel) < 0 ||
            fp_as_int64(PyTuple_GET_ITEM(pair, 1), &out[d].stride) < 0) {
            return PyErr_Occurred() ? -1 : fp_fail(module, FP_EINVAL, "expected dimensions (numel, stride)");
        }
        if (out[d].numel < 1 || out[d].stride < 0 || out[d].numel > 1 << 20 || out[d].stride > 1 << 20) {
            return fp_fail(module, FP_EINVAL, "dimension %zd does not fit", d);
        }
        numel *= out[d].numel;
        *last += (out[d].numel - 1) * out[d].stride;
    }
    piece->ndim = (uint16_t)PyTuple_GET_SIZE(dims);
    if (piece->ndim == 0) {
        *last = piece->numel - 1;
        return 0;
    }
    return numel == piece->numel ? 0 : fp_fail(module, FP_EINVAL, "the dimensions have not the piece's elements");
}

/* Fill call->table from tuples (buffer or None, dtype, start, numel, dims), or for a list (buffer, dtype, numel). */
static int
asked_init(PyObject *module, asked *call, PyObject *pieces, int is_list)
{
    call->items = PySequence_Tuple(pieces);
    if (call->items == NULL) {
        return -1;
    }
    const Py_ssize_t n = PyTuple_GET_SIZE(call->items);
    size_t ndims = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(call->items, i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != (is_list ? 3 : 5) ||
            (!is_list && !PyTuple_Check(PyTuple_GET_ITEM(item, 4)))) {
            PyErr_Format(PyExc_TypeError, "piece %zd is not as expected", i);
            return -1;
        }
        ndims += is_list ? 0 : (size_t)PyTuple_GET_SIZE(PyTuple_GET_ITEM(item, 4));
    }
    call->table.bytes = (size_t)n * sizeof(fp_piece) + ndims * sizeof(fp_piece_dim);
    call->buffers = fp_new_array(n, sizeof *call->buffers);
    call->memory = fp_new_array((Py_ssize_t)call->table.bytes, 1);
    if (call->buffers == NULL || call->memory == NULL) {
        return -1;
    }
    fp_piece *piece = call->memory;
    fp_piece_dim *dims = (fp_piece_dim *)(void *)(piece + n);
    uint32_t used = 0;
    call->table.memory = call->memory;
    call->table.n = (uint32_t)n;
    for (Py_ssize_t i = 0; i < n; i++, piece++) {
        PyObject *item = PyTuple_GET_ITEM(call->items, i), *memory = PyTuple_GET_ITEM(item, 0);
        fp_dtype dtype;
        int64_t last = 0;
        if (fp_testing_dtype(PyTuple_GET_ITEM(item, 1), &dtype) < 0 ||
            fp_as_int64(PyTuple_GET_ITEM(item, is_list ? 2 : 3), &piece->numel) < 0 ||
            (!is_list && fp_as_int64(PyTuple_GET_ITEM(item, 2), &piece->start) < 0)) {
            return -1;
        }
        piece->dtype = (uint16_t)dtype;
        piece->first_dim = used;
        last = piece->numel - 1;
        if (!is_list && get_dims(module, PyTuple_GET_ITEM(item, 4), piece, dims + used, &last) < 0) {
            return -1;
        }
        used += piece->ndim;
        if (memory != Py_None) {
            if (fp_testing_buffer(memory, is_list, &call->buffers[i]) < 0) {
                return -1;
            }
            if (piece->numel < 0 || last >= call->buffers[i].len / (Py_ssize_t)fp_dtype_bytes(dtype)) {
                return fp_fail(module, FP_EINVAL, "piece %zd does not fit its buffer", i);
            }
            piece->data = call->buffers[i].buf;
        }
        piece->start = is_list ? fp_list_start(call->end, piece->data, dtype) : piece->start;
        if (piece->start < call->end) {
            return fp_fail(module, FP_EINVAL, "piece %zd begins before the end of that before it", i);
        }
        call->end = piece->start + piece->numel;
    }
    return 0;
}

static int
is_done(PyObject *module, int error)
{
    return error == 0 || fp_fail(module, FP_EINVAL, "the launch was refused with error %d", error) == 0;
}

PyObject *
fp_py_kernel_pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    asked call = {0};
    fp_pack_job job = {.before = 1.0};
    PyObject *result = NULL;
    if (fp_check_nargs_between("kernel_pack", nargs, 5, 8) < 0 || fp_testing_dtype(args[2], &job.dtype) < 0 ||
        fp_as_int64(args[3], &job.begin) < 0 || fp_as_int64(args[4], &job.end) < 0 ||
        (nargs > 5 && fp_as_double(args[5], &job.before) < 0) ||
        (nargs > 7 && fp_as_bool(args[7], &job.accumulate) < 0)) {
        return NULL;
    }
    job.has_scale = nargs > 6 && args[6] != Py_None;
    if ((!job.has_scale || fp_as_double(args[6], &job.scale) == 0) && asked_init(module, &call, args[0], 0) == 0 &&
        fp_testing_buffer(args[1], 1, &call.flat) == 0) {
        job.flat = call.flat.buf;
        if (job.begin < 0 || job.begin > job.end || job.end > call.flat.len / (Py_ssize_t)fp_dtype_bytes(job.dtype)) {
            fp_fail(module, FP_EINVAL, "elements [%lld, %lld) are no range of the buffer", (long long)job.begin,
                    (long long)job.end);
        }
        else {
            result = is_done(module, tested->pack(&job, &call.table, NULL)) ? Py_NewRef(Py_None) : NULL;
        }
    }
    asked_release(&call);
    return result;
}

PyObject *
fp_py_kernel_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    asked call = {0};
    double partials[FP_NORM_BLOCKS + 1], norm = 0;
    fp_norm_job job = {.partials = partials, .result = &norm, .in_fp64 = 1};
    PyObject *result = NULL;
    if (fp_read_args("kernel_norm", args, nargs, "Ob", &job.is_max) < 0) {
        return NULL;
    }
    if (asked_init(module, &call, args[0], 1) == 0) {
        job.end = call.end;
        result = is_done(module, tested->norm(&job, &call.table, NULL)) ? PyFloat_FromDouble(norm) : NULL;
    }
    asked_release(&call);
    return result;
}

PyObject *
fp_py_kernel_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    asked call = {0};
    double wide = 0;
    fp_scale_job job = {.factor = &wide};
    PyObject *result = NULL;
    if (fp_read_args("kernel_scale", args, nargs, "Odb", &wide, &job.in_fp64) < 0) {
        return NULL;
    }
    const float narrow = (float)wide;
    job.factor = job.in_fp64 ? (const void *)&wide : (const void *)&narrow;
    if (asked_init(module, &call, args[0], 1) == 0) {
        job.end = call.end;
        result = is_done(module, tested->scale(&job, &call.table, NULL)) ? Py_NewRef(Py_None) : NULL;
    }
    asked_release(&call);
    return result;
}
