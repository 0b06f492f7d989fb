/* python/fp_attributes.h -- parameters as attributes of their modules: reading and replacing them, many at a time.
 *
 * Where nn.Module's own rules decide, the module's dictionaries are written directly; where a class overrides them, or a
 * hook on parameter registration is set, it goes through delattr and setattr as torch does. Which of the two holds is
 * found again whenever the class changes (its version tag tells). The result is the same, the order of _parameters too,
 * as long as each name has gone through delattr and setattr once before (FlatParamHandle's constructor does that). */
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
    int listed;       /* plain attributes only: stand in _parameters too, as torch does in forward */
    int unsafe;       /* write the dictionaries whatever the class overrides, as FSDP_USE_UNSAFE_SETATTR=1 asks */
} fp_place;

/* The number of torch's global hooks on parameter registration that are flatparam's own. They need not see values that are put
 * here; with any other such hook, delattr and setattr are used. */
extern Py_ssize_t fp_attributes_own_hooks;

/* Find torch.nn.Module and its methods; called when the extension is imported. -1 with torch's exception. */
int fp_attributes_exec(void);

/* TypeError unless value may stand in a parameter's place: an nn.Parameter (is_parameter), else a Tensor. */
int fp_attributes_check(PyObject *value, int is_parameter);

/* Room for n parameters and n_shared further names, all empty. -1 with MemoryError. */
int fp_attributes_init(fp_attributes *attributes, Py_ssize_t n, Py_ssize_t n_shared);
/* Name item i. TypeError unless module is an nn.Module and name a str. */
int fp_attributes_set(fp_attributes *attributes, Py_ssize_t i, PyObject *module, PyObject *name);
/* Make the n values, which were checked, the attributes of the parameters, and the n_shared values shared (NULL: those of
 * the parameters) that of their further names. On failure the attributes before the one that failed are set. The
 * failed one has its old value, or the value that delattr and setattr of its class have left. */
int fp_attributes_put(fp_attributes *attributes, PyObject *const *values, PyObject *const *shared, fp_place place);
/* values[i] = a new reference to the attribute of parameter i, for all n; NULL if its module has none, or wanted[i] is 0
 * (wanted may be NULL). On failure none is left. */
int fp_attributes_get(fp_attributes *attributes, const char *wanted, PyObject **values);
/* The index of the first parameter that a user has replaced: its attribute, under one of its names, is not values[i], or
 * its entry in _parameters is not listed[i] (listed NULL: there must be none). n: no parameter; -1: error. is_parameter:
 * 1: the value must be in _parameters and not in __dict__. Where a class
 * overrides nn.Module's rules getattr() is compared, and with is_parameter 0 nothing. */
Py_ssize_t fp_attributes_find_other(fp_attributes *attributes, PyObject *const *values, PyObject *const *listed,
                                    int is_parameter);
/* Write values into the _parameters of the modules, and leave the attributes as they are. */
int fp_attributes_list(fp_attributes *attributes, PyObject *const *values);
/* 1: nn.Module's own rules hold for an item, so the module's dictionaries are read and written; 0: its class overrides them, or
 * a user's hook watches the registration of parameters; -1. */
int fp_attributes_is_direct(fp_attribute *item);

int fp_attributes_traverse(fp_attributes *attributes, visitproc visit, void *arg);
void fp_attributes_clear(fp_attributes *attributes); /* drop the references, keep the arrays */
void fp_attributes_free(fp_attributes *attributes);  /* free the arrays, after fp_attributes_clear() */
