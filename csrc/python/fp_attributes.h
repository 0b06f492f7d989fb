/* python/fp_attributes.h -- parameters as attributes of their modules: reading and replacing them, many at a time. Each flat
 * parameter of the runtime, and each _C.ModuleParams of the drop-in, has one fp_attributes.
 *
 * Where nn.Module's own rules decide, the module's dictionaries are written directly, which is faster. Where a class
 * overrides these rules, or a hook on parameter registration is set, delattr and setattr are called as torch does. The
 * version tag of a class tells when this must be found again. Both ways have the same result, the order of _parameters too,
 * if each name has gone through delattr and setattr once before: the constructors of both owners do that.
 *
 * The caller holds the GIL. A class of the user may run Python code in most of these calls. */
#pragma once

#include "python/fp_args.h"

typedef struct {
    PyObject *module;     /* owned */
    PyObject *name;       /* owned, interned */
    PyTypeObject *type;   /* borrowed, only compared: the class of module when direct was found; NULL: not found yet */
    unsigned int version; /* the version tag of type then, which changes with the class; 0: it had none */
    int direct;           /* 1: nn.Module's own rules hold for this name, so the dictionaries are written directly */
} fp_attribute;

typedef struct {
    fp_attribute *items; /* [n + n_shared] n parameters, then n_shared further names of them (tied weights) */
    Py_ssize_t n, n_shared;
    Py_ssize_t *primary; /* [n_shared] the index of the parameter that a further name stands for */
} fp_attributes;

typedef struct {
    int is_parameter; /* 1: register as a parameter; 0: a plain attribute */
    int listed;       /* for plain attributes: 1: put the value into _parameters too, as torch does in forward */
    int unsafe;       /* 1: write the dictionaries whatever the class overrides, as FSDP_USE_UNSAFE_SETATTR=1 asks */
} fp_place;

/* The number of torch's global hooks on parameter registration that flatparam has set. They need not see values that are put
 * here. With any other such hook, delattr and setattr are used. */
extern Py_ssize_t fp_attributes_own_hooks;

/* Find torch.nn.Module and its methods. fp_module.c calls it when the extension is imported. -1 with torch's exception. */
int fp_attributes_exec(void);

/* TypeError unless value may stand in a parameter's place: an nn.Parameter (is_parameter), else a Tensor. */
int fp_attributes_check(PyObject *value, int is_parameter);

/* Room for n parameters and n_shared further names, all empty. -1 with MemoryError. */
int fp_attributes_init(fp_attributes *attributes, Py_ssize_t n, Py_ssize_t n_shared);
/* Name item i. TypeError unless module is an nn.Module and name a str. */
int fp_attributes_set(fp_attributes *attributes, Py_ssize_t i, PyObject *module, PyObject *name);
/* Set the attribute of each parameter to its value of values[n], and that of each further name to its value of
 * shared[n_shared] (NULL: to the value of its parameter). The caller has checked them (fp_attributes_check). On failure the
 * attributes before the failed one are set. The failed one has its old value, or the value that delattr and setattr of its
 * class have left. */
int fp_attributes_put(fp_attributes *attributes, PyObject *const *values, PyObject *const *shared, fp_place place);
/* values[i] = a new reference to the attribute of parameter i, for all n. NULL if its module has none, or if wanted[i] is 0;
 * wanted NULL: all are wanted. On failure no reference is left in values. */
int fp_attributes_get(fp_attributes *attributes, const char *wanted, PyObject **values);
/* The index of the first parameter that a user has replaced; n: there is none; -1 with an exception. A parameter is replaced
 * if, under one of its names, its attribute is not values[i], or its entry in _parameters is not listed[i] (listed NULL:
 * there must be no entry). is_parameter 1: the value must be in _parameters and not in __dict__. Where a class overrides
 * nn.Module's rules, the result of getattr() is compared; with is_parameter 0 nothing is, as a class may return another
 * form of the tensor. */
Py_ssize_t fp_attributes_find_other(fp_attributes *attributes, PyObject *const *values, PyObject *const *listed,
                                    int is_parameter);
/* Write values[n] into the _parameters of the modules, and leave the attributes as they are. After a failure those before
 * the failed one are written. */
int fp_attributes_list(fp_attributes *attributes, PyObject *const *values);
/* 1: nn.Module's own rules hold for an item, so the module's dictionaries are read and written; 0: its class overrides them, or
 * a user's hook watches the registration of parameters; -1. */
int fp_attributes_is_direct(fp_attribute *item);

int fp_attributes_traverse(fp_attributes *attributes, visitproc visit, void *arg);
void fp_attributes_clear(fp_attributes *attributes); /* drop the references, keep the arrays */
void fp_attributes_free(fp_attributes *attributes);  /* free the arrays, after fp_attributes_clear() */
