/* tensor/fp_graph.h -- what autograd calls of a unit, and what may be asked of the backward that runs. Plain C, under the
 * rules of fp_torch.h. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

/* What runs when autograd comes to a unit. All are called with the GIL held and give 0, or -1 with an exception. began:
 * what fp_graph_hook was given. */
typedef struct fp_gradients fp_gradients; /* those of the views of one flat, during the call */
typedef struct {
    int (*before_backward)(void *unit, uint64_t began);
    int (*gradients_ready)(void *unit, int flat, fp_gradients *gradients);
    int (*before_accumulation)(void *unit, int flat); /* see fp_graph_watch */
    int (*inputs_done)(void *unit, int64_t when);     /* see fp_graph_hook_inputs */
    /* 1: the unit has taken that of the i-th parameter, the only one of gradients; 0: autograd adds it to .grad. */
    int (*param_gradient)(void *unit, int flat, Py_ssize_t i, fp_gradients *gradients);
} fp_unit_callbacks;

/* A weak reference to a unit that nodes and hooks of a graph hold: they may outlive it. Counted. */
typedef struct fp_unit_ref fp_unit_ref;
fp_unit_ref *fp_unit_ref_new(void *unit, const char *name, const fp_unit_callbacks *calls);
/* Nobody else holds unit any more: a graph that waits for its backward keeps it now, with a new reference. */
void fp_unit_ref_keep(fp_unit_ref *ref, PyObject *unit);
void fp_unit_ref_drop(fp_unit_ref *ref); /* the unit is gone; NULL is allowed */

/* A moment of this thread: what is recorded for a backward later has a higher number, what was before a lower one. */
uint64_t fp_graph_now(void) FP_NOEXCEPT;
/* Call ref's unit's before_backward, with began, when the first gradient of tensor is there. 1: done; 0: tensor has no
 * history. */
int fp_graph_hook(PyObject *tensor, fp_unit_ref *ref, uint64_t began);
/* In each backward through tensors, a list, call ref's unit's inputs_done(when) once it has the gradients of those that require
 * grad and that it comes to. 1: done; 0: none requires grad, or one was computed by nothing, or is a view of a unit's
 * parameter: of these nothing can be told. */
int fp_graph_hook_inputs(PyObject *tensors, fp_unit_ref *ref, int64_t when);
/* From now on call ref's unit before autograd adds to .grad of one of the params, those of flat index; takes: and let it
 * take the gradient. It may be called again, with the same takes: torch drops such hooks when the user registers one. */
int fp_graph_watch(PyObject *const *params, Py_ssize_t n, fp_unit_ref *ref, int index, int takes);
int fp_graph_has_hooks(PyObject *param); /* of users, by register_hook() */
/* The user's thread that this code runs for, as a number. A backward runs for the thread that has called it, in whichever
 * threads its nodes run and whatever backwards these call. */
uintptr_t fp_graph_caller(void) FP_NOEXCEPT;
/* Let backwards that are called in this thread from here on run for the same user's thread as this code. */
int fp_graph_keep_caller(void);
/* The graph task that runs in this thread, -1: none. */
int fp_graph_task(void) FP_NOEXCEPT;
/* Call ref's unit's before_backward when the running graph task ends. */
int fp_graph_at_end(fp_unit_ref *ref);
/* Whether the graph task of the last fp_graph_at_end(ref) is under way, in whichever thread. */
int fp_graph_is_running(const fp_unit_ref *ref) FP_NOEXCEPT;
int fp_graph_grad_enabled(void) FP_NOEXCEPT;
/* Whether the graph task that runs in this thread keeps its graph for another one (retain_graph). */
int fp_graph_is_retained(void) FP_NOEXCEPT;

/* Note the node that accumulates the gradient of tensor now, if graphs have one. known: a new reference to what the last call
 * for this tensor gave, or None, is returned; NULL with an exception if it is something else, or tensor is none. It keeps no
 * node alive. */
PyObject *fp_graph_note_accumulator(PyObject *known, PyObject *tensor);
/* A list of those noted nodes that live, the first noted first. NULL with an exception if known is not of the former, or None. */
PyObject *fp_graph_accumulators(PyObject *known);

/* A range of time for profilers, from here to fp_range_end in the same thread; NULL when nobody measures. */
typedef struct fp_range fp_range;
fp_range *fp_range_begin(const char *what, PyObject *name) FP_NOEXCEPT; /* name: str */
void fp_range_end(fp_range *range);                                     /* NULL is allowed */

/* See fp_modes.hpp, for C: 0, and *hidden for fp_show_checkpoints in the same thread, NULL if there were none; or -1. */
typedef struct fp_hidden fp_hidden;
int fp_hide_checkpoints(fp_hidden **hidden) FP_NOEXCEPT;
void fp_show_checkpoints(fp_hidden *hidden) FP_NOEXCEPT; /* NULL is allowed */

FP_END_C
