/* module/fp_module_params.c -- the heap type flatparam._C.ModuleParams: the modules and names of the original parameters of
 * one flat parameter of the drop-in, their places in it, and the loops over them. Each handle has one.
 *
 * The caller passes the tensors in each call, and they are not kept: users may replace a list or a tensor of torch's handle
 * between two calls. */
#include "module/fp_tables.h"

#include "tensor/fp_torch.h"
#include "core/fp_alloc.h"
#include "module/fp_pieces.h"
#include "python/fp_attributes.h"
#include "python/fp_entries.h"

typedef struct {
    PyObject_HEAD
    fp_attributes attributes;
    Py_ssize_t n;
    fp_geometry *geometry;
    fp_last_pieces last; /* of the shard infos */
    PyObject **spare;    /* [n] owned: the views of the last forward, to be used again; or NULL */
} fp_module_params;

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
module_params_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"parameters", "shared", "numel", NULL};
    PyObject *parameters = NULL, *shared = NULL, *numel_object, *parameters_arg, *shared_arg; /* the first two owned */
    fp_module_params *table = NULL;
    int64_t numel;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:ModuleParams", keywords, &parameters_arg, &shared_arg,
                                     &numel_object) ||
        fp_as_int64(numel_object, &numel) < 0) {
        return NULL;
    }
    parameters = PySequence_Tuple(parameters_arg);
    shared = parameters == NULL ? NULL : PySequence_Tuple(shared_arg);
    table = shared == NULL ? NULL : (fp_module_params *)type->tp_alloc(type, 0);
    if (table != NULL) {
        PyObject_GC_UnTrack(table); /* nobody finds it before it is complete */
        table->n = PyTuple_GET_SIZE(parameters);
        if (fp_entries_read(parameters, shared, numel, &table->attributes, &table->geometry) == 0) {
            PyObject_GC_Track(table);
        }
        else {
            Py_CLEAR(table);
        }
    }
    Py_XDECREF(parameters);
    Py_XDECREF(shared);
    return (PyObject *)table;
}

static int
module_params_traverse(fp_module_params *table, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(table));
    Py_VISIT(table->last.infos);
    for (Py_ssize_t i = 0; table->spare != NULL && i < table->n; i++) {
        Py_VISIT(table->spare[i]);
    }
    return fp_attributes_traverse(&table->attributes, visit, arg);
}

static int
module_params_clear(fp_module_params *table)
{
    PyObject **spare = table->spare;
    table->spare = NULL;
    drop_all(spare, table->n);
    Py_CLEAR(table->last.infos);
    fp_attributes_clear(&table->attributes);
    return 0;
}

static void
module_params_dealloc(PyObject *self)
{
    fp_module_params *table = (fp_module_params *)self;
    PyObject_GC_UnTrack(self);
    (void)module_params_clear(table);
    fp_attributes_free(&table->attributes);
    fp_torch_geometry_free(table->geometry);
    fp_pieces_release(table->last.pieces);
    fp_free_object(self);
}

/* ---- views and attributes ---- */

/* A new array of n references, from fp_attributes_get(): the present attributes. drop_all() frees it. */
static PyObject **
get_all(fp_module_params *table, const char *wanted)
{
    PyObject **values = fp_new_array(table->n, sizeof *values);
    if (values != NULL && fp_attributes_get(&table->attributes, wanted, values) < 0) {
        fp_free(values);
        values = NULL;
    }
    return values;
}

/* A new list of n values. */
static PyObject *
list_of(PyObject *const *values, Py_ssize_t n)
{
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(values[i]));
    }
    return list;
}

/* A new array of n views; drop_all() frees it. NULL with an exception. */
static PyObject **
new_views(const fp_module_params *table, PyObject *flat)
{
    PyObject **views = fp_new_array(table->n, sizeof *views); /* not yet a list: a collection could show it */
    if (views != NULL && fp_torch_make_views(flat, table->geometry, NULL, NULL, views) < 0) {
        fp_free(views);
        views = NULL;
    }
    return views;
}

static PyObject *
module_params_views(const fp_module_params *table, PyObject *flat)
{
    PyObject **views = new_views(table, flat);
    PyObject *list = views == NULL ? NULL : list_of(views, table->n);
    drop_all(views, table->n);
    return list;
}

/* 1: view has just so many references in Python, and no attributes, so no user can notice that it is used again; 0; -1. */
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

/* A new array of views for a forward. A view of the last forward is used again where only its module and the list held refer
 * to it; elsewhere the view is new. *shown_already: 1 if the modules have all of these views already, and none of their
 * classes must see that an attribute is set. NULL with an exception. */
static PyObject **
forward_views(fp_module_params *table, PyObject *flat, PyObject *held, int *shown_already)
{
    PyObject **spare = table->spare, **shown = NULL;
    PyObject **views = fp_new_array(table->n, sizeof *views);
    PyObject **kept = views == NULL ? NULL : fp_new_array(table->n, sizeof *kept);
    char *idle = kept == NULL ? NULL : fp_new_array(table->n, 1);
    int status = -1;
    table->spare = NULL; /* Python code may run here, and come to this unit */
    *shown_already = spare != NULL && table->attributes.n_shared == 0;
    if (idle == NULL) {
        goto done;
    }
    if (spare != NULL) {
        shown = get_all(table, NULL);
        if (shown == NULL) {
            goto done;
        }
        for (Py_ssize_t i = 0; i < table->n; i++) {
            const int has_borrower = i < PyList_GET_SIZE(held) && PyList_GET_ITEM(held, i) == spare[i];
            const int known = is_known_by(spare[i], 1 + has_borrower + (shown[i] == spare[i] ? 2 : 0));
            const int direct = known < 0 ? -1 : fp_attributes_is_direct(&table->attributes.items[i]);
            if (direct < 0) {
                goto done;
            }
            idle[i] = (char)known;
            *shown_already = *shown_already && direct;
        }
    }
    status = fp_torch_make_views(flat, table->geometry, spare, idle, views);
    if (status == 0) {
        for (Py_ssize_t i = 0; i < table->n; i++) {
            kept[i] = Py_NewRef(views[i]);
            *shown_already = *shown_already && shown[i] == views[i];
        }
        PyObject **other = table->spare;
        table->spare = kept;
        kept = other;
    }
done:
    drop_all(kept, status == 0 ? table->n : 0);
    drop_all(shown, table->n);
    drop_all(spare, table->n);
    fp_free(idle);
    if (status < 0) {
        fp_free(views);
        views = NULL;
    }
    return views;
}

/* Register values[i] for the parameters and shared_values[k] (NULL: the parameter's value) for their further names. */
static int
register_all(fp_module_params *table, PyObject *const *values, PyObject *const *shared_values, fp_place place)
{
    const Py_ssize_t n_values = table->n + (shared_values == NULL ? 0 : table->attributes.n_shared);
    for (Py_ssize_t i = 0; i < n_values; i++) {
        PyObject *value = i < table->n ? values[i] : shared_values[i - table->n];
        FP_TRY(fp_attributes_check(value, place.is_parameter));
    }
    return fp_attributes_put(&table->attributes, values, shared_values, place);
}

/* A new tuple of the parameters and then the shared parameters that a call has got: a copy, which no callback can change.
 * NULL with ValueError or TypeError. */
static PyObject *
read_given(const fp_module_params *table, PyObject *params_arg, PyObject *shared_arg)
{
    PyObject *params = fp_as_tuple(params_arg, table->n, "parameters");
    PyObject *shared = params == NULL ? NULL : fp_as_tuple(shared_arg, table->attributes.n_shared, "shared parameters");
    PyObject *given = shared == NULL ? NULL : PySequence_Concat(params, shared);
    Py_XDECREF(params);
    Py_XDECREF(shared);
    return given;
}

static int
register_given(fp_module_params *table, PyObject *given, int unsafe)
{
    const fp_place place = {.is_parameter = 1, .listed = 1, .unsafe = unsafe};
    return register_all(table, fp_items(given), fp_items(given) + table->n, place);
}

static PyObject *
module_params_register_tensors(fp_module_params *table, PyObject *const *args, Py_ssize_t nargs)
{
    int listed, unsafe;
    FP_TRY_NULL(fp_read_args("register_tensors", args, nargs, "Obb", &listed, &unsafe));
    PyObject *tensors = fp_as_tuple(args[0], table->n, "tensors");
    FP_NEED_NULL(tensors);
    const fp_place place = {.is_parameter = 0, .listed = listed, .unsafe = unsafe};
    const int status = register_all(table, fp_items(tensors), NULL, place);
    Py_DECREF(tensors);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
module_params_register_parameters(fp_module_params *table, PyObject *const *args, Py_ssize_t nargs)
{
    int unsafe;
    FP_TRY_NULL(fp_read_args("register_parameters", args, nargs, "OOb", &unsafe));
    PyObject *given = read_given(table, args[0], args[1]);
    const int status = given == NULL ? -1 : register_given(table, given, unsafe);
    Py_XDECREF(given);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- data ---- */

/* Point the further names of each parameter at the parameter's data. */
static int
alias_shared(fp_module_params *table, PyObject *given)
{
    for (Py_ssize_t k = 0; k < table->attributes.n_shared; k++) {
        PyObject *target = PyTuple_GET_ITEM(given, table->n + k);
        PyObject *source = PyTuple_GET_ITEM(given, table->attributes.primary[k]);
        if (target != source && fp_torch_alias_like(target, source) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- whole switches ---- */

/* Register given, and set its data: to its places in flats[0], or to its pieces of it, after flats[0].data = flats[1]. pieces:
 * NULL: places. 1; 0: nothing is done, as a tensor is not plain or a mode is on; -1. */
static int
use_given(fp_module_params *table, PyObject *given, PyObject *const *flats, const fp_pieces *pieces, int unsafe)
{
    PyObject *const *items = fp_items(given);
    if (!fp_torch_all_plain(flats, pieces == NULL ? 1 : 2) || !fp_torch_all_plain(items, PyTuple_GET_SIZE(given))) {
        return 0;
    }
    if (pieces != NULL) {
        FP_TRY(fp_torch_alias_flat(flats[0], flats[1], -1));
    }
    FP_TRY(register_given(table, given, unsafe));
    FP_TRY(pieces == NULL ? fp_torch_alias(items, table->geometry, flats[0])
                          : fp_torch_alias_pieces(items, table->n, flats[0], pieces->starts, pieces->numels));
    FP_TRY(alias_shared(table, given));
    return 1;
}

static PyObject *
module_params_use_parameters(fp_module_params *table, PyObject *const *args, Py_ssize_t nargs)
{
    int unsafe;
    FP_TRY_NULL(fp_read_args("use_parameters", args, nargs, "OOOb", &unsafe));
    PyObject *given = read_given(table, args[1], args[2]);
    const int used = given == NULL ? -1 : use_given(table, given, args, NULL, unsafe);
    Py_XDECREF(given);
    return used < 0 ? NULL : PyBool_FromLong(used);
}

static PyObject *
module_params_use_unsharded(fp_module_params *table, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *tensors = NULL, *result = NULL; /* owned, as views */
    PyObject **views = NULL;
    int again, listed, unsafe, shown_already = 0;
    FP_TRY_NULL(fp_read_args("use_unsharded", args, nargs, "OOObbb", &again, &listed, &unsafe));
    if (args[2] != Py_None && !PyList_Check(args[2])) {
        return PyErr_Format(PyExc_TypeError, "expected the views as a list or None, got %.200s",
                            Py_TYPE(args[2])->tp_name);
    }
    const fp_place place = {.is_parameter = 0, .listed = listed, .unsafe = unsafe};
    tensors = again ? fp_as_tuple(args[2], table->n, "tensors") : NULL;
    if (again && tensors == NULL) {
        return NULL;
    }
    if (!fp_torch_all_plain(args, 2) || (again && !fp_torch_all_plain(fp_items(tensors), table->n))) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (fp_torch_alias_flat(args[0], args[1], fp_torch_geometry_total(table->geometry)) < 0) {
        goto done;
    }
    if (again) {
        if (fp_torch_alias(fp_items(tensors), table->geometry, args[0]) == 0 &&
            register_all(table, fp_items(tensors), NULL, place) == 0) {
            result = Py_NewRef(args[2]);
        }
        goto done;
    }
    views = args[2] == Py_None ? new_views(table, args[0]) : forward_views(table, args[0], args[2], &shown_already);
    for (Py_ssize_t i = 0; views != NULL && listed && args[2] != Py_None && i < PyList_GET_SIZE(args[2]); i++) {
        if (i < table->n && PyList_SetItem(args[2], i, Py_NewRef(views[i])) < 0) { /* first: a class may refuse them */
            goto done;
        }
    }
    result = views == NULL ? NULL : list_of(views, table->n); /* before the modules have them: it may fail */
    if (result != NULL && !(shown_already && !listed) && register_all(table, views, NULL, place) < 0) {
        Py_CLEAR(result);
    }
done:
    drop_all(views, table->n);
    Py_XDECREF(tensors);
    return result;
}

static PyObject *
module_params_use_sharded(fp_module_params *table, PyObject *const *args, Py_ssize_t nargs)
{
    int unsafe;
    FP_TRY_NULL(fp_read_args("use_sharded", args, nargs, "OOOOOb", &unsafe));
    PyObject *given = read_given(table, args[2], args[3]);
    fp_pieces *pieces = given == NULL ? NULL : fp_pieces_of(&table->last, table->n, args[4]);
    const int used = pieces == NULL ? -1 : use_given(table, given, args, pieces, unsafe);
    fp_pieces_release(pieces);
    Py_XDECREF(given);
    return used < 0 ? NULL : PyBool_FromLong(used);
}

/* ---- writeback ---- */

static PyObject *
module_params_scan(fp_module_params *table, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *params = NULL, *found = NULL; /* owned */
    PyObject **values = NULL;
    char *selected = NULL; /* first: 1 if the parameter is in the shard; then: 1 if it needs a writeback */
    FP_TRY_NULL(fp_check_nargs("scan", nargs, 4));
    fp_pieces *pieces = fp_pieces_of(&table->last, table->n, args[3]);
    FP_NEED_NULL(pieces);
    selected = fp_new_array(table->n, 1);
    if (selected == NULL) {
        goto fail;
    }
    for (Py_ssize_t i = 0; i < table->n; i++) {
        selected[i] = pieces->numels[i] >= 0;
    }
    values = get_all(table, selected);
    params = values == NULL ? NULL : PySequence_Fast(args[0], "expected a sequence of parameters");
    if (params == NULL) {
        goto fail;
    }
    if (PySequence_Fast_GET_SIZE(params) != table->n) { /* looked at last: from here on no Python code runs */
        PyErr_Format(PyExc_ValueError, "expected %zd parameters, got %zd", table->n, PySequence_Fast_GET_SIZE(params));
        goto fail;
    }
    for (Py_ssize_t i = 0; i < table->n; i++) {
        selected[i] = values[i] != PySequence_Fast_GET_ITEM(params, i) || !fp_torch_is_plain(values[i]);
    }
    if (!fp_torch_all_plain(args + 1, args[2] == Py_None ? 1 : 2)) {
        found = Py_NewRef(Py_None);
        goto fail;
    }
    if (fp_torch_scan(values, table->geometry, args[1], args[2] == Py_None ? NULL : args[2], selected) < 0) {
        goto fail;
    }
    found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < table->n; i++) {
        if (values[i] != NULL && selected[i]) { /* NULL: deregistered, as in a checkpoint, or not here */
            PyObject *index = PyLong_FromSsize_t(i);
            if (index == NULL || PyList_Append(found, index) < 0) {
                Py_CLEAR(found);
            }
            Py_XDECREF(index);
        }
    }
fail:
    drop_all(values, table->n);
    fp_free(selected);
    fp_pieces_release(pieces);
    Py_XDECREF(params);
    return found;
}

/* ---- gradients ---- */

static PyObject *
module_params_set_grads(fp_module_params *table, PyObject *grad)
{
    PyObject **params = get_all(table, NULL);
    int status = params == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < table->n; i++) {
        if (params[i] == NULL) {
            PyErr_Format(PyExc_AttributeError, "%U is missing from its module", table->attributes.items[i].name);
            status = -1;
        }
    }
    if (status == 0) {
        status = fp_torch_set_grads(params, table->geometry, grad);
    }
    drop_all(params, table->n);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
module_params_set_grad_pieces(fp_module_params *table, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *params = NULL, *mask = NULL; /* owned */
    char *none = NULL;
    fp_pieces *pieces = NULL;
    int by_data, status = -1;
    FP_TRY_NULL(fp_read_args("set_grad_pieces", args, nargs, "OOObO", &by_data));
    params = fp_as_tuple(args[0], table->n, "parameters");
    mask = params == NULL ? NULL : fp_as_tuple(args[2], table->n, "mask entries");
    none = mask == NULL ? NULL : fp_new_array(table->n, 1);
    for (Py_ssize_t i = 0; none != NULL && i < table->n; i++) {
        const int is_none = PyObject_IsTrue(PyTuple_GET_ITEM(mask, i));
        if (is_none < 0) {
            goto fail;
        }
        none[i] = (char)is_none;
    }
    pieces = none == NULL ? NULL : fp_pieces_of(&table->last, table->n, args[4]);
    if (pieces != NULL) {
        status = fp_torch_set_grad_pieces(fp_items(params), table->geometry, args[1], pieces->starts, pieces->numels,
                                          none, by_data);
    }
fail:
    fp_pieces_release(pieces);
    fp_free(none);
    Py_XDECREF(params);
    Py_XDECREF(mask);
    return status < 0 ? NULL : PyBool_FromLong(status == 0);
}

/* ---- the type ---- */

static PyMethodDef module_params_methods[] = {
    {"views", FP_METHOD(module_params_views), METH_O,
     "views($self, flat, /)\n--\n\n"
     "Return a list of the views of flat, the unsharded flat parameter: one a parameter, in its shape. "
     "If flat requires grad, one autograd node is behind all of them."},
    {"register_tensors", FP_METHOD(module_params_register_tensors), METH_FASTCALL,
     "register_tensors($self, tensors, listed, unsafe, /)\n--\n\n"
     "Make the tensors, one a parameter, plain attributes of the modules.\n\nlisted: they stand in _parameters, too. "
     "unsafe: write the dictionaries of the modules whatever their class overrides."},
    {"register_parameters", FP_METHOD(module_params_register_parameters), METH_FASTCALL,
     "register_parameters($self, params, shared, unsafe, /)\n--\n\n"
     "Make params, and shared under the further names, registered parameters of the modules.\n\n"
     "unsafe: see register_tensors()."},
    {"use_parameters", FP_METHOD(module_params_use_parameters), METH_FASTCALL,
     "use_parameters($self, flat, params, shared, unsafe, /)\n--\n\n"
     "Set the data of params to their places in flat, the unsharded flat parameter, and register them as parameters of "
     "the modules.\n\nshared: the parameters under the further names; they get the same data. "
     "unsafe: see register_tensors().\n\nReturn False, with nothing done, if a tensor is not plain or a mode is on."},
    {"use_unsharded", FP_METHOD(module_params_use_unsharded), METH_FASTCALL,
     "use_unsharded($self, flat, padded, tensors, again, listed, unsafe, /)\n--\n\n"
     "Set flat.data to the first numel elements of padded, and make views of flat plain attributes of the modules.\n\n"
     "again: use tensors, whose data is set to their places in flat. "
     "Otherwise use the views of the last call where only the modules and the list tensors refer to them, and new ones "
     "elsewhere; if tensors is None, new ones everywhere. "
     "listed, unsafe: see register_tensors(). listed replaces the items of the list tensors, too.\n\n"
     "Return the list of views; None, with nothing done, if a tensor is not plain or a mode is on."},
    {"use_sharded", FP_METHOD(module_params_use_sharded), METH_FASTCALL,
     "use_sharded($self, flat, shard, params, shared, infos, unsafe, /)\n--\n\n"
     "Set flat.data to shard and the data of params to their 1-D pieces of it, and register params as parameters of "
     "the modules.\n\n"
     "infos: a tuple of (in_shard, offset_in_shard, numel_in_shard, ...), one a parameter, in elements. "
     "shared: the parameters under the further names; they get the same data. unsafe: see register_tensors().\n\n"
     "Return False, with nothing done, if a tensor is not plain or a mode is on."},
    {"scan", FP_METHOD(module_params_scan), METH_FASTCALL,
     "scan($self, params, owner, grad, infos, /)\n--\n\n"
     "Return a list of the indices of the parameters in the shard that need a writeback. "
     "They were replaced in their module, or their storage is not owner's, or their gradient's storage is not grad's, "
     "or they lie at another place of a whole owner or grad.\n\ninfos: see use_sharded().\n\n"
     "Return None unless owner and grad are plain, or grad is None, and no mode is on."},
    {"set_grads", FP_METHOD(module_params_set_grads), METH_O,
     "set_grads($self, grad, /)\n--\n\n"
     "Set .grad of the attribute that each module has now to its view of grad, the unsharded gradient of the flat "
     "parameter. AttributeError: a module lacks the attribute."},
    {"set_grad_pieces", FP_METHOD(module_params_set_grad_pieces), METH_FASTCALL,
     "set_grad_pieces($self, params, grad, none_mask, by_data, infos, /)\n--\n\n"
     "Set .grad of each parameter to its 1-D piece of grad, the sharded gradient of the flat parameter. "
     "It becomes None where none_mask is true, where the parameter is not in the shard, and where it requires no "
     "grad.\n\nby_data: set the data of the gradient, whatever its shape. infos: see use_sharded().\n\n"
     "Return False, with nothing done, if a tensor is not plain or a mode is on."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot module_params_slots[] = {
    {Py_tp_doc, "ModuleParams(parameters, shared, numel)\n--\n\n"
                "The original parameters of one flat parameter, and the loops over them. Sizes are in elements.\n\n"
                "parameters: one (module, name, shape, stride or None if contiguous, offset) each, in the order of "
                "their offsets.\nshared: one (module, name, index of the parameter) for each further name.\n"
                "numel: of the unsharded flat parameter."},
    {Py_tp_new, module_params_new},
    {Py_tp_dealloc, module_params_dealloc},
    {Py_tp_traverse, module_params_traverse},
    {Py_tp_clear, module_params_clear},
    {Py_tp_methods, module_params_methods},
    {0, NULL},
};

PyType_Spec fp_module_params_type = FP_TYPE("ModuleParams", fp_module_params, Py_TPFLAGS_HAVE_GC, module_params_slots);
