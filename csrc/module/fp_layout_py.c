/* module/fp_layout_py.c -- the heap type flatparam._C.Layout: core/fp_layout as an immutable object. It refers to
 * tuples of numbers alone, so the garbage collector need not know it. flatparam.FlatLayout derives from it. */
#include "module/fp_tables.h"

#include <stddef.h>

#include "core/fp_alloc.h"
#include "tensor/fp_flatten.h"

/* Arrays; closure of the getters. */
enum { GET_OFFSETS, GET_NUMELS, GET_ITEM_NUMELS, GET_IS_PADDING, N_ARRAYS };

typedef struct {
    PyObject_HEAD
    fp_layout layout;           /* complete from the moment anybody else sees the object */
    PyObject *arrays[N_ARRAYS]; /* owned; NULL until somebody asks */
} layout_object;

static void layout_dealloc(PyObject *self);

/* Borrowed: the module of Layout. type is Layout or a subclass. */
static PyObject *
module_of(PyTypeObject *type)
{
    while (type->tp_dealloc != layout_dealloc) {
        type = type->tp_base;
    }
    return PyType_GetModule(type);
}

/* The arguments of Layout(), in C. */
typedef struct {
    int64_t *numels, *blocks; /* owned; no blocks: NULL */
    Py_ssize_t n;
    int64_t world_size, itemsize, alignment;
} layout_arguments;

/* Give the message of a status of fp_layout_init: the first of its conditions that does not hold. Returns 0 for FP_OK,
 * else -1. */
static int
check_layout(PyObject *module, const layout_arguments *args, fp_status status)
{
    const int64_t *values[] = {args->numels, args->blocks};
    const char *names[] = {"numels", "blocks"};
    if (status == FP_EINVAL) {
        if (args->world_size < 1) {
            return fp_fail(module, status, "expected world_size >= 1, got %lld", (long long)args->world_size);
        }
        if (args->itemsize < 1) {
            return fp_fail(module, status, "expected itemsize >= 1, got %lld", (long long)args->itemsize);
        }
        if (args->alignment < (args->blocks != NULL)) {
            return fp_fail(module, status, "expected alignment >= %d, got %lld", args->blocks != NULL,
                           (long long)args->alignment);
        }
        for (int least = 0; least < 2; least++) {
            for (Py_ssize_t i = 0; values[least] != NULL && i < args->n; i++) {
                if (values[least][i] < least) {
                    return fp_fail(module, status, "expected %s >= %d, %s[%zd] is %lld", names[least], least,
                                   names[least], i, (long long)values[least][i]);
                }
            }
        }
        return fp_fail(module, status, "expected at least one element, %s",
                       args->n == 0 ? "there are no sizes" : "all sizes are 0");
    }
    return fp_fail(module, status,
                   "expected fewer than 2^63 bytes, paddings included, got %zd parameters, world_size %lld, itemsize "
                   "%lld, alignment %lld",
                   args->n, (long long)args->world_size, (long long)args->itemsize, (long long)args->alignment);
}

static PyObject *
layout_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    layout_object *self = NULL; /* owned */
    layout_arguments given = {0};
    Py_ssize_t n_blocks;

    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        return PyErr_Format(PyExc_TypeError, "Layout() takes no keyword arguments");
    }
    FP_TRY_NULL(fp_check_nargs_between("Layout", PyTuple_GET_SIZE(args), 4, 5));
    FP_TRY_NULL(
        fp_read_args("Layout", fp_items(args), 4, "Oiii", &given.world_size, &given.itemsize, &given.alignment));
    FP_TRY_NULL(fp_as_int64_array(PyTuple_GET_ITEM(args, 0), &given.numels, &given.n));
    if (PyTuple_GET_SIZE(args) == 5 && PyTuple_GET_ITEM(args, 4) != Py_None) {
        if (fp_as_int64_array(PyTuple_GET_ITEM(args, 4), &given.blocks, &n_blocks) < 0) {
            goto done;
        }
        if (n_blocks != given.n) {
            fp_fail(module_of(type), FP_EINVAL, "expected a block for each of %zd parameters, got %zd", given.n,
                    n_blocks);
            goto done;
        }
    }
    self = (layout_object *)type->tp_alloc(type, 0); /* zeroed */
    if (self != NULL) {
        const fp_status status = fp_layout_init(&self->layout, given.numels, given.blocks, (size_t)given.n,
                                                given.alignment, given.world_size, given.itemsize);
        if (check_layout(module_of(type), &given, status) < 0) {
            Py_CLEAR(self);
        }
    }
done:
    fp_free(given.numels);
    fp_free(given.blocks);
    return (PyObject *)self;
}

static void
layout_dealloc(PyObject *self)
{
    fp_layout_clear(&((layout_object *)self)->layout);
    for (int i = 0; i < N_ARRAYS; i++) {
        Py_CLEAR(((layout_object *)self)->arrays[i]);
    }
    fp_free_object(self);
}

/* [begin, end) from two arguments. */
static int
as_range(layout_object *self, const char *name, PyObject *const *args, Py_ssize_t nargs, int64_t *begin, int64_t *end)
{
    FP_TRY(fp_read_args(name, args, nargs, "ii", begin, end));
    if (*begin < 0 || *begin > *end) {
        return fp_fail(module_of(Py_TYPE(self)), FP_EINVAL, "expected 0 <= begin <= end, got begin %lld, end %lld",
                       (long long)*begin, (long long)*end);
    }
    return 0;
}

static PyObject *
layout_shard_range(layout_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t rank, range[2];
    FP_TRY_NULL(fp_read_args("shard_range", args, nargs, "i", &rank));
    const fp_status found = fp_layout_shard_range(&self->layout, rank, &range[0], &range[1]);
    const int status = fp_fail(module_of(Py_TYPE(self)), found, "expected 0 <= rank < %lld, got %lld",
                               (long long)self->layout.world_size, (long long)rank);
    return status < 0 ? NULL : fp_int64_tuple(range, 2);
}

static PyObject *
layout_params_in(layout_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t begin, end;
    size_t first, last;
    FP_TRY_NULL(as_range(self, "params_in", args, nargs, &begin, &end));
    fp_layout_params_in(&self->layout, begin, end, &first, &last);
    return PyObject_CallFunction((PyObject *)&PyRange_Type, "nn", (Py_ssize_t)first, (Py_ssize_t)last);
}

static PyObject *
layout_parts(layout_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    int64_t begin, end;
    size_t first, last;
    FP_TRY_NULL(as_range(self, "parts", args, nargs, &begin, &end));
    fp_layout_params_in(&self->layout, begin, end, &first, &last);
    PyObject *parts = PyList_New((Py_ssize_t)(last - first));
    for (size_t i = first; parts != NULL && i < last; i++) {
        const fp_param_part part = fp_layout_part(&self->layout, i, begin, end);
        PyObject *item = fp_int64_tuple((int64_t[4]){part.offset, part.numel, part.start, part.end_element}, 4);
        PyList_SET_ITEM(parts, (Py_ssize_t)(i - first), item); /* steals item */
        if (item == NULL) {
            Py_CLEAR(parts);
        }
    }
    return parts;
}

static PyObject *
layout_flatten(layout_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    const fp_layout *layout = &self->layout;
    int64_t begin, end;
    double fill;
    FP_TRY_NULL(fp_read_args("flatten", args, nargs, "OdOO", &fill));
    FP_TRY_NULL(as_range(self, "flatten", args + 2, 2, &begin, &end));
    if (end > layout->padded_numel) {
        fp_fail(module_of(Py_TYPE(self)), FP_EINVAL, "expected a range in %lld elements, got end %lld",
                (long long)layout->padded_numel, (long long)end);
        return NULL;
    }
    PyObject *tensors = fp_as_tuple(args[0], (Py_ssize_t)layout->num_params, "tensors");
    PyObject *flat = tensors == NULL ? NULL : fp_torch_flatten(fp_items(tensors), layout, fill, begin, end);
    Py_XDECREF(tensors);
    return flat;
}

static PyObject *
padding_mask(const fp_layout *layout)
{
    PyObject *mask = PyTuple_New((Py_ssize_t)layout->num_items);
    for (size_t i = 0; mask != NULL && i < layout->num_items; i++) {
        PyTuple_SET_ITEM(mask, (Py_ssize_t)i, Py_NewRef(layout->is_pad[i] ? Py_True : Py_False));
    }
    return mask;
}

static PyObject *
array_of(const fp_layout *layout, int which)
{
    switch (which) {
        case GET_OFFSETS:
            return fp_int64_tuple(layout->starts, (Py_ssize_t)layout->num_params);
        case GET_NUMELS:
            return fp_int64_tuple(layout->numels, (Py_ssize_t)layout->num_params);
        case GET_ITEM_NUMELS:
            return fp_int64_tuple(layout->item_numels, (Py_ssize_t)layout->num_items);
        default:
            return padding_mask(layout);
    }
}

/* An array as a tuple. It is made once, because callers look up one parameter after the other. */
static PyObject *
layout_get_array(layout_object *self, void *closure)
{
    const int which = (int)(intptr_t)closure;
    if (self->arrays[which] == NULL) {
        PyObject *array = array_of(&self->layout, which); /* may run code, which may have asked too */
        Py_XSETREF(self->arrays[which], array);
    }
    return Py_XNewRef(self->arrays[which]);
}

static PyMethodDef layout_methods[] = {
    {"shard_range", FP_METHOD(layout_shard_range), METH_FASTCALL,
     "shard_range($self, rank, /)\n--\n\n"
     "Return (begin, end) of a rank's padded shard, in elements of the flat parameter. "
     "ShardError unless 0 <= rank < world_size."},
    {"params_in", FP_METHOD(layout_params_in), METH_FASTCALL,
     "params_in($self, begin, end, /)\n--\n\n"
     "Return the range of the indices of the parameters that have elements in [begin, end)."},
    {"parts", FP_METHOD(layout_parts), METH_FASTCALL,
     "parts($self, begin, end, /)\n--\n\n"
     "Return a list of (offset in the range, numel, start, inclusive end) of the parameters in [begin, end). "
     "numel, start and end are elements of the parameter."},
    {"flatten", FP_METHOD(layout_flatten), METH_FASTCALL,
     "flatten($self, tensors, fill, begin, end, /)\n--\n\n"
     "Return a new 1-D tensor with elements [begin, end) of the flat parameter. "
     "The tensors are at their places, fill is between them, and zeros are past the end."},
    {NULL, NULL, 0, NULL},
};

#define INT64_MEMBER(name, doc)                                                                                        \
    {#name, Py_T_LONGLONG, offsetof(layout_object, layout) + offsetof(fp_layout, name), Py_READONLY, doc}
static PyMemberDef layout_members[] = {
    INT64_MEMBER(world_size, "Ranks that share the flat parameter."),
    INT64_MEMBER(alignment, "Parameters start at multiples of so many elements; 0: anywhere."),
    INT64_MEMBER(numel, "Elements of the unsharded flat parameter, paddings included. With blocks ``padded_numel``."),
    INT64_MEMBER(numel_params, "Elements of the parameters, without padding."),
    INT64_MEMBER(shard_numel, "Elements of every rank's shard, with padding."),
    INT64_MEMBER(padded_numel, "``shard_numel * world_size``."),
    {"itemsize", Py_T_LONGLONG, offsetof(layout_object, layout) + offsetof(fp_layout, item_bytes), Py_READONLY,
     "Bytes of an element."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef layout_getset[] = {
    {"offsets", FP_GETTER(layout_get_array), NULL, "First element of each parameter.", (void *)(intptr_t)GET_OFFSETS},
    {"numels", FP_GETTER(layout_get_array), NULL, "Elements of each parameter, as given.",
     (void *)(intptr_t)GET_NUMELS},
    {"numels_with_padding", FP_GETTER(layout_get_array), NULL,
     "Elements of each parameter, and of each padding between and after them, in order.",
     (void *)(intptr_t)GET_ITEM_NUMELS},
    {"is_padding_mask", FP_GETTER(layout_get_array), NULL,
     "For each entry of ``numels_with_padding`` whether it is a padding.", (void *)(intptr_t)GET_IS_PADDING},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot layout_slots[] = {
    {Py_tp_new, layout_new},
    {Py_tp_dealloc, layout_dealloc},
    {Py_tp_methods, layout_methods},
    {Py_tp_members, layout_members},
    {Py_tp_getset, layout_getset},
    {Py_tp_doc, "Layout(numels, world_size, itemsize, alignment, blocks=None, /)\n--\n\n"
                "The places of parameters in a flat parameter; flatparam.FlatLayout is its Python class."},
    {0, NULL},
};

PyType_Spec fp_layout_type = FP_TYPE("Layout", layout_object, Py_TPFLAGS_BASETYPE, layout_slots);
