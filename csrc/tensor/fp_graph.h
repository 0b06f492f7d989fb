/* tensor/fp_graph.h -- the hooks by which autograd calls a unit, and functions that describe the backward under way. Plain C,
 * under the rules of fp_torch.h.
 *
 * Hooks run in threads of autograd, which take the GIL for the callback. An exception of a callback ends the backward:
 * backward() raises it. If the unit is gone, its hooks raise RuntimeError; inputs_done and the callbacks of parameters are
 * not called then. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

/* The gradients of one flat parameter's views, some perhaps undefined; valid during a callback. */
typedef struct fp_gradients fp_gradients;
/* The callbacks of a unit. Each returns 0, or -1 with an exception. flat: the index of the flat parameter in the unit.
 *
 *   before_backward      autograd has the gradient of an output; began: the argument of fp_graph_hook. Also at the end of a
 *                        graph task (fp_graph_at_end), with began = 0
 *   gradients_ready      the node has the gradients of all views that the backward reaches; at least one is defined
 *   before_accumulation  autograd is about to add to .grad of a parameter a gradient that does not come from its view
 *   inputs_done          the backward has computed the gradients of the forward's inputs (fp_graph_hook_inputs)
 *   param_gradient       as before_accumulation, with the gradient of the i-th parameter alone. 1: the unit has taken it, and
 *                        autograd adds nothing; 0: autograd adds it */
typedef struct {
    int (*before_backward)(void *unit, uint64_t began);
    int (*gradients_ready)(void *unit, int flat, fp_gradients *gradients);
    int (*before_accumulation)(void *unit, int flat);
    int (*inputs_done)(void *unit, int64_t when);
    int (*param_gradient)(void *unit, int flat, Py_ssize_t i, fp_gradients *gradients);
} fp_unit_callbacks;

/* A weak reference to a unit. The nodes and hooks of graphs share it, and may outlive the unit. */
typedef struct fp_unit_ref fp_unit_ref;
/* unit: borrowed, passed to calls; name: for errors, copied; calls: copied. */
fp_unit_ref *fp_unit_ref_new(void *unit, const char *name, const fp_unit_callbacks *calls);
/* Called when the last reference to unit is dropped: if a graph has hooks that have not run yet, let the graph own a new
 * reference. */
void fp_unit_ref_keep(fp_unit_ref *ref, PyObject *unit);
/* The unit is gone, or another one has its modules: its hooks raise RuntimeError and do not call it. NULL is allowed. */
void fp_unit_ref_drop(fp_unit_ref *ref);

/* The present sequence number of this thread: nodes that are recorded later get a higher number, earlier ones have a lower
 * one. */
uint64_t fp_graph_now(void) FP_NOEXCEPT;
/* Call before_backward(unit, began) when a backward has the gradient of tensor, an output of the unit. 1: hooked; 0: tensor has
 * no history. */
int fp_graph_hook(PyObject *tensor, fp_unit_ref *ref, uint64_t began);
/* Call inputs_done(unit, when) once in each backward through tensors, a list of the inputs of a forward: when autograd has the
 * gradients of all of them that require grad and that the backward reaches. 1: hooked. 0: no hook can tell this: no input
 * requires grad, or one that does is a leaf or a view of a unit's parameter. */
int fp_graph_hook_inputs(PyObject *tensors, fp_unit_ref *ref, int64_t when);
/* Call the unit before autograd adds to .grad of one of params, the parameters of flat parameter number index: takes = 0:
 * before_accumulation; 1: param_gradient. Call it again with the same takes now and then, as torch drops such hooks when
 * the user registers one; a parameter is hooked once. */
int fp_graph_watch(PyObject *const *params, Py_ssize_t n, fp_unit_ref *ref, int index, int takes);
int fp_graph_has_hooks(PyObject *param); /* 1: a user has called register_hook() of it; 0; -1 */
/* The number of the user's thread for which this code runs. In a hook it is the thread that has called backward(), whichever
 * thread runs the node, and in nested backwards, too. */
uintptr_t fp_graph_caller(void) FP_NOEXCEPT;
/* Let later backwards of this thread run for the same user's thread as this code. */
int fp_graph_keep_caller(void);
/* The number of the graph task (one call of backward or grad) that runs in this thread; -1: none. */
int fp_graph_task(void) FP_NOEXCEPT;
/* Call before_backward(unit, 0) when the running graph task ends. */
int fp_graph_at_end(fp_unit_ref *ref);
/* 1: the graph task of the last fp_graph_at_end(ref) still runs, in any thread, and has not failed; 0. */
int fp_graph_is_running(const fp_unit_ref *ref) FP_NOEXCEPT;
int fp_graph_grad_enabled(void) FP_NOEXCEPT; /* 1: autograd records here: neither no_grad nor inference mode is on */
/* 1: the graph task that runs in this thread keeps its graph for a later one (retain_graph); 0. */
int fp_graph_is_retained(void) FP_NOEXCEPT;

/* Note the node that accumulates the gradient of tensor, if a graph has one. autograd makes another node when the dtype or
 * device of tensor changes, and older graphs keep the older node.
 * known: the result of the last call for this tensor, or None. Returns known, or a new capsule for None; NULL with an exception
 * if known is another object, or tensor is no tensor. The capsule keeps no node alive. */
PyObject *fp_graph_note_accumulator(PyObject *known, PyObject *tensor);
/* A new list of the noted nodes that live, in the order in which they were noted; empty for None. NULL with an exception if
 * known is another object. */
PyObject *fp_graph_accumulators(PyObject *known);

/* A range of time in profilers, "flatparam <what>: <name>", from here to fp_range_end() in the same thread. NULL: no profiler
 * runs, or the range failed; no exception is set. */
typedef struct fp_range fp_range;
fp_range *fp_range_begin(const char *what, PyObject *name) FP_NOEXCEPT; /* name: str */
void fp_range_end(fp_range *range);                                     /* NULL is allowed */

/* Hide this thread's operations from selective activation checkpoints until fp_show_checkpoints(*hidden) in this thread; see
 * fp_modes.hpp. 0: *hidden may be NULL, where there is no checkpoint; -1: nothing is hidden. */
typedef struct fp_hidden fp_hidden;
int fp_hide_checkpoints(fp_hidden **hidden) FP_NOEXCEPT;
void fp_show_checkpoints(fp_hidden *hidden) FP_NOEXCEPT; /* NULL is allowed */

FP_END_C
