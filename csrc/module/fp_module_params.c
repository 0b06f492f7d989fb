/* module/fp_module_params.c -- the heap type flatparam._C.ModuleParams: where the original parameters of one unit live (module, name) and
 * lie (offset, shape, stride), and the loops over them. One call a unit; the tensors come from the caller each time, so
 * that a list or tensor that was replaced is honoured. */
#include "module/fp_module_params.h"

#include "tensor/fp_torch.h"
#include "core/fp_alloc.h"
#include "python/fp_attributes.h"
#include "python/fp_entries.h"

/* The 1-D piece that the shard has of each parameter. Counted, since setting data can run Python code (a weak reference's
 * callback) that makes the unit read another tuple meanwhile. */
typedef struct {
    Py_ssize_t users; /* the unit and the calls that are at work with it; changed with the GIL held */
    int64_t *starts;  /* n: first element in the shard; the same block as numels */
    int64_t *numels;  /* n: elements in the shard; -1: none here */
} fp_pieces;

typedef struct {
    PyObject_HEAD
    fp_attributes attributes; /* n parameters, then n_shared further names of them */
    Py_ssize_t n;
    Py_ssize_t n_shared;
    Py_ssize_t *primary; /* n_shared: which parameter each shared name stands for */
    fp_geometry *geometry;
    PyObject *shard_infos; /* the tuple that pieces was read from, or NULL */
    fp_pieces *pieces;     /* or NULL */
    PyObject **spare;      /* n: the views of the last forward, owned; or NULL */
} fp_module_params;

/* A tuple of expected tensors from a sequence of the caller's: a copy of ours, which no callback can shrink. */
static PyObject *
as_tensors(PyObject *sequence, Py_ssize_t expected, const char *what)
{
    PyObject *items = PySequence_Tuple(sequence);
    if (items != NULL && PyTuple_GET_SIZE(items) != expected) {
        PyErr_Format(PyExc_ValueError, "expected %zd %s, got %zd", expected, what, PyTuple_GET_SIZE(items));
        Py_CLEAR(items);
    }
    return items;
}

static PyObject **
items_of(PyObject *tuple)
{
    return &PyTuple_GET_ITEM(tuple, 0);
}

static void
release_pieces(fp_pieces *pieces)
{
    if (pieces != NULL && --pieces->users == 0) {
        fp_free(pieces->starts);
        fp_free(pieces);
    }
}

/* Read one entry's in_shard, offset_in_shard and numel_in_shard. */
static int
read_piece(PyObject *info, int64_t *start, int64_t *numel)
{
    PyObject *fields = PySequence_Tuple(info);
    int status = -1;
    if (fields == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(fields) < 3) {
        PyErr_SetString(PyExc_ValueError, "a shard info has fewer than 3 fields");
        goto done;
    }
    const int in_shard = PyObject_IsTrue(PyTuple_GET_ITEM(fields, 0));
    if (in_shard == 0) {
        *numel = -1;
        status = 0;
    }
    else if (in_shard > 0 && fp_as_int64(PyTuple_GET_ITEM(fields, 1), start) == 0 &&
             fp_as_int64(PyTuple_GET_ITEM(fields, 2), numel) == 0) {
        status = *start < 0 || *numel < 0 ? -1 : 0;
        if (status < 0) {
            PyErr_SetString(PyExc_ValueError, "a shard info has a negative offset or size");
        }
    }
done:
    Py_DECREF(fields);
    return status;
}

/* The pieces that a tuple of shard infos describes, to be given back with release_pieces(); read anew only if the tuple is
 * not the one that was read last. NULL with an exception set. */
static fp_pieces *
pieces_of(fp_module_params *unit, PyObject *infos)
{
    if (infos == unit->shard_infos && unit->pieces != NULL) {
        unit->pieces->users++;
        return unit->pieces;
    }
    if (!PyTuple_Check(infos) || PyTuple_GET_SIZE(infos) != unit->n) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of %zd shard infos, got %.200s", unit->n,
                     Py_TYPE(infos)->tp_name);
        return NULL;
    }
    fp_pieces *pieces = fp_calloc(1, sizeof *pieces);
    int64_t *block = fp_calloc((size_t)unit->n, 2 * sizeof *block);
    if (pieces == NULL || block == NULL) {
        fp_free(pieces);
        fp_free(block);
        PyErr_NoMemory();
        return NULL;
    }
    *pieces = (fp_pieces){.users = 1, .starts = block, .numels = block + unit->n};
    for (Py_ssize_t i = 0; i < unit->n; i++) {
        if (read_piece(PyTuple_GET_ITEM(infos, i), &pieces->starts[i], &pieces->numels[i]) < 0) {
            release_pieces(pieces);
            return NULL;
        }
    }
    fp_pieces *old = unit->pieces;
    pieces->users++; /* one for the unit */
    unit->pieces = pieces;
    Py_XSETREF(unit->shard_infos, Py_NewRef(infos));
    release_pieces(old);
    return pieces;
}

static void
drop_all(PyObject **values, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; values != NULL && i < n; i++) {
        Py_XDECREF(values[i]);
    }
    fp_free(values);
}

/* ---- construction ---- */

static PyObject *
unit_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"parameters", "shared", "numel", NULL};
    PyObject *parameters = NULL, *shared = NULL, *numel_object, *parameters_arg, *shared_arg; /* the first two owned */
    fp_module_params *unit = NULL;
    int64_t numel;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:ModuleParams", keywords, &parameters_arg, &shared_arg,
                                     &numel_object) ||
        fp_as_int64(numel_object, &numel) < 0) {
        return NULL;
    }
    parameters = PySequence_Tuple(parameters_arg);
    shared = parameters == NULL ? NULL : PySequence_Tuple(shared_arg);
    unit = shared == NULL ? NULL : (fp_module_params *)type->tp_alloc(type, 0);
    if (unit == NULL) {
        goto fail;
    }
    PyObject_GC_UnTrack(unit); /* nobody finds it before it is complete */
    unit->n = PyTuple_GET_SIZE(parameters);
    unit->n_shared = PyTuple_GET_SIZE(shared);
    if (fp_entries_read(parameters, shared, numel, &unit->attributes, &unit->primary, &unit->geometry) < 0) {
        goto fail;
    }
    PyObject_GC_Track(unit);
    goto done;
fail:
    Py_CLEAR(unit);
done:
    Py_XDECREF(parameters);
    Py_XDECREF(shared);
    return (PyObject *)unit;
}

static int
unit_traverse(PyObject *self, visitproc visit, void *arg)
{
    fp_module_params *unit = (fp_module_params *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(unit->shard_infos);
    for (Py_ssize_t i = 0; unit->spare != NULL && i < unit->n; i++) {
        Py_VISIT(unit->spare[i]);
    }
    return fp_attributes_traverse(&unit->attributes, visit, arg);
}

static int
unit_clear(PyObject *self)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject **spare = unit->spare;
    unit->spare = NULL;
    drop_all(spare, unit->n);
    Py_CLEAR(unit->shard_infos);
    fp_attributes_clear(&unit->attributes);
    return 0;
}

static void
unit_dealloc(PyObject *self)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    (void)unit_clear(self);
    fp_attributes_free(&unit->attributes);
    fp_torch_geometry_free(unit->geometry);
    fp_free(unit->primary);
    release_pieces(unit->pieces);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- views and attributes ---- */

/* The attributes that the modules have now, owned, as fp_attributes_get() says; to be given back with drop_all(). */
static PyObject **
get_all(fp_module_params *unit, const char *wanted)
{
    PyObject **values = fp_calloc((size_t)unit->n, sizeof *values);
    if (values == NULL) {
        PyErr_NoMemory();
    }
    else if (fp_attributes_get(&unit->attributes, 0, unit->n, wanted, values) < 0) {
        fp_free(values);
        values = NULL;
    }
    return values;
}

/* A list of n values, which are taken over, also on failure. */
static PyObject *
list_of(PyObject **values, Py_ssize_t n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(values[i]));
    }
    drop_all(values, n);
    return list;
}

/* n new references, NULL with an exception set. */
static PyObject **
new_views(const fp_module_params *unit, PyObject *flat)
{
    PyObject **views = fp_calloc((size_t)unit->n, sizeof(PyObject *)); /* not yet a list: a collection could show it */
    if (views == NULL) {
        PyErr_NoMemory();
    }
    else if (fp_torch_make_views(flat, unit->geometry, NULL, NULL, views) < 0) {
        fp_free(views);
        views = NULL;
    }
    return views;
}

static PyObject *
unit_views(PyObject *self, PyObject *flat)
{
    const fp_module_params *unit = (fp_module_params *)self;
    PyObject **views = new_views(unit, flat);
    return views == NULL ? NULL : list_of(views, unit->n);
}

/* Whether view is known to Python only by so many references, and has no attributes of its own. -1 on failure. */
static int
is_known_by(PyObject *view, Py_ssize_t references)
{
    const Py_ssize_t weak = Py_TYPE(view)->tp_weaklistoffset;
    if (Py_REFCNT(view) != references || (weak != 0 && *(PyObject **)((char *)view + weak) != NULL)) {
        return 0;
    }
    PyObject *dict = PyObject_GenericGetDict(view, NULL);
    const int is_empty = dict == NULL ? -1 : PyDict_GET_SIZE(dict) == 0;
    Py_XDECREF(dict);
    return is_empty;
}

/* New references to views for a forward: those of the last one where only the list held and the module that they are of
 * still have them, and else new ones. *shown_already: the modules have all of them, and nobody wants to know when they are
 * set. NULL with an exception set. */
static PyObject **
forward_views(fp_module_params *unit, PyObject *flat, PyObject *held, int *shown_already)
{
    PyObject **spare = unit->spare, **shown = NULL;
    PyObject **views = fp_calloc((size_t)unit->n, sizeof *views), **kept = fp_calloc((size_t)unit->n, sizeof *kept);
    char *idle = fp_calloc((size_t)unit->n, 1);
    int status = -1;
    unit->spare = NULL; /* Python code may run here, and come to this unit */
    *shown_already = spare != NULL && unit->n_shared == 0;
    if (views == NULL || kept == NULL || idle == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (spare != NULL) {
        shown = get_all(unit, NULL);
        if (shown == NULL) {
            goto done;
        }
        for (Py_ssize_t i = 0; i < unit->n; i++) {
            const int is_held = i < PyList_GET_SIZE(held) && PyList_GET_ITEM(held, i) == spare[i];
            const int known = is_known_by(spare[i], 1 + is_held + (shown[i] == spare[i] ? 2 : 0));
            const int direct = known < 0 ? -1 : fp_attributes_is_direct(&unit->attributes, i);
            if (direct < 0) {
                goto done;
            }
            idle[i] = (char)known;
            *shown_already = *shown_already && direct;
        }
    }
    status = fp_torch_make_views(flat, unit->geometry, spare, idle, views);
    if (status == 0) {
        for (Py_ssize_t i = 0; i < unit->n; i++) {
            kept[i] = Py_NewRef(views[i]);
            *shown_already = *shown_already && shown[i] == views[i];
        }
        PyObject **other = unit->spare;
        unit->spare = kept;
        kept = other;
    }
done:
    drop_all(kept, status == 0 ? unit->n : 0);
    drop_all(shown, unit->n);
    drop_all(spare, unit->n);
    fp_free(idle);
    if (status < 0) {
        fp_free(views);
        views = NULL;
    }
    return views;
}

static PyObject *
unit_parameters(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *list = NULL;
    int requires_grad;
    if (fp_check_nargs("parameters", nargs, 2) < 0 || fp_as_bool(args[1], &requires_grad) < 0) {
        return NULL;
    }
    PyObject **made = fp_calloc((size_t)unit->n, sizeof(PyObject *));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    if (fp_torch_make_leaves(args[0], unit->geometry, requires_grad, made) == 0) {
        list = fp_attributes_as_parameters(made, unit->n);
    }
    drop_all(made, unit->n);
    return list;
}

static PyObject *
unit_flatten(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    double fill;
    if (fp_check_nargs("flatten", nargs, 2) < 0 || fp_as_double(args[1], &fill) < 0) {
        return NULL;
    }
    PyObject *tensors = as_tensors(args[0], unit->n, "tensors");
    PyObject *flat = tensors == NULL ? NULL : fp_torch_flatten(items_of(tensors), unit->geometry, fill);
    Py_XDECREF(tensors);
    return flat;
}

/* Register values[i] for the parameters and shared_values[k] (NULL: the parameter's value) for their further names. */
static int
register_all(fp_module_params *unit, PyObject *const *values, PyObject *const *shared_values, fp_place place)
{
    for (Py_ssize_t i = 0; i < unit->n; i++) {
        if (fp_attributes_check(values[i], place.is_parameter) < 0) {
            return -1;
        }
    }
    for (Py_ssize_t k = 0; shared_values != NULL && k < unit->n_shared; k++) {
        if (fp_attributes_check(shared_values[k], place.is_parameter) < 0) {
            return -1;
        }
    }
    if (fp_attributes_put(&unit->attributes, 0, values, unit->n, place) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; k < unit->n_shared; k++) {
        PyObject *const *value = shared_values == NULL ? &values[unit->primary[k]] : &shared_values[k];
        if (fp_attributes_put(&unit->attributes, unit->n + k, value, 1, place) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
unit_register_tensors(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    int listed, unsafe;
    if (fp_check_nargs("register_tensors", nargs, 3) < 0 || fp_as_bool(args[1], &listed) < 0 ||
        fp_as_bool(args[2], &unsafe) < 0) {
        return NULL;
    }
    PyObject *tensors = as_tensors(args[0], unit->n, "tensors");
    if (tensors == NULL) {
        return NULL;
    }
    const fp_place place = {.is_parameter = 0, .listed = listed, .unsafe = unsafe};
    const int status = register_all(unit, items_of(tensors), NULL, place);
    Py_DECREF(tensors);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
unit_register_parameters(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *params = NULL, *shared = NULL; /* owned */
    int unsafe;
    if (fp_check_nargs("register_parameters", nargs, 3) < 0 || fp_as_bool(args[2], &unsafe) < 0) {
        return NULL;
    }
    const fp_place place = {.is_parameter = 1, .listed = 1, .unsafe = unsafe};
    params = as_tensors(args[0], unit->n, "parameters");
    shared = params == NULL ? NULL : as_tensors(args[1], unit->n_shared, "shared parameters");
    const int status = shared == NULL ? -1 : register_all(unit, items_of(params), items_of(shared), place);
    Py_XDECREF(params);
    Py_XDECREF(shared);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- data ---- */

/* Point the further names of each parameter at the parameter's data. */
static int
point_shared(fp_module_params *unit, PyObject *const *params, PyObject *const *shared)
{
    for (Py_ssize_t k = 0; k < unit->n_shared; k++) {
        PyObject *source = params[unit->primary[k]];
        if (shared[k] != source && fp_torch_point_like(&shared[k], &source, 1) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
unit_point(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *params = NULL, *shared = NULL; /* owned */
    int status = -1;
    if (fp_check_nargs_between("point", nargs, 2, 3) < 0) {
        return NULL;
    }
    params = as_tensors(args[0], unit->n, "tensors");
    shared = params == NULL || nargs < 3 ? NULL : as_tensors(args[2], unit->n_shared, "shared parameters");
    if (params != NULL && (shared != NULL || nargs < 3)) {
        status = fp_torch_point(items_of(params), unit->geometry, args[1]);
        if (status == 0 && shared != NULL) {
            status = point_shared(unit, items_of(params), items_of(shared));
        }
    }
    Py_XDECREF(params);
    Py_XDECREF(shared);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
unit_point_pieces(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *params = NULL, *shared = NULL; /* owned */
    int status = -1;
    if (fp_check_nargs("point_pieces", nargs, 4) < 0) {
        return NULL;
    }
    params = as_tensors(args[0], unit->n, "parameters");
    shared = params == NULL ? NULL : as_tensors(args[1], unit->n_shared, "shared parameters");
    fp_pieces *pieces = shared == NULL ? NULL : pieces_of(unit, args[3]);
    if (pieces != NULL) {
        status = fp_torch_point_pieces(items_of(params), unit->n, args[2], pieces->starts, pieces->numels);
        if (status == 0) {
            status = point_shared(unit, items_of(params), items_of(shared));
        }
    }
    release_pieces(pieces);
    Py_XDECREF(params);
    Py_XDECREF(shared);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- whole switches ---- */

static PyObject *
unit_use_parameters(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *params = NULL, *shared = NULL; /* owned */
    int unsafe, plain = 0, status = -1;
    if (fp_check_nargs("use_parameters", nargs, 4) < 0 || fp_as_bool(args[3], &unsafe) < 0) {
        return NULL;
    }
    const fp_place place = {.is_parameter = 1, .listed = 1, .unsafe = unsafe};
    params = as_tensors(args[1], unit->n, "parameters");
    shared = params == NULL ? NULL : as_tensors(args[2], unit->n_shared, "shared parameters");
    if (shared != NULL) {
        plain = fp_torch_all_plain(args, 1) && fp_torch_all_plain(items_of(params), unit->n) &&
                fp_torch_all_plain(items_of(shared), unit->n_shared);
        status = !plain || (register_all(unit, items_of(params), items_of(shared), place) == 0 &&
                            fp_torch_point(items_of(params), unit->geometry, args[0]) == 0 &&
                            point_shared(unit, items_of(params), items_of(shared)) == 0)
                     ? 0
                     : -1;
    }
    Py_XDECREF(params);
    Py_XDECREF(shared);
    return status < 0 ? NULL : PyBool_FromLong(plain);
}

static PyObject *
unit_use_unsharded(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *tensors = NULL, *result = NULL; /* owned, as views */
    PyObject **views = NULL;
    int again, listed, unsafe, shown_already = 0;
    if (fp_check_nargs("use_unsharded", nargs, 6) < 0 || fp_as_bool(args[3], &again) < 0 ||
        fp_as_bool(args[4], &listed) < 0 || fp_as_bool(args[5], &unsafe) < 0) {
        return NULL;
    }
    if (args[2] != Py_None && !PyList_Check(args[2])) {
        PyErr_Format(PyExc_TypeError, "expected the views as a list or None, got %.200s", Py_TYPE(args[2])->tp_name);
        return NULL;
    }
    const fp_place place = {.is_parameter = 0, .listed = listed, .unsafe = unsafe};
    tensors = again ? as_tensors(args[2], unit->n, "tensors") : NULL;
    if (again && tensors == NULL) {
        return NULL;
    }
    if (!fp_torch_all_plain(args, 2) || (again && !fp_torch_all_plain(items_of(tensors), unit->n))) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (fp_torch_point_flat(args[0], args[1], fp_torch_geometry_total(unit->geometry)) < 0) {
        goto done;
    }
    if (again) {
        if (fp_torch_point(items_of(tensors), unit->geometry, args[0]) == 0 &&
            register_all(unit, items_of(tensors), NULL, place) == 0) {
            result = Py_NewRef(args[2]);
        }
        goto done;
    }
    views = args[2] == Py_None ? new_views(unit, args[0]) : forward_views(unit, args[0], args[2], &shown_already);
    for (Py_ssize_t i = 0; views != NULL && listed && args[2] != Py_None && i < PyList_GET_SIZE(args[2]); i++) {
        if (i < unit->n && PyList_SetItem(args[2], i, Py_NewRef(views[i])) < 0) { /* first: a class may refuse them */
            goto done;
        }
    }
    if (views != NULL && ((shown_already && !listed) || register_all(unit, views, NULL, place) == 0)) {
        result = list_of(views, unit->n);
        views = NULL;
    }
done:
    drop_all(views, unit->n);
    Py_XDECREF(tensors);
    return result;
}

static PyObject *
unit_use_sharded(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *params = NULL, *shared = NULL; /* owned */
    fp_pieces *pieces = NULL;
    int unsafe, plain = 0, status = -1;
    if (fp_check_nargs("use_sharded", nargs, 6) < 0 || fp_as_bool(args[5], &unsafe) < 0) {
        return NULL;
    }
    const fp_place place = {.is_parameter = 1, .listed = 1, .unsafe = unsafe};
    params = as_tensors(args[2], unit->n, "parameters");
    shared = params == NULL ? NULL : as_tensors(args[3], unit->n_shared, "shared parameters");
    pieces = shared == NULL ? NULL : pieces_of(unit, args[4]);
    if (pieces == NULL) {
        goto done;
    }
    plain = fp_torch_all_plain(args, 2) && fp_torch_all_plain(items_of(params), unit->n) &&
            fp_torch_all_plain(items_of(shared), unit->n_shared);
    if (plain && (fp_torch_point_flat(args[0], args[1], -1) < 0 ||
                  register_all(unit, items_of(params), items_of(shared), place) < 0 ||
                  fp_torch_point_pieces(items_of(params), unit->n, args[0], pieces->starts, pieces->numels) < 0 ||
                  point_shared(unit, items_of(params), items_of(shared)) < 0)) {
        goto done;
    }
    status = 0;
done:
    release_pieces(pieces);
    Py_XDECREF(params);
    Py_XDECREF(shared);
    return status < 0 ? NULL : PyBool_FromLong(plain);
}

/* ---- writeback ---- */

static PyObject *
unit_scan(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *params = NULL, *found = NULL; /* owned */
    PyObject **values = NULL;
    char *selected = NULL; /* in the shard; then: plain, and what params says */
    unsigned char *flags = NULL;
    if (fp_check_nargs("scan", nargs, 4) < 0) {
        return NULL;
    }
    fp_pieces *pieces = pieces_of(unit, args[3]);
    if (pieces == NULL) {
        return NULL;
    }
    selected = fp_calloc((size_t)unit->n, 1);
    flags = fp_calloc((size_t)unit->n, 1);
    if (selected == NULL || flags == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < unit->n; i++) {
        selected[i] = pieces->numels[i] >= 0;
    }
    values = get_all(unit, selected);
    params = values == NULL ? NULL : PySequence_Fast(args[0], "expected a sequence of parameters");
    if (params == NULL) {
        goto fail;
    }
    if (PySequence_Fast_GET_SIZE(params) != unit->n) { /* looked at last: from here on no Python code runs */
        PyErr_Format(PyExc_ValueError, "expected %zd parameters, got %zd", unit->n, PySequence_Fast_GET_SIZE(params));
        goto fail;
    }
    for (Py_ssize_t i = 0; i < unit->n; i++) {
        selected[i] =
            values[i] != NULL && values[i] == PySequence_Fast_GET_ITEM(params, i) && fp_torch_is_plain(values[i]);
    }
    if (fp_torch_scan(values, unit->geometry, args[1], args[2] == Py_None ? NULL : args[2], selected, flags) < 0) {
        goto fail;
    }
    found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < unit->n; i++) {
        const int deregistered = values[i] == NULL; /* as in a checkpoint, or not here */
        if (!deregistered && (!selected[i] || flags[i])) {
            PyObject *index = PyLong_FromSsize_t(i);
            if (index == NULL || PyList_Append(found, index) < 0) {
                Py_CLEAR(found);
            }
            Py_XDECREF(index);
        }
    }
fail:
    drop_all(values, unit->n);
    fp_free(selected);
    fp_free(flags);
    release_pieces(pieces);
    Py_XDECREF(params);
    return found;
}

/* ---- gradients ---- */

static PyObject *
unit_set_grads(PyObject *self, PyObject *grad)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject **params = get_all(unit, NULL); /* what the modules have now */
    int status = params == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < unit->n; i++) {
        if (params[i] == NULL) {
            PyErr_Format(PyExc_AttributeError, "%U is missing from its module",
                         fp_attributes_name(&unit->attributes, i));
            status = -1;
        }
    }
    if (status == 0) {
        status = fp_torch_set_grads(params, unit->geometry, grad);
    }
    drop_all(params, unit->n);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
unit_set_grad_pieces(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    fp_module_params *unit = (fp_module_params *)self;
    PyObject *params = NULL, *mask = NULL; /* owned */
    char *none = NULL;
    fp_pieces *pieces = NULL;
    int by_data, status = -1;
    if (fp_check_nargs("set_grad_pieces", nargs, 5) < 0 || fp_as_bool(args[3], &by_data) < 0) {
        return NULL;
    }
    params = as_tensors(args[0], unit->n, "parameters");
    mask = params == NULL ? NULL : as_tensors(args[2], unit->n, "mask entries");
    none = mask == NULL ? NULL : fp_calloc((size_t)unit->n, 1);
    if (mask != NULL && none == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; none != NULL && i < unit->n; i++) {
        const int is_none = PyObject_IsTrue(PyTuple_GET_ITEM(mask, i));
        if (is_none < 0) {
            goto fail;
        }
        none[i] = (char)is_none;
    }
    pieces = none == NULL ? NULL : pieces_of(unit, args[4]);
    if (pieces != NULL) {
        status = fp_torch_set_grad_pieces(items_of(params), unit->geometry, args[1], pieces->starts, pieces->numels,
                                          none, by_data);
    }
fail:
    release_pieces(pieces);
    fp_free(none);
    Py_XDECREF(params);
    Py_XDECREF(mask);
    return status < 0 ? NULL : PyBool_FromLong(status == 0);
}

/* ---- the type ---- */

static PyMethodDef unit_methods[] = {
    {"views", unit_views, METH_O,
     "views($self, flat, /)\n--\n\nViews of the unsharded flat, one a parameter; one autograd node tracks them all."},
    {"parameters", (PyCFunction)(void (*)(void))unit_parameters, METH_FASTCALL,
     "parameters($self, flat, requires_grad, /)\n--\n\nNew nn.Parameters over the unsharded flat's memory, which "
     "autograd does not track back to it."},
    {"flatten", (PyCFunction)(void (*)(void))unit_flatten, METH_FASTCALL,
     "flatten($self, tensors, fill, /)\n--\n\nA new 1-D tensor with the tensors at their places and fill between "
     "them."},
    {"register_tensors", (PyCFunction)(void (*)(void))unit_register_tensors, METH_FASTCALL,
     "register_tensors($self, tensors, listed, unsafe, /)\n--\n\nMake them the modules' plain attributes; listed: in "
     "_parameters too."},
    {"register_parameters", (PyCFunction)(void (*)(void))unit_register_parameters, METH_FASTCALL,
     "register_parameters($self, params, shared, unsafe, /)\n--\n\nMake them the modules' registered parameters."},
    {"point", (PyCFunction)(void (*)(void))unit_point, METH_FASTCALL,
     "point($self, tensors, flat, shared=(), /)\n--\n\nSet each tensor's data to its place in the unsharded flat."},
    {"point_pieces", (PyCFunction)(void (*)(void))unit_point_pieces, METH_FASTCALL,
     "point_pieces($self, params, shared, shard, infos, /)\n--\n\nSet each parameter's data to its 1-D piece of the "
     "shard; an empty tensor if it has none."},
    {"use_parameters", (PyCFunction)(void (*)(void))unit_use_parameters, METH_FASTCALL,
     "use_parameters($self, flat, params, shared, unsafe, /)\n--\n\nMake the parameters views of the unsharded flat, "
     "and "
     "the modules' attributes.\n\nReturns False, with nothing done, if a tensor is not plain or a mode is on."},
    {"use_unsharded", (PyCFunction)(void (*)(void))unit_use_unsharded, METH_FASTCALL,
     "use_unsharded($self, flat, padded, tensors, again, listed, unsafe, /)\n--\n\nflat.data = the unpadded part of "
     "padded, and its views the modules' attributes: with again, tensors, pointed there; else new ones, or those of "
     "the "
     "last call where only the modules and the list tensors still have them; with None always new ones.\n\nReturns the "
     "views; None, "
     "with nothing done, if a tensor is not plain or a mode is on."},
    {"use_sharded", (PyCFunction)(void (*)(void))unit_use_sharded, METH_FASTCALL,
     "use_sharded($self, flat, shard, params, shared, infos, unsafe, /)\n--\n\nflat.data = shard, and the parameters "
     "its "
     "pieces and the modules' attributes.\n\nReturns False, with nothing done, if a tensor is not plain or a mode is "
     "on."},
    {"scan", (PyCFunction)(void (*)(void))unit_scan, METH_FASTCALL,
     "scan($self, params, owner, grad, infos, /)\n--\n\nIndices of the parameters in the shard that were replaced, or "
     "whose storages are not owner's and grad's, or that lie elsewhere in whole ones."},
    {"set_grads", unit_set_grads, METH_O,
     "set_grads($self, grad, /)\n--\n\nSet the .grad of what each module has now to its view of the unsharded grad."},
    {"set_grad_pieces", (PyCFunction)(void (*)(void))unit_set_grad_pieces, METH_FASTCALL,
     "set_grad_pieces($self, params, grad, none_mask, by_data, infos, /)\n--\n\nSet each parameter's .grad to its 1-D "
     "piece of the sharded grad.\n\nReturns False, with nothing done, if a tensor is not plain or a mode is on."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot unit_slots[] = {
    {Py_tp_doc,
     "ModuleParams(parameters, shared, numel)\n--\n\n"
     "The original parameters of one flat parameter, and the loops over them.\n\n"
     "parameters: (module, name, shape, stride or None if contiguous, offset) each, in the order of their offsets;\n"
     "shared: (module, name, index of the parameter) for each further name; numel: of the unsharded flat."},
    {Py_tp_new, unit_new},
    {Py_tp_dealloc, unit_dealloc},
    {Py_tp_traverse, unit_traverse},
    {Py_tp_clear, unit_clear},
    {Py_tp_methods, unit_methods},
    {0, NULL},
};

static PyType_Spec unit_spec = {
    .name = "flatparam._C.ModuleParams",
    .basicsize = sizeof(fp_module_params),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = unit_slots,
};

PyObject *
fp_module_params_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &unit_spec, NULL);
}
