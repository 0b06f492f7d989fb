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
    PyTypeObject *type;   /* borrowed, only compared: the class that direct was found for */
    unsigned int version; /* its version tag then; 0: none */
    int direct;           /* 1: nn.Module's own rules hold for this name */
} fp_attribute;

typedef struct {
    fp_attribute *items; /* n parameters, then n_shared further names of them */
    Py_ssize_t n, n_shared;
    Py_ssize_t *primary; /* n_shared: which parameter each further name stands for */
} fp_attributes;

typedef struct {
    int is_parameter; /* 1: register as a parameter; 0: a plain attribute */
    int listed;       /* plain attributes only: stand in _parameters too, as torch does in forward */
    int unsafe;       /* write the dictionaries whatever the class overrides, as FSDP_USE_UNSAFE_SETATTR=1 asks */
} fp_place;

/* How many of torch's global hooks on parameter registration are flatparam's own, which need not see what is put here. */
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
 * the parameters) that of their further names. On failure those before the one that failed have theirs; its module has
 * the old value, or what delattr and setattr of its own class left. */
int fp_attributes_put(fp_attributes *attributes, PyObject *const *values, PyObject *const *shared, fp_place place);
/* values[i] = a new reference to the attribute of parameter i, for all n; NULL if its module has none, or wanted[i] is 0
 * (wanted may be NULL). On failure none is left. */
int fp_attributes_get(fp_attributes *attributes, const char *wanted, PyObject **values);
/* The first parameter whose attribute, under one of its names, is not values[i], or which does not stand among its module's
 * parameters as listed[i] (NULL: as none); n: all are. is_parameter: it stands there only, and is no plain attribute;
 * others are not looked for where a class has rules of its own. -1: error. */
Py_ssize_t fp_attributes_find_other(fp_attributes *attributes, PyObject *const *values, PyObject *const *listed,
                                    int is_parameter);
/* Let all stand among the parameters of their modules as values; the attributes stay. */
int fp_attributes_list(fp_attributes *attributes, PyObject *const *values);
/* 1 if nn.Module's own rules hold for an item, so that it is read and written in the module's dictionaries; 0 if its class
 * has rules of its own, or somebody watches parameters being registered; -1. */
int fp_attributes_is_direct(fp_attribute *item);

int fp_attributes_traverse(fp_attributes *attributes, visitproc visit, void *arg);
void fp_attributes_clear(fp_attributes *attributes); /* drops the references, keeps the room */
void fp_attributes_free(fp_attributes *attributes);  /* gives back the room; after fp_attributes_clear */
