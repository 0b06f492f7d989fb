/* module/fp_handle.h -- the struct of flatparam._C.HandleSteps, and what its two files give each other: fp_handle_steps.c has the
 * type, its states and parameters, fp_handle_gradients.c its gradients. Functions that return int give 0, or -1 with an
 * exception set, unless they say more; those that return an object are methods of the type. */
#pragma once

#include "module/fp_tables.h"
#include "tensor/fp_torch.h"

/* The values of HandleTrainingState, and of Sum: where the sum of the micro-batches is */
enum { IDLE = 1, FORWARD, BACKWARD_PRE, BACKWARD_POST, SUMMON_FULL_PARAMS, SYNC_PARAMS };
enum { SUM_NONE = 1, SUM_ZEROS, SUM_ON_DEVICE, SUM_ON_HOST };

/* Names of attributes that are asked for in each step: interned, owned for the life of the process. */
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
            PyObject *flat_param, *flat, *optimizers, *gathering; /* set once, as unit and native */
            PyObject *unit, *native; /* a ModuleParams; a Gather over the zero3 group, which does what gathering is */
            PyObject *params, *shared, *tensors, *infos, *shard, *padded, *grad, *sum; /* of flat_param: see fields */
            PyObject *message, *state;                                                 /* of memory that is freed */
            PyObject *gather, *source, *agreed, *total;                                /* or None, as all below */
        };
        PyObject *objects[OBJECTS]; /* owned; NULL until they are set */
    };
    int64_t numel, shard_numel, ranks; /* unsharded, sharded; of the zero3 group */
    int state_code, sum_code;
    char is_unsharded, gathered, confirmed, was_given_up, is_from_masters, in_backward, is_shown;
    char needs_param_sync, param_synced, has_zero3_copy, stays_unsharded, is_on_host, unsafe;
    long long prepared;                /* version of this backward's gradient when it was zeros; -1: there is none */
    long long seen_values, seen_steps; /* of masters, and of optimizers, when the masters were gathered last */
    fp_versions shown;                 /* of the sum, when it was shown */
} fp_handle_steps;

/* What the method of the subclass returns. */
static inline PyObject *
fp_handle_by_ops(fp_handle_steps *h, const char *name, PyObject *argument)
{
    return argument == NULL ? PyObject_CallMethod((PyObject *)h, name, NULL)
                            : PyObject_CallMethod((PyObject *)h, name, "(O)", argument);
}

/* The truth of an object, which is given up, or NULL; -1 on failure. */
static inline int
fp_handle_truth(PyObject *object)
{
    const int is_true = object == NULL ? -1 : PyObject_IsTrue(object);
    Py_XDECREF(object);
    return is_true;
}

/* For its effect: 0 or -1. */
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

/* Whether the loops in C can have a part in it. */
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

/* ---- fp_handle_gradients.c: what users have done, memory, and gradients ---- */

/* Sums of versions of masters, parameters and their gradients, which tell what users have done. */
int fp_handle_versions(fp_handle_steps *h, fp_versions *found);

/* Whether gradients are as they were when they were shown; -1 on failure. */
int fp_handle_is_as_shown(fp_handle_steps *h);

/* Give tensor room for all unsharded elements. 1; 0: it had that; -1 on failure. */
int fp_handle_allocate(fp_handle_steps *h, PyObject *tensor);

/* Free tensor; by the method of that name where there are streams. */
int fp_handle_free(fp_handle_steps *h, PyObject *tensor, const char *by_method);

/* The flat parameter is on the device that computes. */
int fp_handle_check_device(fp_handle_steps *h);

/* Clear the gradients of params, a sequence. 1; 0: some are no plain tensors, and nothing was done; -1 on failure. */
int fp_handle_clear_grads(PyObject *params);

/* The state is IDLE after a backward: give up what was prepared and did not come, show what has. */
int fp_handle_leave_backward(fp_handle_steps *h);

PyObject *fp_handle_note_shown(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_stop_showing(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_prepare_gradient(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_accumulate(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_free_gradient(fp_handle_steps *h, PyObject *ignored);
PyObject *fp_handle_reload(fp_handle_steps *h, PyObject *ignored);
