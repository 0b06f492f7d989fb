/* module/fp_handle.h -- the struct of flatparam._C.HandleSteps, the base class of LayerZero's FlatParamHandle. Two files
 * share it: fp_handle_steps.c has the type, its states and its parameters; fp_handle_gradients.c has its gradients.
 *
 * C does a step in its usual form. For every other form (another device, other groups, tensor subclasses) it calls a
 * method of the subclass, in flatparam/layer_zero. Functions that return int give 0, or -1 with an exception set, unless
 * they say more. Functions that return an object are methods of the type. The caller holds the GIL. */
#pragma once

#include "module/fp_tables.h"
#include "tensor/fp_torch.h"

/* The values of HandleTrainingState, and of Sum (flatparam/layer_zero/states.py): where the sum of the micro-batches is. */
enum { IDLE = 1, FORWARD, BACKWARD_PRE, BACKWARD_POST, SUMMON_FULL_PARAMS, SYNC_PARAMS };
enum { SUM_NONE = 1, SUM_ZEROS, SUM_ON_DEVICE, SUM_ON_HOST };

/* Names of attributes that each step reads: interned strings, owned for the life of the process. */
enum {
    FP_NAME_GRAD,
    FP_NAME_IS_CPU,
    FP_NAME_SAVED_GRAD,
    FP_NAME_STATE,
    FP_NAME_TAKEN,
    FP_NAME_VALUE,
    FP_NAME_ZERO3_SHARD,
    FP_NAMES
};
extern PyObject *fp_handle_names[FP_NAMES];

enum { OBJECTS = 20 };
typedef struct {
    PyObject_HEAD
    union {
        struct {
            /* _bind() sets these six, once. The FlatParameter; the drop-in's handle of it; the count of optimizer steps;
             * (module, name, function): while the module still has that function, native may take its place. */
            PyObject *flat_param, *flat, *optimizers, *gathering;
            PyObject *unit,
                *native; /* ModuleParams, or NULL; Gather over the zero3 group, or NULL: then Python does it */
            /* _bind_buffers() sets these, once: attributes of flat_param under the names in `fields`. padded is the unsharded
             * tensor, grad its gradient in this backward, sum the sum over micro-batches: NULL means "not bound yet". */
            PyObject *params, *shared, *tensors, *infos, *shard, *padded, *grad, *sum;
            PyObject *message, *state; /* str: the error when freed memory is read; the HandleTrainingState */
            /* NULL or None: none. The gather under way; the shard that it reads; what ranks have agreed on staleness, for the
             * next unshard; the sum as it was shown last. */
            PyObject *gather, *source, *agreed, *total;
        };
        PyObject *objects[OBJECTS]; /* the same, for loops: owned; NULL until set */
    };
    int64_t numel, shard_numel, ranks; /* elements of padded and of shard; size of the zero3 group */
    int state_code, sum_code;          /* the value of state; SUM_* */
    /* Flags, 0 or 1. The first line: modules have views; padded has the values of some gather; and ranks have agreed that they
     * are current, for this forward; a wait was interrupted; the last gather was from the masters; a backward has begun to add
     * to grad; .grad shows the sum. */
    char is_unsharded, gathered, confirmed, was_given_up, is_from_masters, in_backward, is_shown;
    /* Drivers may set the first two, as in the reference; then come settings: the zero3 group is smaller than the zero1
     * group and has more than one rank; it has one rank; the device is a CPU; FSDP_USE_UNSAFE_SETATTR=1. */
    char needs_param_sync, param_synced, has_zero3_copy, stays_unsharded, is_on_host, unsafe;
    long long prepared; /* the version of grad when it was set to zeros; -1: no gradient is prepared */
    /* The versions of the masters and the optimizer steps, when the masters were gathered last. */
    long long seen_values, seen_steps;
    fp_versions shown; /* the versions of parameters and gradients when the sum was shown; valid if is_shown */
} fp_handle_steps;

/* Call a method of the subclass, with one argument or none (NULL). New reference, or NULL with an exception. */
static inline PyObject *
fp_handle_by_ops(fp_handle_steps *h, const char *name, PyObject *argument)
{
    return argument == NULL ? PyObject_CallMethod((PyObject *)h, name, NULL)
                            : PyObject_CallMethod((PyObject *)h, name, "(O)", argument);
}

/* Take a reference and give the truth of the object: 1 or 0; -1 on failure, and for NULL. */
static inline int
fp_handle_truth(PyObject *object)
{
    const int is_true = object == NULL ? -1 : PyObject_IsTrue(object);
    Py_XDECREF(object);
    return is_true;
}

/* fp_handle_by_ops() for its effect alone. */
static inline int
fp_handle_run(fp_handle_steps *h, const char *name, PyObject *argument)
{
    PyObject *result = fp_handle_by_ops(h, name, argument);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static inline int
fp_is_set(const PyObject *object)
{
    return object != NULL && object != Py_None;
}

/* 1: the loops in C can do the step: the buffers are bound, and no parameter has a further name. */
static inline int
fp_handle_is_usual(const fp_handle_steps *h)
{
    return h->padded != NULL && h->unit != NULL && PyList_GET_SIZE(h->shared) == 0;
}

static inline int
fp_handle_has_views(const fp_handle_steps *h)
{
    return PyList_GET_SIZE(h->tensors) > 0 && PyList_GET_ITEM(h->tensors, 0) != Py_None;
}

static inline int
fp_handle_in_backward(const fp_handle_steps *h)
{
    return h->state_code == BACKWARD_PRE || h->state_code == BACKWARD_POST;
}

/* ---- fp_handle_gradients.c: writes of users, memory, gradients ---- */

/* Add up the versions of masters, parameters and their gradients: a sum changes with each write that torch counts. */
int fp_handle_versions(fp_handle_steps *h, fp_versions *found);

/* 1: the gradients are as they were when the sum was shown; 0: a user has changed one; -1 on failure. */
int fp_handle_is_as_shown(fp_handle_steps *h);

/* Give the storage of tensor memory for numel elements. 1: done; 0: it had that memory; -1 on failure. */
int fp_handle_allocate(fp_handle_steps *h, PyObject *tensor);

/* Free the storage of tensor. On an accelerator call the method by_method, which minds streams. */
int fp_handle_free(fp_handle_steps *h, PyObject *tensor, const char *by_method);

/* Raise unless the flat parameter is on the device that computes. */
int fp_handle_check_device(fp_handle_steps *h);

/* Set .grad of params, a sequence, to None. 1: done; 0: one of them is no plain tensor, and nothing was done; -1 on failure. */
int fp_handle_clear_grads(PyObject *params);

/* The state becomes IDLE after a backward: free a prepared gradient to which nothing was added, and show the sum in .grad. */
int fp_handle_leave_backward(fp_handle_steps *h);

PyObject *fp_handle_note_shown(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_stop_showing(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_prepare_gradient(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_accumulate(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_free_gradient(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_reload(fp_handle_steps *h, PyObject *ignored);
