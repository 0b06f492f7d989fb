/* runtime/fp_flat_param_spec.c -- fp_flat_param_read(): a flat parameter from its specification in Python. */
#include "runtime/fp_flat_param.h"

#include <stddef.h>

#include "core/fp_alloc.h"
#include "python/fp_entries.h"
#include "python/fp_fields.h"

/* Read NULL, or a tuple: the process group; the name under which torch registered it, or None; the name of a gloo group of
 * the same ranks for sums on the host, or None. */
static int
read_group(PyObject *tuple, fp_group **group)
{
    PyObject *process_group;
    const char *name, *host_name;
    if (tuple == NULL) {
        return 0;
    }
    if (!PyArg_ParseTuple(tuple, "Ozz", &process_group, &name, &host_name)) {
        return -1;
    }
    *group = fp_group_new(process_group, name, host_name);
    return *group == NULL ? -1 : 0;
}

/* Fill owners and all arrays per owner. pieces: a tuple of (start, numel, in_rows), one per owner, in elements of the shard. */
static int
read_owners(fp_flat_param *flat_param, PyObject *pieces, int64_t numel, int64_t total, int64_t shard_numel)
{
    fp_param_pieces *owners = &flat_param->owners;
    owners->params = flat_param->params != NULL ? fp_items(flat_param->params) : &flat_param->shard;
    owners->n = flat_param->params != NULL ? PyTuple_GET_SIZE(flat_param->params) : 1;
    if (PyTuple_GET_SIZE(pieces) != owners->n) {
        return fp_raise(PyExc_ValueError, "expected %zd pieces, got %zd", owners->n, PyTuple_GET_SIZE(pieces));
    }
    flat_param->aside.has = fp_new_array(owners->n, 3);
    int64_t *starts = flat_param->aside.has == NULL ? NULL : fp_new_array(owners->n, 2 * sizeof *starts + 1);
    FP_NEED(starts);
    int64_t *numels = starts + owners->n;
    char *in_rows = (char *)(numels + owners->n);
    owners->starts = starts;
    owners->numels = numels;
    owners->in_rows = in_rows;
    flat_param->aside.frozen_share = flat_param->aside.has + owners->n;
    flat_param->aside.cleared = flat_param->aside.frozen_share + owners->n;
    for (Py_ssize_t i = 0; i < owners->n; i++) {
        long long start, count;
        int is_in_rows;
        if (!PyTuple_Check(PyTuple_GET_ITEM(pieces, i))) {
            return fp_raise(PyExc_TypeError, "expected pieces (start, numel, in_rows)");
        }
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pieces, i), "LLp", &start, &count, &is_in_rows)) {
            return -1;
        }
        if (count > 0 && (start < 0 || count > shard_numel - start)) {
            return fp_raise(PyExc_ValueError, "expected pieces in a shard of %lld elements, got %lld from %lld on",
                            (long long)shard_numel, count, start);
        }
        starts[i] = start;
        numels[i] = count;
        in_rows[i] = (char)is_in_rows;
    }
    if (flat_param->params != NULL) {
        owners->geometry = flat_param->geometry;
        return 0;
    }
    const fp_view view = {.offset = 0, .ndim = 1, .shape = &numel, .stride = NULL};
    owners->geometry = fp_torch_geometry_new(&view, 1, total);
    return owners->geometry == NULL ? -1 : 0;
}

static int
check_tensors(const fp_flat_param *flat_param)
{
    if (!fp_torch_is_plain(flat_param->shard) || fp_attributes_check(flat_param->shard, 1) < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "expected the flat parameter to be a plain dense Parameter");
        }
        return -1;
    }
    if (flat_param->params != NULL && PyTuple_GET_SIZE(flat_param->params) != flat_param->attributes.n) {
        return fp_raise(PyExc_ValueError, "expected %zd parameters, got %zd", flat_param->attributes.n,
                        PyTuple_GET_SIZE(flat_param->params));
    }
    for (Py_ssize_t i = 0; flat_param->params != NULL && i < flat_param->attributes.n; i++) {
        FP_TRY(fp_attributes_check(PyTuple_GET_ITEM(flat_param->params, i), 1));
        if (!fp_torch_is_plain(PyTuple_GET_ITEM(flat_param->params, i))) {
            return fp_raise(PyExc_TypeError, "parameter %zd is not a plain dense tensor", i);
        }
    }
    return 0;
}

/* A FlatParamSpec of Python (flatparam/fsdp/sharding/flat_param.py says what its fields mean). */
typedef struct {
    PyObject *entries, *shared, *shard, *params, *pieces, *extension, *dress;
    PyObject *shard_group, *replicate_group, *param_group, *outer_group;
    int64_t numel;
    fp_flat_buffer_options options; /* without geometry and groups */
} flat_param_spec;

#define FIELD(at, name, kind) {#name, kind, offsetof(flat_param_spec, at name)}
static const fp_field spec_fields[] = {
    FIELD(, entries, FP_FIELD_TUPLE),
    FIELD(, shared, FP_FIELD_TUPLE),
    FIELD(, shard, FP_FIELD_OBJECT),
    FIELD(, params, FP_FIELD_TUPLE_OR_NONE),
    FIELD(, pieces, FP_FIELD_TUPLE),
    FIELD(, extension, FP_FIELD_CALLABLE_OR_NONE),
    FIELD(, dress, FP_FIELD_CALLABLE_OR_NONE),
    FIELD(, shard_group, FP_FIELD_TUPLE_OR_NONE),
    FIELD(, replicate_group, FP_FIELD_TUPLE_OR_NONE),
    FIELD(, param_group, FP_FIELD_TUPLE_OR_NONE),
    FIELD(, outer_group, FP_FIELD_TUPLE_OR_NONE),
    FIELD(, numel, FP_FIELD_INT64),
    FIELD(options., compute_dtype, FP_FIELD_OBJECT),
    FIELD(options., reduce_dtype, FP_FIELD_OBJECT),
    FIELD(options., device, FP_FIELD_OBJECT),
    FIELD(options.plan., shard_numel, FP_FIELD_INT64),
    {"rank", FP_FIELD_INT, offsetof(flat_param_spec, options.plan.primary.rank)},
    {"shards", FP_FIELD_INT, offsetof(flat_param_spec, options.plan.primary.n)},
    {"param_rank", FP_FIELD_INT, offsetof(flat_param_spec, options.plan.secondary.rank)},
    {"param_shards", FP_FIELD_INT, offsetof(flat_param_spec, options.plan.secondary.n)},
    FIELD(options.plan., predivide, FP_FIELD_DOUBLE),
    FIELD(options.plan., postdivide, FP_FIELD_DOUBLE),
    FIELD(options., full_precision, FP_FIELD_BOOL),
    FIELD(options., keep_reduce_dtype, FP_FIELD_BOOL),
    FIELD(options.plan., stays_full, FP_FIELD_BOOL),
    FIELD(options.plan., offloads, FP_FIELD_BOOL),
    FIELD(options.plan., in_order, FP_FIELD_BOOL),
    {.name = NULL},
};

static int
read_groups(flat_param_spec *spec)
{
    fp_flat_buffer_plan *plan = &spec->options.plan;
    FP_TRY(read_group(spec->shard_group, &plan->primary.group));
    FP_TRY(read_group(spec->replicate_group, &plan->replicate_group));
    FP_TRY(read_group(spec->param_group, &plan->secondary.group));
    return read_group(spec->outer_group, &plan->outer_group);
}

/* Fill flat_param from the fields, which have the right kinds. */
static int
take_spec(fp_flat_param *flat_param, flat_param_spec *spec)
{
    fp_flat_buffer_plan *plan = &spec->options.plan;
    if (plan->primary.n < 1 || plan->shard_numel < 1 || plan->shard_numel > INT64_MAX / plan->primary.n) {
        return fp_raise(PyExc_ValueError, "expected shards and shard_numel of at least 1, got %d and %lld",
                        plan->primary.n, (long long)plan->shard_numel);
    }
    const int64_t total = plan->primary.n * plan->shard_numel;
    flat_param->shard = Py_NewRef(spec->shard);
    flat_param->params = Py_XNewRef(spec->params);
    flat_param->extension = Py_XNewRef(spec->extension);
    flat_param->dress = Py_XNewRef(spec->dress);
    FP_TRY(fp_entries_read(spec->entries, spec->shared, total, &flat_param->attributes, &flat_param->geometry));
    FP_TRY(check_tensors(flat_param));
    FP_TRY(read_owners(flat_param, spec->pieces, spec->numel, total, plan->shard_numel));
    spec->options.geometry = flat_param->geometry;
    flat_param->versions = flat_param->synced = -1;
    flat_param->shows = flat_param->params == NULL ? FP_SHOWS_NOTHING : FP_SHOWS_PARAMS;
    if (read_groups(spec) == 0) {
        flat_param->flat = fp_flat_buffer_new(&spec->options);
    }
    if (flat_param->flat == NULL) {
        fp_flat_buffer_free_groups(plan);
        return -1;
    }
    return 0;
}

int
fp_flat_param_read(fp_flat_param *flat_param, PyObject *object)
{
    flat_param_spec spec = {0};
    int status = fp_fields_read(object, spec_fields, &spec);
    if (status == 0) {
        status = take_spec(flat_param, &spec);
    }
    fp_fields_clear(spec_fields, &spec);
    return status;
}
