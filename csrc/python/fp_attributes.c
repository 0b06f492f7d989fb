/* python/fp_attributes.c -- see fp_attributes.h. */
#include "python/fp_attributes.h"

#include "core/fp_alloc.h"

/* Objects of torch.nn, found when the extension is imported. Globals, as libtorch_python's are. */
static struct {
    PyObject *module_class;    /* torch.nn.Module */
    PyObject *parameter_class; /* torch.nn.Parameter */
    PyObject *tensor_class;    /* torch.Tensor */
    PyObject *hooks;           /* the dict of global parameter registration hooks */
    PyObject *parameters;      /* "_parameters" */
    PyObject *methods[5]; /* nn.Module's methods, by method_names; None for one that was replaced before the import */
} nn;

Py_ssize_t fp_attributes_own_hooks;

static const char *const method_names[] = {"__getattribute__", "__getattr__", "__setattr__", "__delattr__",
                                           "register_parameter"};
enum { METHODS = sizeof method_names / sizeof method_names[0] };

/* A new reference to nn.Module's method; to None if it is not torch's. */
static PyObject *
own_method(PyObject *base, const char *name)
{
    PyObject *method = PyObject_GetAttrString(base, name);
    if (method == NULL || !PyFunction_Check(method)) {
        return method; /* object's __getattribute__ */
    }
    PyObject *where = PyFunction_GetModule(method); /* borrowed: the name of the module that defines it */
    if (where != NULL && PyUnicode_Check(where) &&
        PyUnicode_CompareWithASCIIString(where, "torch.nn.modules.module") == 0) {
        return method;
    }
    Py_DECREF(method);
    return Py_NewRef(Py_None);
}

int
fp_attributes_exec(void)
{
    if (nn.module_class != NULL) {
        return 0;
    }
    PyObject *nn_module = PyImport_ImportModule("torch.nn.modules.module");
    FP_NEED(nn_module);
    PyObject *base = PyObject_GetAttrString(nn_module, "Module");
    Py_XSETREF(nn.parameter_class, PyObject_GetAttrString(nn_module, "Parameter"));
    Py_XSETREF(nn.tensor_class, PyObject_GetAttrString(nn_module, "Tensor"));
    Py_XSETREF(nn.hooks, PyObject_GetAttrString(nn_module, "_global_parameter_registration_hooks"));
    Py_XSETREF(nn.parameters, PyUnicode_InternFromString("_parameters"));
    int found = base != NULL && nn.parameter_class != NULL && nn.tensor_class != NULL && nn.hooks != NULL &&
                nn.parameters != NULL;
    for (int m = 0; found && m < METHODS; m++) {
        Py_XSETREF(nn.methods[m], own_method(base, method_names[m]));
        found = nn.methods[m] != NULL;
    }
    if (found) {
        nn.module_class = Py_NewRef(base);
    }
    Py_XDECREF(base);
    Py_DECREF(nn_module);
    return found ? 0 : -1;
}

int
fp_attributes_init(fp_attributes *attributes, Py_ssize_t n, Py_ssize_t n_shared)
{
    attributes->primary = fp_new_array(n_shared, sizeof *attributes->primary);
    attributes->items = attributes->primary == NULL ? NULL : fp_new_array(n + n_shared, sizeof *attributes->items);
    FP_NEED(attributes->items);
    attributes->n = n;
    attributes->n_shared = n_shared;
    return 0;
}

/* The index of the parameter that item i is a name of. */
static Py_ssize_t
param_of(const fp_attributes *attributes, Py_ssize_t i)
{
    return i < attributes->n ? i : attributes->primary[i - attributes->n];
}

int
fp_attributes_set(fp_attributes *attributes, Py_ssize_t i, PyObject *module, PyObject *name)
{
    if (!PyObject_TypeCheck(module, (PyTypeObject *)nn.module_class)) {
        return fp_raise(PyExc_TypeError, "expected a torch.nn.Module, got %.200s", Py_TYPE(module)->tp_name);
    }
    if (!PyUnicode_CheckExact(name)) {
        return fp_raise(PyExc_TypeError, "expected a parameter's name, got %.200s", Py_TYPE(name)->tp_name);
    }
    PyObject *interned = Py_NewRef(name);
    PyUnicode_InternInPlace(&interned);
    Py_XSETREF(attributes->items[i].module, Py_NewRef(module));
    Py_XSETREF(attributes->items[i].name, interned);
    return 0;
}

/* Look at the class: 1 if nn.Module's rules hold for this name, 0 if it overrides one of them, -1. */
static int
ask_class(PyTypeObject *type, PyObject *name)
{
    for (int m = 0; m < METHODS; m++) {
        PyObject *method = PyObject_GetAttrString((PyObject *)type, method_names[m]);
        FP_NEED(method);
        const int own = method == nn.methods[m];
        Py_DECREF(method);
        if (!own) {
            return 0;
        }
    }
    PyObject *class_attribute = PyObject_GetAttr((PyObject *)type, name); /* a property of this name, say */
    if (class_attribute != NULL) {
        Py_DECREF(class_attribute);
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 1;
}

int
fp_attributes_is_direct(fp_attribute *item)
{
    PyTypeObject *type = Py_TYPE(item->module);
    if (PyDict_GET_SIZE(nn.hooks) > fp_attributes_own_hooks) {
        return 0;
    }
    if (type == item->type && item->version != 0 && item->version == type->tp_version_tag) {
        return item->direct;
    }
    const int direct = ask_class(type, item->name);
    if (direct >= 0) { /* looking the names up has given the class a version tag, if it can have one */
        item->type = type;
        item->version = type->tp_version_tag;
        item->direct = direct;
    }
    return direct;
}

/* The __dict__ and _parameters of one module: parameters of one module mostly follow each other. */
typedef struct {
    const PyObject *module; /* borrowed, only compared; NULL: of none */
    PyObject *dict;         /* owned, as the next */
    PyObject *parameters;
} module_dicts;

static void
forget_dicts(module_dicts *dicts)
{
    dicts->module = NULL;
    Py_CLEAR(dicts->dict);
    Py_CLEAR(dicts->parameters);
}

/* Fill dicts with those of module. 1 if both are plain dicts, 0 if not, -1. */
static int
get_dicts(PyObject *module, module_dicts *dicts)
{
    if (module == dicts->module) {
        return 1;
    }
    forget_dicts(dicts);
    dicts->dict = PyObject_GenericGetDict(module, NULL);
    FP_NEED(dicts->dict);
    dicts->parameters = Py_XNewRef(PyDict_GetItemWithError(dicts->dict, nn.parameters));
    if (dicts->parameters != NULL && PyDict_CheckExact(dicts->parameters)) {
        dicts->module = module;
        return 1;
    }
    forget_dicts(dicts);
    return PyErr_Occurred() ? -1 : 0;
}

/* 1 if nn.Module's own rules hold for the item, with its module's dicts in dicts; 0; -1. */
static int
get_direct(fp_attribute *item, module_dicts *dicts)
{
    const int direct = fp_attributes_is_direct(item);
    return direct > 0 ? get_dicts(item->module, dicts) : direct;
}

/* 1: done; 0: the name is no parameter or plain attribute: it may be a buffer or a module now; -1. */
static int
put_in_dicts(const module_dicts *dicts, PyObject *name, PyObject *value, fp_place place)
{
    const int wants_dict = !place.is_parameter || place.unsafe;
    const int wants_parameters = place.is_parameter || place.listed;
    const Py_ssize_t before = PyDict_GET_SIZE(dicts->parameters);
    int status = wants_parameters ? PyDict_SetItem(dicts->parameters, name, value) : 0;
    FP_TRY(status);
    const int was_listed =
        wants_parameters ? PyDict_GET_SIZE(dicts->parameters) == before : PyDict_Contains(dicts->parameters, name);
    PyObject *in_dict = NULL; /* borrowed; not looked up if the name is listed and the entry is replaced anyway */
    if (was_listed == 0 || !wants_dict) {
        in_dict = PyDict_GetItemWithError(dicts->dict, name);
    }
    if (was_listed < 0 || (in_dict == NULL && PyErr_Occurred())) {
        return -1;
    }
    if (!was_listed && in_dict == NULL && !place.unsafe) {
        return wants_parameters ? PyDict_DelItem(dicts->parameters, name) : 0;
    }
    if (was_listed && !wants_parameters) {
        status = PyDict_DelItem(dicts->parameters, name);
    }
    if (status == 0 && wants_dict && in_dict != value) {
        status = PyDict_SetItem(dicts->dict, name, value);
    }
    else if (status == 0 && !wants_dict && in_dict != NULL) {
        status = PyDict_DelItem(dicts->dict, name);
    }
    return status < 0 ? -1 : 1;
}

/* delattr if there is an attribute, then setattr, as torch does for a class of any kind. A plain attribute that is a Parameter
 * (a frozen one of a subclass) is set by object's setattr: that of nn.Module would list it among the parameters. */
static int
put_by_setattr(PyObject *module, PyObject *name, PyObject *value, fp_place place)
{
    PyObject *old = PyObject_GetAttr(module, name);
    if (old == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    const int had = old != NULL;
    Py_XDECREF(old);
    const int would_register = place.is_parameter ? 0 : PyObject_IsInstance(value, nn.parameter_class);
    FP_TRY(would_register);
    if (had && PyObject_DelAttr(module, name) < 0) {
        return -1;
    }
    FP_TRY((would_register ? PyObject_GenericSetAttr : PyObject_SetAttr)(module, name, value));
    if (place.is_parameter || !place.listed) {
        return 0;
    }
    PyObject *parameters = PyObject_GetAttr(module, nn.parameters);
    const int status = parameters == NULL ? -1 : PyObject_SetItem(parameters, name, value);
    Py_XDECREF(parameters);
    return status;
}

static int
put(fp_attribute *item, PyObject *value, fp_place place, module_dicts *dicts)
{
    int direct = place.unsafe ? get_dicts(item->module, dicts) : get_direct(item, dicts);
    if (direct > 0) {
        direct = put_in_dicts(dicts, item->name, value, place);
    }
    if (direct != 0) {
        return direct < 0 ? -1 : 0;
    }
    forget_dicts(dicts); /* a class's own setattr may exchange them */
    return put_by_setattr(item->module, item->name, value, place);
}

int
fp_attributes_put(fp_attributes *attributes, PyObject *const *values, PyObject *const *shared, fp_place place)
{
    module_dicts dicts = {NULL, NULL, NULL};
    const Py_ssize_t n = attributes->n;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < n + attributes->n_shared; i++) {
        PyObject *value = i >= n && shared != NULL ? shared[i - n] : values[param_of(attributes, i)];
        status = put(&attributes->items[i], value, place, &dicts);
    }
    forget_dicts(&dicts);
    return status;
}

/* A new reference, or NULL: with an exception set, or, if the module has no such attribute, without. */
static PyObject *
get(fp_attribute *item, module_dicts *dicts)
{
    PyObject *value = NULL;
    const int direct = get_direct(item, dicts);
    FP_TRY_NULL(direct);
    if (direct) {
        value = Py_XNewRef(PyDict_GetItemWithError(dicts->dict, item->name));
        if (value == NULL && !PyErr_Occurred()) {
            value = Py_XNewRef(PyDict_GetItemWithError(dicts->parameters, item->name));
        }
    }
    if (value == NULL && !PyErr_Occurred()) {
        forget_dicts(dicts);
        value = PyObject_GetAttr(item->module, item->name); /* a class with other rules, or a buffer now */
    }
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    }
    return value;
}

int
fp_attributes_get(fp_attributes *attributes, const char *wanted, PyObject **values)
{
    module_dicts dicts = {NULL, NULL, NULL};
    int status = 0;
    Py_ssize_t got = 0;
    for (; status == 0 && got < attributes->n; got++) {
        const int skip = wanted != NULL && !wanted[got];
        values[got] = skip ? NULL : get(&attributes->items[got], &dicts);
        status = !skip && values[got] == NULL && PyErr_Occurred() ? -1 : 0;
    }
    forget_dicts(&dicts);
    while (status < 0 && got-- > 0) {
        Py_CLEAR(values[got]);
    }
    return status;
}

/* 1 if object is the attribute of item, and listed stands among its module's parameters; 0; -1. */
static int
is_put(fp_attribute *item, const PyObject *object, const PyObject *listed, int is_parameter, module_dicts *dicts)
{
    const int direct = get_direct(item, dicts);
    FP_TRY(direct);
    if (!direct) { /* a class may return its tensors in another form */
        PyObject *value = is_parameter ? get(item, dicts) : NULL;
        Py_XDECREF(value);
        if (PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_Exception)) {
                return -1;
            }
            PyErr_Clear(); /* it has no such attribute */
        }
        return !is_parameter || value == object;
    }
    const PyObject *in_dict = PyDict_GetItemWithError(dicts->dict, item->name);
    if (in_dict == NULL && PyErr_Occurred()) {
        return -1;
    }
    const PyObject *in_parameters = PyDict_GetItemWithError(dicts->parameters, item->name);
    if (in_parameters == NULL && PyErr_Occurred()) {
        return -1;
    }
    return in_parameters == listed && in_dict == (is_parameter ? NULL : object);
}

Py_ssize_t
fp_attributes_find_other(fp_attributes *attributes, PyObject *const *values, PyObject *const *listed, int is_parameter)
{
    module_dicts dicts = {NULL, NULL, NULL};
    int same = 1;
    Py_ssize_t found = attributes->n;
    for (Py_ssize_t i = 0; same == 1 && i < attributes->n + attributes->n_shared; i++) {
        const Py_ssize_t at = param_of(attributes, i);
        same = is_put(&attributes->items[i], values[at], listed == NULL ? NULL : listed[at], is_parameter, &dicts);
        found = same == 0 ? at : found;
    }
    forget_dicts(&dicts);
    return same < 0 ? -1 : found;
}

int
fp_attributes_list(fp_attributes *attributes, PyObject *const *values)
{
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < attributes->n + attributes->n_shared; i++) {
        const fp_attribute *item = &attributes->items[i];
        PyObject *parameters = PyObject_GetAttr(item->module, nn.parameters);
        status = parameters == NULL ? -1 : PyObject_SetItem(parameters, item->name, values[param_of(attributes, i)]);
        Py_XDECREF(parameters);
    }
    return status;
}

int
fp_attributes_check(PyObject *value, int is_parameter)
{
    if (PyObject_TypeCheck(value, (PyTypeObject *)(is_parameter ? nn.parameter_class : nn.tensor_class))) {
        return 0;
    }
    return fp_raise(PyExc_TypeError, "expected a torch.%s, got %.200s", is_parameter ? "nn.Parameter" : "Tensor",
                    Py_TYPE(value)->tp_name);
}

int
fp_attributes_traverse(fp_attributes *attributes, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < attributes->n + attributes->n_shared; i++) {
        Py_VISIT(attributes->items[i].module);
        Py_VISIT(attributes->items[i].name);
    }
    return 0;
}

void
fp_attributes_clear(fp_attributes *attributes)
{
    for (Py_ssize_t i = 0; i < attributes->n + attributes->n_shared; i++) {
        Py_CLEAR(attributes->items[i].module);
        Py_CLEAR(attributes->items[i].name);
    }
}

void
fp_attributes_free(fp_attributes *attributes)
{
    fp_free(attributes->items);
    fp_free(attributes->primary);
}
