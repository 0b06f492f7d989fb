/* runtime/fp_flat_param.c -- see fp_flat_param.h. */
#include "runtime/fp_flat_param.h"

#include "core/fp_alloc.h"
#include "python/fp_entries.h"

int64_t fp_flat_param_unfit;

/* ---- what modules and .grad show ---- */

/* Where nothing is sharded, what is kept is the gradient of this rank, unless a reduced one was put aside. */
static void
set_shows_kept(fp_flat_param *part, int shows)
{
    const int was_unfit = part->unreduced || part->wide;
    part->unreduced = shows && (part->shard_group != NULL || part->saved != NULL);
    part->wide = shows && fp_param_is_low(part->master);
    fp_flat_param_unfit += (part->unreduced || part->wide) - was_unfit;
    part->shows_kept = shows;
}

int
fp_flat_param_show(fp_flat_param *part, int views)
{
    PyObject *values = Py_NewRef(views ? part->views : part->params); /* ours: what is replaced may run code */
    PyObject *const *items = &PyTuple_GET_ITEM(values, 0);
    const fp_place place = {.is_parameter = !views, .listed = part->params != NULL, .unsafe = 0};
    int status = fp_attributes_put(&part->attributes, 0, items, part->n, place);
    for (Py_ssize_t k = 0; status == 0 && k < part->n_shared; k++) {
        status = fp_attributes_put(&part->attributes, part->n + k, &items[part->primary[k]], 1, place);
    }
    Py_DECREF(values);
    if (status == 0) {
        part->shows = views ? FP_SHOWS_VIEWS : FP_SHOWS_PARAMS;
    }
    return status;
}

int
fp_flat_param_show_views(fp_flat_param *part)
{
    return part->shows == FP_SHOWS_VIEWS ? 0 : fp_flat_param_show(part, 1);
}

int
fp_flat_param_list_params(fp_flat_param *part)
{
    if (part->shows != FP_SHOWS_VIEWS || part->params == NULL) {
        return 0;
    }
    PyObject *params = Py_NewRef(part->params); /* ours: what is replaced may run code */
    PyObject *const *items = &PyTuple_GET_ITEM(params, 0);
    int status = fp_attributes_list(&part->attributes, 0, items, part->n);
    for (Py_ssize_t k = 0; status == 0 && k < part->n_shared; k++) {
        status = fp_attributes_list(&part->attributes, part->n + k, &items[part->primary[k]], 1);
    }
    Py_DECREF(params);
    part->shows = FP_SHOWS_BOTH;
    return status;
}

int
fp_flat_param_show_params(fp_flat_param *part)
{
    return part->shows == FP_SHOWS_PARAMS || part->params == NULL ? 0 : fp_flat_param_show(part, 0);
}

int64_t
fp_flat_param_versions(const fp_flat_param *part)
{
    return fp_param_versions(fp_flat_param_items(part->owners), PyTuple_GET_SIZE(part->owners)) +
           fp_param_versions(&part->master, 1) + fp_flat_buffer_sources(part->flat, part->master);
}

int
fp_flat_param_is_as_gathered(fp_flat_param *part)
{
    int untracked = 1;
    for (Py_ssize_t i = 0; untracked && i < PyTuple_GET_SIZE(part->owners); i++) {
        untracked = !fp_param_requires_grad(PyTuple_GET_ITEM(part->owners, i));
    }
    if (untracked != part->untracked || part->versions != fp_flat_param_versions(part) ||
        fp_flat_buffer_is_written(part->flat, fp_flat_param_items(part->views))) {
        return 0;
    }
    const Py_ssize_t moved = fp_flat_param_find_moved(part);
    if (moved < 0) {
        PyErr_Clear(); /* who looks it over before the gather says so */
    }
    return moved == part->n;
}

int
fp_flat_param_forward_requires_grad(const fp_flat_param *part)
{
    for (Py_ssize_t i = 0; part->params != NULL && !part->untracked && i < part->n; i++) {
        PyObject *method = PyObject_GetAttrString(PyTuple_GET_ITEM(part->params, i), "requires_grad_");
        const int status =
            method == NULL ? -1 : PyObject_SetAttrString(PyTuple_GET_ITEM(part->views, i), "requires_grad_", method);
        Py_XDECREF(method);
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

int
fp_flat_param_take_requires_grad(const fp_flat_param *part, PyObject *name)
{
    for (Py_ssize_t i = 0; part->untracked && part->views != NULL && i < part->n; i++) {
        PyObject *owner = part->params == NULL ? NULL : PyTuple_GET_ITEM(part->params, i);
        const int taken = fp_param_take_requires_grad(PyTuple_GET_ITEM(part->views, i), owner);
        if (taken < 0) {
            return -1;
        }
        if (taken == 2 || (taken == 1 && owner == NULL)) {
            PyErr_Format(
                PyExc_RuntimeError,
                "requires_grad of parameter `%U` of a %.200s in %U was set in the middle of its forward, %s. Set "
                "it before that, on the parameters() of the model",
                fp_attributes_name(&part->attributes, i), Py_TYPE(part->attributes.items[i].module)->tp_name, name,
                owner == NULL ? "where it is a part of the flat parameter"
                              : "and it was used after that: its gradient would be lost");
            return -1;
        }
    }
    return 0;
}

Py_ssize_t
fp_flat_param_find_other(fp_flat_param *part)
{
    if (part->shows == FP_SHOWS_NOTHING) {
        return part->n;
    }
    const int is_parameter = part->shows == FP_SHOWS_PARAMS;
    PyObject *values = is_parameter ? part->params : part->views;
    PyObject *listed = part->params == NULL ? NULL : part->shows == FP_SHOWS_VIEWS ? part->views : part->params;
    PyObject *const *value = &PyTuple_GET_ITEM(values, 0);
    PyObject *const *in_list = listed == NULL ? NULL : &PyTuple_GET_ITEM(listed, 0);
    Py_INCREF(values);
    Py_XINCREF(listed);
    Py_ssize_t found = fp_attributes_find_other(&part->attributes, 0, value, in_list, part->n, is_parameter);
    for (Py_ssize_t k = 0; found == part->n && k < part->n_shared; k++) {
        const Py_ssize_t i = part->primary[k];
        const Py_ssize_t at = fp_attributes_find_other(&part->attributes, part->n + k, &value[i],
                                                       in_list == NULL ? NULL : &in_list[i], 1, is_parameter);
        found = at < 0 ? -1 : at == 0 ? i : part->n;
    }
    Py_DECREF(values);
    Py_XDECREF(listed);
    return found;
}

Py_ssize_t
fp_flat_param_find_moved(fp_flat_param *part)
{
    if (part->params != NULL) {
        const Py_ssize_t moved = fp_param_moved(fp_flat_param_items(part->params), part->n, part->geometry,
                                                part->master, part->starts, part->numels);
        if (moved >= 0) {
            return moved;
        }
    }
    return fp_flat_param_find_other(part);
}

int
fp_flat_param_take_written(fp_flat_param *part, PyObject *name)
{
    if (part->views == NULL || !fp_flat_buffer_is_written(part->flat, fp_flat_param_items(part->views))) {
        return 0;
    }
    PyObject *views = Py_NewRef(part->views);
    Py_ssize_t misfit;
    int status = fp_flat_buffer_take_written(part->flat, part->master, fp_flat_param_items(views), &misfit);
    if (status >= 0 && misfit == part->n) {
        PyErr_Format(PyExc_RuntimeError,
                     "%U: a parameter was changed in place at a time when the module's tensors are out of date, so the "
                     "change is dropped: write to it inside summon_full_params()",
                     name);
        status = -1;
    }
    else if (status >= 0 && misfit >= 0) {
        PyErr_Format(PyExc_ValueError,
                     "%U: the new data of parameter `%U` of a %.200s have another shape, dtype or device than it has "
                     "there, so they are dropped and it is as before: give it data that fit, or wrap the module anew",
                     name, fp_attributes_name(&part->attributes, misfit),
                     Py_TYPE(part->attributes.items[misfit].module)->tp_name);
        status = -1;
    }
    Py_DECREF(views);
    return status;
}

int
fp_flat_param_adopt(fp_flat_param *part, Py_ssize_t i, PyObject *param)
{
    if (part->params == NULL || i < 0 || i >= part->n) {
        PyErr_SetString(PyExc_IndexError, "there is no such parameter");
        return -1;
    }
    if (fp_attributes_check(param, 1) < 0) {
        return -1;
    }
    PyObject *params = PyTuple_New(part->n);
    for (Py_ssize_t k = 0; params != NULL && k < part->n; k++) {
        PyTuple_SET_ITEM(params, k, Py_NewRef(k == i ? param : PyTuple_GET_ITEM(part->params, k)));
    }
    if (params == NULL) {
        return -1;
    }
    Py_SETREF(part->params, params);
    Py_SETREF(part->owners, Py_NewRef(params));
    part->versions = part->synced = -1;
    return part->views == NULL ? 0 : fp_flat_param_forward_requires_grad(part);
}

static int
clear_grads(fp_flat_param *part)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part->owners); i++) {
        if (fp_gradients_set(PyTuple_GET_ITEM(part->owners, i), NULL) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Let those have their pieces of what was put aside who had them. */
static int
show_saved(fp_flat_param *part)
{
    PyObject *saved = part->saved;
    part->saved = NULL;
    const int status = saved == NULL ? 0
                                     : fp_gradients_add_pieces(fp_flat_param_items(part->owners),
                                                               PyTuple_GET_SIZE(part->owners), part->owner_geometry,
                                                               part->starts, part->numels, part->in_saved, saved, 0);
    Py_XDECREF(saved);
    return status;
}

static void
refuse_written(const fp_flat_param *part, Py_ssize_t i, const char *name)
{
    PyObject *what = part->params == NULL
                         ? PyUnicode_FromString("its flat parameter")
                         : PyUnicode_FromFormat("parameter `%U`", fp_attributes_name(&part->attributes, i));
    if (what != NULL) {
        PyErr_Format(
            PyExc_ValueError,
            "%s: the gradient of %U was changed in place between micro-batches in no_sync(). There it shows what "
            "was added up in no_sync(), which is dropped now; what a synced backward had reduced before was put "
            "aside, and would not have been changed. Change gradients after the last micro-batch, outside of "
            "no_sync()",
            name, what);
        Py_DECREF(what);
    }
}

int
fp_flat_param_read_kept(fp_flat_param *part, const char *name)
{
    if (!part->shows_kept) {
        return 0;
    }
    set_shows_kept(part, 0);
    PyObject *kept = fp_flat_buffer_kept(part->flat);
    if (kept == NULL) {
        return -1;
    }
    PyObject *const *owners = fp_flat_param_items(part->owners);
    const Py_ssize_t n = PyTuple_GET_SIZE(part->owners);
    const fp_put_aside aside = {
        .tensor = &part->saved, .like = part->master, .has = part->in_saved, .owed = part->owed};
    const Py_ssize_t shown =
        part->refresh_group == NULL
            ? fp_gradients_check_kept(owners, n, part->owner_geometry, part->starts, part->numels, kept, aside)
            : fp_gradients_check_pieces(owners, n, part->owner_geometry, part->starts, part->numels, kept, aside,
                                        part->kept_first, part->own, name, part->cleared);
    Py_DECREF(kept);
    if (shown < -1) {
        refuse_written(part, -2 - shown, name);
    }
    if (shown <= 0) {
        fp_flat_buffer_forget(part->flat, 1);
    }
    PyObject *type, *value, *traceback; /* what the check has raised: no optimizer shall step with what it refuses */
    PyErr_Fetch(&type, &value, &traceback);
    const int status = clear_grads(part) < 0 || show_saved(part) < 0 ? -1 : 0;
    if (shown < 0) {
        PyErr_Restore(type, value, traceback);
    }
    return shown < 0 ? -1 : status;
}

int
fp_flat_param_add_reduced(fp_flat_param *part, PyObject *grad)
{
    PyObject *const *owners = fp_flat_param_items(part->owners);
    const Py_ssize_t n = PyTuple_GET_SIZE(part->owners);
    for (Py_ssize_t i = 0; i < n; i++) {
        part->gets[i] = (char)(fp_param_requires_grad(owners[i]) || part->owed[i]);
        part->owed[i] = 0;
    }
    return fp_gradients_add_pieces(owners, n, part->owner_geometry, part->starts, part->numels, part->gets, grad, 1);
}

int
fp_flat_param_drop_frozen(const fp_flat_param *part, fp_gradients *gradients)
{
    return part->params == NULL ? 0 : fp_gradients_drop_frozen(gradients, fp_flat_param_items(part->params), part->n);
}

int
fp_flat_param_clear_kept(fp_flat_param *part, const int32_t *cleared)
{
    Py_ssize_t left = 0;
    PyObject *kept = fp_flat_buffer_kept(part->flat);
    int status = kept == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part->owners); i++) {
        part->cleared[i] = 0;
        left += (fp_param_requires_grad(PyTuple_GET_ITEM(part->owners, i)) || part->owed[i]) && cleared[i] == 0;
        if (status == 0 && kept != Py_None && cleared[i] != 0) {
            status = fp_gradients_clear_kept(part->owner_geometry, i, kept, part->kept_first);
        }
    }
    Py_XDECREF(kept);
    if (status == 0 && left == 0) {
        fp_flat_buffer_forget(part->flat, 1);
    }
    return status < 0 ? -1 : left > 0;
}

int
fp_flat_param_drop_kept(fp_flat_param *part)
{
    if (fp_flat_param_read_kept(part, "") < 0) {
        PyErr_Clear(); /* what was done to it does not matter any more */
    }
    fp_flat_buffer_forget(part->flat, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part->owners); i++) {
        part->owed[i] = 0;
    }
    return 0;
}

int
fp_flat_param_settle(fp_flat_param *part, const char *name)
{
    if (!part->shows_kept) {
        return 0;
    }
    if (fp_flat_param_read_kept(part, name) < 0) {
        return -1;
    }
    return fp_flat_buffer_has_kept(part->flat) ? fp_flat_param_show_kept(part) : 0;
}

int
fp_flat_param_show_kept(fp_flat_param *part)
{
    PyObject *kept = fp_flat_buffer_kept(part->flat);
    if (kept == NULL) {
        return -1;
    }
    PyObject *const *owners = fp_flat_param_items(part->owners);
    const Py_ssize_t n = PyTuple_GET_SIZE(part->owners);
    PyObject *saved =
        fp_gradients_collect(owners, n, part->owner_geometry, part->starts, part->numels, part->master, part->in_saved);
    int status = saved == NULL ? -1 : 0;
    if (saved == Py_None) {
        Py_CLEAR(saved);
    }
    part->saved = saved;
    if (status == 0 && saved != NULL && part->shard_group == NULL && part->replicate_group == NULL) {
        status = fp_gradients_add(kept, saved); /* there is nobody to reduce it with */
        Py_CLEAR(part->saved);
        for (Py_ssize_t i = 0; i < n; i++) {
            part->owed[i] = (char)(part->owed[i] || part->in_saved[i]);
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        part->gets[i] = (char)(part->owed[i] || fp_param_requires_grad(owners[i]));
    }
    if (status == 0) {
        status = part->refresh_group == NULL
                     ? fp_gradients_show_kept(owners, n, part->owner_geometry, part->gets, kept)
                     : fp_gradients_show_pieces(owners, n, part->starts, part->numels, part->gets, kept, part->own);
    }
    set_shows_kept(part, status == 0);
    Py_DECREF(kept);
    return status;
}

/* ---- from Python, and back ---- */

/* (group, registered name or None), or None. */
static int
read_group(PyObject *object, fp_group **group)
{
    PyObject *process_group;
    const char *name;
    if (object == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "expected a group as (group, name or None), or None");
        return -1;
    }
    if (!PyArg_ParseTuple(object, "Oz", &process_group, &name)) {
        return -1;
    }
    *group = fp_group_new(process_group, name);
    return *group == NULL ? -1 : 0;
}

static int
read_owners(fp_flat_param *part, PyObject *pieces, int64_t numel, int64_t total)
{
    part->owners = part->params != NULL ? Py_NewRef(part->params) : PyTuple_Pack(1, part->master);
    if (part->owners == NULL) {
        return -1;
    }
    const Py_ssize_t n = PyTuple_GET_SIZE(part->owners);
    if (PyTuple_GET_SIZE(pieces) != n) {
        PyErr_Format(PyExc_ValueError, "expected %zd pieces, got %zd", n, PyTuple_GET_SIZE(pieces));
        return -1;
    }
    part->cleared = fp_calloc((size_t)n, 4);
    part->starts = fp_calloc((size_t)n, 2 * sizeof *part->starts);
    if (part->cleared == NULL || part->starts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    part->numels = part->starts + n;
    part->in_saved = part->cleared + n;
    part->owed = part->in_saved + n;
    part->gets = part->owed + n;
    for (Py_ssize_t i = 0; i < n; i++) {
        long long start, count;
        if (!PyTuple_Check(PyTuple_GET_ITEM(pieces, i))) {
            PyErr_SetString(PyExc_TypeError, "expected pieces (start, numel)");
            return -1;
        }
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pieces, i), "LL", &start, &count)) {
            return -1;
        }
        part->starts[i] = start;
        part->numels[i] = count;
    }
    if (part->params == NULL) {
        const fp_view view = {.offset = 0, .ndim = 1, .shape = &numel, .stride = NULL};
        part->owner_geometry = fp_torch_geometry_new(&view, 1, total);
        return part->owner_geometry == NULL ? -1 : 0;
    }
    part->owner_geometry = part->geometry;
    return 0;
}

static int
check_tensors(const fp_flat_param *part)
{
    if (!fp_torch_is_plain(part->master) || fp_attributes_check(part->master, 1) < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "expected the flat parameter to be a plain dense Parameter");
        }
        return -1;
    }
    if (part->params != NULL && PyTuple_GET_SIZE(part->params) != part->n) {
        PyErr_Format(PyExc_ValueError, "expected %zd parameters, got %zd", part->n, PyTuple_GET_SIZE(part->params));
        return -1;
    }
    for (Py_ssize_t i = 0; part->params != NULL && i < part->n; i++) {
        if (fp_attributes_check(PyTuple_GET_ITEM(part->params, i), 1) < 0) {
            return -1;
        }
        if (!fp_torch_is_plain(PyTuple_GET_ITEM(part->params, i))) {
            PyErr_Format(PyExc_TypeError, "parameter %zd is not a plain dense tensor", i);
            return -1;
        }
    }
    return 0;
}

int
fp_flat_param_read(fp_flat_param *part, PyObject *tuple)
{
    PyObject *entries, *shared, *master, *params, *pieces, *shard_group, *replicate_group, *compute, *reduce;
    PyObject *param_group, *refresh_group, *device;
    long long numel, shard_numel;
    int rank, shards, keep_reduce_dtype, stays_full, param_rank, param_shards, offloads;
    double predivide, postdivide;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "expected each part to be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "O!O!OOO!LLiiOOddOOppiiOOppO", &PyTuple_Type, &entries, &PyTuple_Type, &shared,
                          &master, &params, &PyTuple_Type, &pieces, &numel, &shard_numel, &rank, &shards, &shard_group,
                          &replicate_group, &predivide, &postdivide, &compute, &reduce, &keep_reduce_dtype, &stays_full,
                          &param_rank, &param_shards, &param_group, &refresh_group, &offloads, &part->full_precision,
                          &device)) {
        return -1;
    }
    if (params != Py_None && !PyTuple_Check(params)) {
        PyErr_SetString(PyExc_TypeError, "expected the original parameters as a tuple, or None");
        return -1;
    }
    if (shards < 1 || shard_numel < 1 || shard_numel > INT64_MAX / shards) {
        PyErr_Format(PyExc_ValueError, "expected shards and shard_numel of at least 1, got %d and %lld", shards,
                     shard_numel);
        return -1;
    }
    const int64_t total = shards * (int64_t)shard_numel;
    part->master = Py_NewRef(master);
    part->params = params == Py_None ? NULL : Py_NewRef(params);
    part->n = PyTuple_GET_SIZE(entries);
    part->n_shared = PyTuple_GET_SIZE(shared);
    if (fp_entries_read(entries, shared, total, &part->attributes, &part->primary, &part->geometry) < 0 ||
        check_tensors(part) < 0 || read_owners(part, pieces, numel, total) < 0 ||
        read_group(shard_group, &part->shard_group) < 0 || read_group(replicate_group, &part->replicate_group) < 0 ||
        read_group(param_group, &part->param_group) < 0 || read_group(refresh_group, &part->refresh_group) < 0) {
        return -1;
    }
    const fp_flat_buffer_options options = {
        .geometry = part->geometry,
        .shard_numel = shard_numel,
        .rank = rank,
        .shards = shards,
        .shard_group = part->shard_group,
        .replicate_group = part->replicate_group,
        .param_rank = param_rank,
        .param_shards = param_shards,
        .param_group = part->param_group,
        .refresh_group = part->refresh_group,
        .predivide = predivide,
        .postdivide = postdivide,
        .compute_dtype = compute == Py_None ? NULL : compute,
        .reduce_dtype = reduce == Py_None ? NULL : reduce,
        .full_precision = part->full_precision,
        .keep_reduce_dtype = keep_reduce_dtype,
        .stays_full = stays_full,
        .offloads = offloads,
        .device = device == Py_None ? NULL : device,
    };
    part->versions = part->synced = -1;
    part->shows = part->params == NULL ? FP_SHOWS_NOTHING : FP_SHOWS_PARAMS;
    part->flat = fp_flat_buffer_new(&options);
    if (part->flat == NULL) {
        return -1;
    }
    part->copied = shards > 1 && (stays_full || part->param_group != NULL);
    part->kept_first = param_rank * (total / param_shards);
    part->own = rank * (int64_t)shard_numel - part->kept_first;
    return 0;
}

static void
clear_part(fp_flat_param *part)
{
    fp_attributes_clear(&part->attributes);
    Py_CLEAR(part->master);
    Py_CLEAR(part->params);
    Py_CLEAR(part->views);
    Py_CLEAR(part->owners);
    Py_CLEAR(part->saved);
}

void
fp_flat_param_free(fp_flat_param *part)
{
    set_shows_kept(part, 0);
    clear_part(part);
    fp_attributes_free(&part->attributes);
    fp_flat_buffer_free(part->flat);
    fp_group_free(part->shard_group);
    fp_group_free(part->replicate_group);
    fp_group_free(part->param_group);
    fp_group_free(part->refresh_group);
    if (part->owner_geometry != part->geometry) {
        fp_torch_geometry_free(part->owner_geometry);
    }
    fp_torch_geometry_free(part->geometry);
    fp_free(part->primary);
    fp_free(part->starts);
    fp_free(part->cleared);
}

int
fp_flat_param_traverse(fp_flat_param *part, visitproc visit, void *arg)
{
    Py_VISIT(part->master);
    Py_VISIT(part->params);
    Py_VISIT(part->views);
    Py_VISIT(part->owners);
    Py_VISIT(part->saved);
    return fp_attributes_traverse(&part->attributes, visit, arg);
}
