/* python/fp_step.c -- the step of a sharded model. _C.Step is one unit: pre-forward, post-forward, pre-backward and
 * post-backward are one call each. _C.Run is what the units of a tree share: the pass that is under way, its order, and
 * what happens when a backward pass ends.
 *
 * Who calls what: Python calls pre_forward and post_forward around the module; post_forward puts a hook on the output,
 * which calls before_backward; autograd comes to the node behind a unit's views when all their gradients are there and
 * calls gradients_ready; the first before_backward of a pass has the engine call finish when the pass is over.
 *
 * A pass is one forward of the outermost unit and the backward that follows. What was gathered in a pass is good for that
 * pass only: the optimizer may have stepped since. */
#include "python/fp_step.h"

#include <stddef.h>
#include <structmember.h>

#include "bridge/fp_engine.h"
#include "core/fp_alloc.h"
#include "python/fp_attributes.h"
#include "python/fp_entries.h"

enum { PREFETCH_NONE = 0, PREFETCH_PRE = 1, PREFETCH_POST = 2 };

struct fp_step;

typedef struct {
    PyObject_HEAD
    PyObject *collectives;  /* does collectives in Python's way */
    PyObject *watched;      /* ((dict, name, function), ...): Python's way is taken once one of them was replaced */
    PyObject *find_tensors; /* finds the tensors in an output of any type */
    struct fp_step **steps; /* all units, borrowed: a unit that goes takes itself out; in the order they joined */
    Py_ssize_t n_steps;
    struct fp_step **order; /* units by the end of their forward in this pass, borrowed */
    Py_ssize_t n_order, room_order;
    struct fp_step *last_forward; /* borrowed */
    struct fp_step *reducing;     /* borrowed: the unit whose reduction was started last */
    fp_unit_ref *ref;
    int backward_prefetch, forward_prefetch;
    int synchronize;    /* 0: no_sync */
    int through_python; /* for this pass */
    int always_python;  /* a hook is set */
    int in_backward;    /* between the first before_backward and the end of that pass */
    Py_ssize_t depth;   /* units whose forward is under way */
    int64_t pass;
    int64_t gathers, reductions; /* how many there were: for tests and plans */
} fp_run;

/* One flat parameter of a unit. */
typedef struct {
    fp_attributes attributes; /* n parameters, then n_shared further names of them */
    Py_ssize_t n, n_shared;
    Py_ssize_t *primary;         /* n_shared: which parameter each further name stands for */
    fp_geometry *geometry;       /* of the parameters */
    fp_geometry *owner_geometry; /* of the owners */
    fp_group *shard_group, *replicate_group;
    fp_flat *flat;
    PyObject *master;         /* the flat Parameter that holds the shard */
    PyObject *params;         /* tuple of the original Parameters, or NULL: then the modules have views all the time */
    PyObject *views;          /* tuple, or NULL before the first gather */
    PyObject *owners;         /* tuple of what has .grad: params, or (master,) */
    int64_t *starts, *numels; /* of the owners, in the shard; numels -1: nothing here. One block */
    PyObject *saved;          /* the reduced gradient, put aside while the unsharded one is shown; or NULL */
    char *mask;               /* requires_grad of the owners when the views were made */
    int untracked;            /* no owner requires grad */
    int full;                 /* gathered, or being gathered */
    int shows_views;          /* the modules have views now */
    int shows_kept;           /* .grad of the owners are the unsharded gradient */
    int deferred;             /* gradients of this pass are kept though they are to be reduced */
    int64_t versions;         /* of the owners at the last gather */
} fp_part;

typedef struct fp_step {
    PyObject_HEAD
    fp_run *run;     /* owned, or NULL before the unit has joined one */
    PyObject *name;  /* str */
    PyObject *moved; /* called when parameters are not where they were put */
    PyObject *reason;
    fp_part *parts;
    Py_ssize_t n_parts;
    struct fp_step *next_forward; /* borrowed: whose forward came next the last time */
    fp_unit_ref *ref;
    int reshard_after_forward;
    int sharded;         /* some part is spread over ranks */
    Py_ssize_t depth;    /* forwards of this unit that are under way */
    int gathering;       /* gathers were started and not waited for */
    int full;            /* all parts are */
    Py_ssize_t pending;  /* forwards whose inputs' gradients are waited for, to free what is frozen */
    int keep;            /* what a no_sync backward left full is good until the next optimizer step */
    int awaits_backward; /* an output has a hook that has not run */
    int64_t full_pass;   /* pass of the gather */
    int64_t kept_steps;  /* optimizer steps when keep was set */
    int task;            /* graph task that came to this unit; -1: none */
    Py_ssize_t position; /* in the order of this pass; -1: none */
} fp_step;

static PyTypeObject *run_type;  /* borrowed from the module, which lives as long as the process */
static int64_t optimizer_steps; /* of any optimizer in this process, since the first unit was made */

/* ---- parts: gathering ---- */

static PyObject **
items_of(PyObject *tuple)
{
    return &PyTuple_GET_ITEM(tuple, 0);
}

static PyObject *
collectives_of(const fp_step *step)
{
    return step->run->through_python ? step->run->collectives : NULL;
}

static const char *
freed_reason(const fp_step *step)
{
    return step->reason == NULL ? NULL : PyUnicode_AsUTF8(step->reason);
}

static int
show(fp_part *part, int views, int use_orig_params)
{
    PyObject *values = Py_NewRef(views ? part->views : part->params); /* ours: what is replaced may run code */
    PyObject *const *items = &PyTuple_GET_ITEM(values, 0);
    const fp_place place = {.is_parameter = !views, .listed = use_orig_params, .unsafe = 0};
    int status = fp_attributes_put(&part->attributes, 0, items, part->n, place);
    for (Py_ssize_t k = 0; status == 0 && k < part->n_shared; k++) {
        status = fp_attributes_put(&part->attributes, part->n + k, &items[part->primary[k]], 1, place);
    }
    Py_DECREF(values);
    if (status == 0) {
        part->shows_views = views;
    }
    return status;
}

static int
show_views(fp_part *part)
{
    return part->shows_views ? 0 : show(part, 1, part->params != NULL);
}

static int
show_params(fp_part *part)
{
    return !part->shows_views || part->params == NULL ? 0 : show(part, 0, 1);
}

/* Make the views, if there are none that fit the shard's dtype and device and who requires grad. */
static int
make_views(fp_step *step, Py_ssize_t index)
{
    fp_part *part = &step->parts[index];
    const int made = fp_flat_prepare(part->flat, part->master);
    if (made < 0) {
        return -1;
    }
    int untracked = 1, same = made == 0 && part->views != NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part->owners); i++) {
        const int requires_grad = fp_engine_requires_grad(PyTuple_GET_ITEM(part->owners, i));
        untracked = untracked && !requires_grad;
        part->mask[i] = (char)requires_grad;
    }
    if (same && untracked == part->untracked) {
        return 0;
    }
    PyObject **made_views = fp_calloc((size_t)part->n, sizeof *made_views);
    if (made_views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *views = NULL;
    if (fp_flat_views(part->flat, step->ref, (int)index, untracked, made_views) == 0) {
        views = PyTuple_New(part->n);
        for (Py_ssize_t i = 0; i < part->n; i++) {
            if (views != NULL) {
                PyTuple_SET_ITEM(views, i, made_views[i]); /* steals it */
            }
            else {
                Py_DECREF(made_views[i]);
            }
        }
    }
    fp_free(made_views);
    if (views == NULL) {
        return -1;
    }
    part->untracked = untracked;
    Py_XSETREF(part->views, views);
    if (part->shows_views || part->params == NULL) {
        part->shows_views = 0;
        return show_views(part);
    }
    return 0;
}

/* 1 if a module has another object in place of an original parameter, -1 on failure. */
static int
was_registered_anew(fp_part *part)
{
    for (Py_ssize_t i = 0; !part->shows_views && i < part->n; i++) {
        PyObject *value;
        if (fp_attributes_get(&part->attributes, i, 1, NULL, &value) < 0) {
            return -1;
        }
        const int same = value == PyTuple_GET_ITEM(part->params, i);
        Py_XDECREF(value);
        if (!same) {
            return 1;
        }
    }
    return 0;
}

/* Parameters that were replaced, or whose data were, go back into the shard, by Python. */
static int
look_for_moved(fp_step *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_part *part = &step->parts[k];
        if (part->params == NULL) {
            continue;
        }
        int moved = fp_engine_moved(items_of(part->owners), PyTuple_GET_SIZE(part->owners), part->master, part->starts,
                                    part->numels, NULL);
        if (!moved) {
            moved = was_registered_anew(part);
        }
        if (moved < 0) {
            return -1;
        }
        if (moved) {
            PyObject *result = PyObject_CallNoArgs(step->moved);
            Py_XDECREF(result);
            return result == NULL ? -1 : 0;
        }
    }
    return 0;
}

static int
start_gather(fp_step *step)
{
    fp_run *run = step->run;
    if (!run->in_backward && look_for_moved(step) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_part *part = &step->parts[k];
        if (make_views(step, k) < 0) {
            return -1;
        }
        if (run->in_backward && part->full) {
            continue; /* only others were freed since */
        }
        const int64_t versions = fp_engine_versions(items_of(part->owners), PyTuple_GET_SIZE(part->owners)) +
                                 fp_engine_versions(&part->master, 1);
        if (fp_flat_gather(part->flat, part->master, items_of(part->views), collectives_of(step),
                           versions != part->versions) < 0) {
            return -1;
        }
        part->versions = versions;
        part->full = 1;
    }
    step->gathering = step->full = 1;
    step->keep = 0;
    step->full_pass = run->pass;
    run->gathers += step->sharded;
    return 0;
}

/* Whether what is gathered has the values of now. */
static int
is_fresh(const fp_step *step)
{
    return step->full && (step->run->in_backward || step->full_pass == step->run->pass ||
                          (step->keep && step->kept_steps == optimizer_steps));
}

static int
make_full(fp_step *step)
{
    if (!is_fresh(step) && start_gather(step) < 0) {
        return -1;
    }
    step->full_pass = step->run->pass;
    step->keep = 0;
    if (step->gathering) {
        step->gathering = 0;
        for (Py_ssize_t k = 0; k < step->n_parts; k++) {
            if (fp_flat_wait(step->parts[k].flat) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int
release_part(fp_step *step, fp_part *part)
{
    part->full = step->full = 0;
    return fp_flat_release(part->flat, freed_reason(step));
}

static int
release(fp_step *step)
{
    step->full = step->gathering = step->keep = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (release_part(step, &step->parts[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
is_partly_full(const fp_step *step)
{
    int full = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        full = full || step->parts[k].full;
    }
    return full;
}

static int
show_all_params(fp_step *step)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (show_params(&step->parts[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- the pass ---- */

/* Forget whatever a pass that was broken off has left. */
static int
recover(fp_run *run)
{
    run->in_backward = 0;
    run->depth = 0;
    run->n_order = 0;
    run->reducing = run->last_forward = NULL;
    for (Py_ssize_t s = 0; s < run->n_steps; s++) {
        fp_step *step = run->steps[s];
        step->depth = 0;
        step->task = -1;
        step->awaits_backward = 0;
        step->position = -1;
        step->pending = 0;
        for (Py_ssize_t k = 0; k < step->n_parts; k++) {
            fp_part *part = &step->parts[k];
            part->deferred = 0;
            fp_flat_forget(part->flat, !part->shows_kept);
        }
        if (release(step) < 0 || show_all_params(step) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
was_replaced(fp_run *run, int *replaced)
{
    *replaced = run->always_python;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(run->watched) && !*replaced; i++) {
        PyObject *entry = PyTuple_GET_ITEM(run->watched, i);
        PyObject *now = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
        if (now == NULL && PyErr_Occurred()) {
            return -1;
        }
        *replaced = now != PyTuple_GET_ITEM(entry, 2);
    }
    return 0;
}

static int
begin_pass(fp_run *run)
{
    if (run->in_backward && recover(run) < 0) {
        return -1;
    }
    run->pass++;
    for (Py_ssize_t i = 0; i < run->n_order; i++) {
        run->order[i]->position = -1;
    }
    run->n_order = 0;
    run->last_forward = NULL;
    return was_replaced(run, &run->through_python);
}

static int
append_order(fp_run *run, fp_step *step)
{
    if (run->n_order == run->room_order) {
        const Py_ssize_t room = run->room_order == 0 ? 64 : 2 * run->room_order;
        fp_step **order = fp_calloc((size_t)room, sizeof *order);
        if (order == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (Py_ssize_t i = 0; i < run->n_order; i++) {
            order[i] = run->order[i];
        }
        fp_free(run->order);
        run->order = order;
        run->room_order = room;
    }
    step->position = run->n_order;
    run->order[run->n_order++] = step;
    return 0;
}

/* Gather the unit that backward comes to next. */
static int
prefetch_backward(fp_step *step)
{
    fp_run *run = step->run;
    const Py_ssize_t next = step->position - 1;
    if (next < 0 || next >= run->n_order) {
        return 0;
    }
    fp_step *target = run->order[next];
    return target->full || !target->awaits_backward ? 0 : start_gather(target);
}

/* ---- forward ---- */

static int
check_joined(const fp_step *step)
{
    if (step->run == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%U is not part of a run yet: call the wrapped module, not its parts",
                     step->name);
        return -1;
    }
    return 0;
}

static PyObject *
step_pre_forward(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    fp_run *run = step->run;
    if (check_joined(step) < 0) {
        return NULL;
    }
    if (run->in_backward && fp_engine_task() < 0 && recover(run) < 0) { /* an exception ended that backward */
        return NULL;
    }
    if (run->depth == 0 && !run->in_backward && begin_pass(run) < 0) {
        return NULL;
    }
    run->depth++;
    step->depth++;
    if (make_full(step) < 0) {
        return NULL;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (show_views(&step->parts[k]) < 0) {
            return NULL;
        }
    }
    if (!run->in_backward && run->forward_prefetch) {
        if (run->last_forward != NULL) {
            run->last_forward->next_forward = step;
        }
        run->last_forward = step;
        fp_step *next = step->next_forward;
        if (next != NULL && !is_fresh(next) && start_gather(next) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* Put hooks on the tensors in an output that have a history; *found counts them. */
static int
hook_outputs(fp_step *step, PyObject *output, int *found)
{
    if (fp_engine_is_tensor(output)) {
        if (fp_engine_requires_grad(output)) {
            const int hooked = fp_engine_hook(output, step->ref);
            *found += hooked > 0;
            return hooked < 0 ? -1 : 0;
        }
        return 0;
    }
    if (output == Py_None || PyUnicode_CheckExact(output) || PyLong_Check(output) || PyFloat_CheckExact(output)) {
        return 0;
    }
    PyObject *tensors = NULL;
    if (PyTuple_CheckExact(output) || PyList_CheckExact(output)) {
        tensors = PySequence_Tuple(output); /* a copy of ours */
    }
    else if (PyDict_CheckExact(output)) {
        tensors = PyDict_Values(output);
        Py_XSETREF(tensors, tensors == NULL ? NULL : PyList_AsTuple(tensors));
    }
    else {
        tensors = PyObject_CallFunctionObjArgs(step->run->find_tensors, output, step->name, NULL);
        Py_XSETREF(tensors, tensors == NULL ? NULL : PySequence_Tuple(tensors));
    }
    int status = tensors == NULL || Py_EnterRecursiveCall(" while looking for tensors in an output") ? -1 : 0;
    if (status == 0) {
        for (Py_ssize_t i = 0; status == 0 && i < PyTuple_GET_SIZE(tensors); i++) {
            status = hook_outputs(step, PyTuple_GET_ITEM(tensors, i), found);
        }
        Py_LeaveRecursiveCall();
    }
    Py_XDECREF(tensors);
    return status;
}

static PyObject *
step_post_forward(PyObject *self, PyObject *output)
{
    fp_step *step = (fp_step *)self;
    fp_run *run = step->run;
    int hooked = 0;
    if (check_joined(step) < 0) {
        return NULL;
    }
    if (step->depth == 0) {
        PyErr_Format(PyExc_RuntimeError, "%U: post_forward without pre_forward", step->name);
        return NULL;
    }
    step->depth--;
    run->depth--;
    if (fp_engine_grad_enabled() && hook_outputs(step, output, &hooked) < 0) {
        return NULL;
    }
    if (run->in_backward) { /* recomputed: its backward comes at once */
        return Py_NewRef(output);
    }
    if (hooked) {
        step->awaits_backward = 1;
        if (append_order(run, step) < 0) {
            return NULL;
        }
    }
    if (step->depth > 0) {
        return Py_NewRef(output);
    }
    const int stays = hooked && (run->depth == 0 || !step->reshard_after_forward);
    if (!stays && release(step) < 0) {
        return NULL;
    }
    if ((!stays || step->reshard_after_forward || !step->sharded) && show_all_params(step) < 0) {
        return NULL;
    }
    return Py_NewRef(output);
}

/* A forward with inputs that require grad begins. True if inputs_done is to be called when they have it. */
static PyObject *
step_expect_inputs(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    if (step->run != NULL && step->run->in_backward && step->pending > 0) {
        Py_RETURN_FALSE; /* recomputed: the forward that it repeats has said so */
    }
    step->pending++;
    Py_RETURN_TRUE;
}

/* The gradients of a forward's inputs are there, so what is frozen is not needed for that forward any more. */
static PyObject *
step_inputs_done(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    step->pending -= step->pending > 0;
    if (step->pending > 0 || step->run == NULL || !step->run->in_backward || step->depth > 0 ||
        !(step->run->synchronize || step->reshard_after_forward)) {
        Py_RETURN_NONE;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_part *part = &step->parts[k];
        if (part->untracked && (release_part(step, part) < 0 || show_params(part) < 0)) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
step_abort_forward(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    fp_run *run = step->run;
    if (run != NULL && step->depth > 0) {
        step->depth--;
        run->depth--;
    }
    if (run != NULL && !run->in_backward && run->depth == 0 && recover(run) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- backward ---- */

static int
before_backward_of(fp_step *step)
{
    fp_run *run = step->run;
    const int task = fp_engine_task();
    if (!run->in_backward) {
        if (fp_engine_at_end(run->ref) < 0) {
            return -1;
        }
        run->in_backward = 1;
    }
    if (step->task == task && step->full) {
        return 0; /* a further output */
    }
    step->task = task;
    step->awaits_backward = 0;
    if (make_full(step) < 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (show_views(&step->parts[k]) < 0) { /* for a forward that is recomputed in parts */
            return -1;
        }
    }
    return run->backward_prefetch == PREFETCH_PRE ? prefetch_backward(step) : 0;
}

static int
before_backward(void *unit)
{
    fp_step *step = unit;
    Py_INCREF(step);
    const int status = step->run == NULL ? check_joined(step) : before_backward_of(step);
    Py_DECREF(step);
    return status;
}

/* What the user has done to the unsharded gradients that were shown counts: a cleared one starts again. */
static int
read_kept(fp_part *part)
{
    if (!part->shows_kept) {
        return 0;
    }
    part->shows_kept = 0;
    PyObject *kept = fp_flat_kept(part->flat);
    if (kept == NULL) {
        return -1;
    }
    const Py_ssize_t shown =
        fp_engine_check_kept(items_of(part->owners), PyTuple_GET_SIZE(part->owners), part->owner_geometry, kept);
    Py_DECREF(kept);
    if (shown == 0) {
        fp_flat_forget(part->flat, 1);
        Py_CLEAR(part->saved);
    }
    for (Py_ssize_t i = 0; shown >= 0 && i < PyTuple_GET_SIZE(part->owners); i++) {
        if (fp_engine_set_grad(PyTuple_GET_ITEM(part->owners, i), NULL) < 0) {
            return -1;
        }
    }
    return shown < 0 ? -1 : 0;
}

static int
take_reduced(fp_step *step, fp_part *part)
{
    PyObject *grad = fp_flat_take(part->flat, part->master, collectives_of(step));
    int status = grad == NULL ? -1 : 0;
    if (status == 0 && grad != Py_None) {
        if (part->saved != NULL) {
            status = fp_engine_add(grad, part->saved);
            Py_CLEAR(part->saved);
        }
        if (status == 0) {
            status = fp_engine_add_grads(items_of(part->owners), PyTuple_GET_SIZE(part->owners), part->owner_geometry,
                                         part->starts, part->numels, grad);
        }
    }
    Py_XDECREF(grad);
    return status;
}

static int
start_reduction(fp_step *step, fp_part *part, const fp_gradients *gradients)
{
    fp_run *run = step->run;
    part->deferred = 0;
    if (fp_flat_reduce(part->flat, gradients, part->master, collectives_of(step)) < 0) {
        return -1;
    }
    run->reductions++;
    fp_step *previous = run->reducing;
    run->reducing = step;
    for (Py_ssize_t k = 0; previous != NULL && previous != step && k < previous->n_parts; k++) {
        const int done = fp_flat_advance(previous->parts[k].flat, collectives_of(previous));
        if (done < 0 || (done && take_reduced(previous, &previous->parts[k]) < 0)) {
            return -1;
        }
    }
    return 0;
}

static int
gradients_ready_of(fp_step *step, fp_part *part, const fp_gradients *gradients)
{
    fp_run *run = step->run;
    /* Reentrant checkpoints run parts of the unit as graph tasks of their own: more gradients will come. */
    const int more = step->task >= 0 && step->task != fp_engine_task();
    const int reduce = run->synchronize && !more;
    if (!run->in_backward) { /* no output of the unit had a hook: who called backward went around it */
        if (fp_engine_at_end(run->ref) < 0) {
            return -1;
        }
        run->in_backward = 1;
    }
    if (read_kept(part) < 0) {
        return -1;
    }
    if (!more && (run->synchronize || step->reshard_after_forward)) {
        if (release_part(step, part) < 0 || show_params(part) < 0) {
            return -1;
        }
    }
    if (!more && run->backward_prefetch == PREFETCH_POST && prefetch_backward(step) < 0) {
        return -1;
    }
    if (!reduce) {
        part->deferred = run->synchronize;
        return fp_flat_keep(part->flat, gradients, part->master);
    }
    if (take_reduced(step, part) < 0) { /* of another graph in this pass */
        return -1;
    }
    return start_reduction(step, part, gradients);
}

static int
gradients_ready(void *unit, int index, const fp_gradients *gradients)
{
    fp_step *step = unit;
    Py_INCREF(step);
    const int status =
        step->run == NULL ? check_joined(step) : gradients_ready_of(step, &step->parts[index], gradients);
    Py_DECREF(step);
    return status;
}

/* Show the gradients that were kept in no_sync, and put a reduced one aside. */
static int
show_kept(fp_part *part)
{
    PyObject *kept = fp_flat_kept(part->flat);
    if (kept == NULL) {
        return -1;
    }
    int status = 0;
    if (part->saved == NULL) {
        PyObject *saved = fp_engine_collect(items_of(part->owners), PyTuple_GET_SIZE(part->owners), part->starts,
                                            part->numels, part->master);
        status = saved == NULL ? -1 : 0;
        if (saved == Py_None) {
            Py_CLEAR(saved);
        }
        part->saved = saved;
    }
    if (status == 0) {
        status =
            fp_engine_show_kept(items_of(part->owners), PyTuple_GET_SIZE(part->owners), part->owner_geometry, kept);
    }
    part->shows_kept = status == 0;
    Py_DECREF(kept);
    return status;
}

static int
finish_step(fp_step *step)
{
    fp_run *run = step->run;
    step->task = -1;
    step->awaits_backward = 0;
    step->position = -1;
    step->pending = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_part *part = &step->parts[k];
        if (part->deferred && start_reduction(step, part, NULL) < 0) {
            return -1;
        }
        if (take_reduced(step, part) < 0) {
            return -1;
        }
        if (!part->shows_kept && fp_flat_has_kept(part->flat) && show_kept(part) < 0) {
            return -1;
        }
    }
    if (step->full && !run->synchronize && !step->reshard_after_forward) {
        step->keep = 1;
        step->kept_steps = optimizer_steps;
    }
    else if (is_partly_full(step) && release(step) < 0) {
        return -1;
    }
    return show_all_params(step);
}

static int
finish(void *run_pointer)
{
    fp_run *run = run_pointer;
    int status = 0;
    Py_INCREF(run);
    for (Py_ssize_t s = 0; status == 0 && s < run->n_steps; s++) {
        fp_step *step = run->steps[s];
        Py_INCREF(step);
        status = finish_step(step);
        Py_DECREF(step);
    }
    run->n_order = 0;
    run->reducing = NULL;
    if (status == 0) {
        run->in_backward = 0;
    }
    Py_DECREF(run);
    return status;
}

static const fp_unit_calls step_calls = {.before_backward = before_backward, .gradients_ready = gradients_ready};
static const fp_unit_calls run_calls = {.before_backward = finish, .gradients_ready = NULL};

/* ---- the type Run ---- */

static PyObject *
run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"backward_prefetch", "forward_prefetch", "collectives", "watched", "find_tensors", NULL};
    PyObject *collectives, *watched, *find_tensors;
    int backward_prefetch, forward_prefetch;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ipOO!O:Run", keywords, &backward_prefetch, &forward_prefetch,
                                     &collectives, &PyTuple_Type, &watched, &find_tensors)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watched); i++) {
        PyObject *entry = PyTuple_GET_ITEM(watched, i);
        if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 3 || !PyDict_Check(PyTuple_GET_ITEM(entry, 0))) {
            PyErr_SetString(PyExc_TypeError, "expected watched to be tuples (dict, name, function)");
            return NULL;
        }
    }
    fp_run *run = (fp_run *)type->tp_alloc(type, 0);
    if (run == NULL) {
        return NULL;
    }
    run->collectives = Py_NewRef(collectives);
    run->watched = Py_NewRef(watched);
    run->find_tensors = Py_NewRef(find_tensors);
    run->backward_prefetch = backward_prefetch;
    run->forward_prefetch = forward_prefetch;
    run->synchronize = 1;
    run->ref = fp_unit_ref_new(run, "the model", &run_calls);
    if (run->ref == NULL) {
        Py_CLEAR(run);
    }
    return (PyObject *)run;
}

static int
run_traverse(PyObject *self, visitproc visit, void *arg)
{
    fp_run *run = (fp_run *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(run->collectives);
    Py_VISIT(run->watched);
    Py_VISIT(run->find_tensors);
    return 0;
}

static int
run_clear(PyObject *self)
{
    return 0; /* its members refer to functions and settings: cycles are broken at the units */
}

static void
run_dealloc(PyObject *self)
{
    fp_run *run = (fp_run *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fp_unit_ref_drop(run->ref);
    Py_CLEAR(run->collectives);
    Py_CLEAR(run->watched);
    Py_CLEAR(run->find_tensors);
    fp_free(run->steps);
    fp_free(run->order);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
run_recover(PyObject *self, PyObject *ignored)
{
    return recover((fp_run *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
run_state(PyObject *self, void *ignored)
{
    const fp_run *run = (fp_run *)self;
    const char *state = run->in_backward && fp_engine_task() >= 0 ? "BACKWARD"
                        : run->in_backward                        ? "INTERRUPTED"
                        : run->depth > 0                          ? "FORWARD"
                                                                  : "IDLE";
    return PyUnicode_FromString(state);
}

static PyMethodDef run_methods[] = {
    {"recover", run_recover, METH_NOARGS,
     "recover($self, /)\n--\n\nForget whatever a pass that was broken off has left; every unit is idle and sharded "
     "then."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef run_getset[] = {
    {"state", run_state, NULL, "IDLE, FORWARD, BACKWARD, or INTERRUPTED: an exception ended a backward pass.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef run_members[] = {
    {"synchronize", T_INT, offsetof(fp_run, synchronize), 0, "0: gradients are kept and not reduced."},
    {"always_python", T_INT, offsetof(fp_run, always_python), 0, "1: every collective goes through collectives."},
    {"gathers", T_LONGLONG, offsetof(fp_run, gathers), READONLY, "Gathers of sharded units so far."},
    {"reductions", T_LONGLONG, offsetof(fp_run, reductions), READONLY, "Reductions of gradients so far."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot run_slots[] = {
    {Py_tp_doc,
     "Run(backward_prefetch, forward_prefetch, collectives, watched, find_tensors)\n--\n\n"
     "What the units of one tree share: the pass that is under way and its order.\n\n"
     "backward_prefetch: 0 none, 1 before a unit's backward, 2 after it; watched: ((dict, name, function), ...):\n"
     "collectives go through the object collectives once one of them is another function."},
    {Py_tp_new, run_new},
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_traverse, run_traverse},
    {Py_tp_clear, run_clear},
    {Py_tp_methods, run_methods},
    {Py_tp_getset, run_getset},
    {Py_tp_members, run_members},
    {0, NULL},
};

static PyType_Spec run_spec = {
    .name = "flatparam._C.Run",
    .basicsize = sizeof(fp_run),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = run_slots,
};

PyObject *
fp_run_type_new(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &run_spec, NULL);
    run_type = (PyTypeObject *)type;
    return type;
}

/* ---- the type Step: construction ---- */

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
read_owners(fp_part *part, PyObject *pieces, int64_t numel, int64_t total)
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
    part->mask = fp_calloc((size_t)n, 1);
    part->starts = fp_calloc((size_t)n, 2 * sizeof *part->starts);
    if (part->mask == NULL || part->starts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    part->numels = part->starts + n;
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
check_tensors(const fp_part *part)
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

static int
read_part(fp_part *part, PyObject *tuple)
{
    PyObject *entries, *shared, *master, *params, *pieces, *shard_group, *replicate_group, *compute, *reduce;
    long long numel, shard_numel;
    int rank, shards, keep_reduce_dtype, stays_full;
    double predivide, postdivide;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "expected each part to be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "O!O!OOO!LLiiOOddOOpp", &PyTuple_Type, &entries, &PyTuple_Type, &shared, &master,
                          &params, &PyTuple_Type, &pieces, &numel, &shard_numel, &rank, &shards, &shard_group,
                          &replicate_group, &predivide, &postdivide, &compute, &reduce, &keep_reduce_dtype,
                          &stays_full)) {
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
        read_group(shard_group, &part->shard_group) < 0 || read_group(replicate_group, &part->replicate_group) < 0) {
        return -1;
    }
    const fp_flat_options options = {
        .geometry = part->geometry,
        .shard_numel = shard_numel,
        .rank = rank,
        .shards = shards,
        .shard_group = part->shard_group,
        .replicate_group = part->replicate_group,
        .predivide = predivide,
        .postdivide = postdivide,
        .compute_dtype = compute == Py_None ? NULL : compute,
        .reduce_dtype = reduce == Py_None ? NULL : reduce,
        .keep_reduce_dtype = keep_reduce_dtype,
        .stays_full = stays_full,
    };
    part->versions = -1;
    part->flat = fp_flat_new(&options);
    return part->flat == NULL ? -1 : 0;
}

static void
clear_part(fp_part *part)
{
    fp_attributes_clear(&part->attributes);
    Py_CLEAR(part->master);
    Py_CLEAR(part->params);
    Py_CLEAR(part->views);
    Py_CLEAR(part->owners);
    Py_CLEAR(part->saved);
}

static void
free_part(fp_part *part)
{
    clear_part(part);
    fp_attributes_free(&part->attributes);
    fp_flat_free(part->flat);
    fp_group_free(part->shard_group);
    fp_group_free(part->replicate_group);
    if (part->owner_geometry != part->geometry) {
        fp_torch_geometry_free(part->owner_geometry);
    }
    fp_torch_geometry_free(part->geometry);
    fp_free(part->primary);
    fp_free(part->starts);
    fp_free(part->mask);
}

static PyObject *
step_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"name", "parts", "reshard_after_forward", "moved", "reason", NULL};
    PyObject *name, *parts, *moved, *reason;
    int reshard_after_forward;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UO!pOU:Step", keywords, &name, &PyTuple_Type, &parts,
                                     &reshard_after_forward, &moved, &reason)) {
        return NULL;
    }
    fp_step *step = (fp_step *)type->tp_alloc(type, 0);
    if (step == NULL) {
        return NULL;
    }
    PyObject_GC_UnTrack(step); /* nobody finds it before it is complete */
    step->name = Py_NewRef(name);
    step->moved = Py_NewRef(moved);
    step->reason = Py_NewRef(reason);
    step->reshard_after_forward = reshard_after_forward;
    step->task = -1;
    step->position = -1;
    step->parts = fp_calloc((size_t)PyTuple_GET_SIZE(parts), sizeof *step->parts);
    if (step->parts == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    const char *text = PyUnicode_AsUTF8(name);
    step->ref = text == NULL ? NULL : fp_unit_ref_new(step, text, &step_calls);
    if (step->ref == NULL) {
        goto fail;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(parts); k++) {
        step->n_parts++;
        if (read_part(&step->parts[k], PyTuple_GET_ITEM(parts, k)) < 0) {
            goto fail;
        }
        step->sharded = step->sharded || step->parts[k].shard_group != NULL;
    }
    PyObject_GC_Track(step);
    return (PyObject *)step;
fail:
    Py_DECREF(step);
    return NULL;
}

static int
step_traverse(PyObject *self, visitproc visit, void *arg)
{
    fp_step *step = (fp_step *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(step->run);
    Py_VISIT(step->moved);
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_part *part = &step->parts[k];
        Py_VISIT(part->master);
        Py_VISIT(part->params);
        Py_VISIT(part->views);
        Py_VISIT(part->owners);
        Py_VISIT(part->saved);
        const int status = fp_attributes_traverse(&part->attributes, visit, arg);
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

/* Take the unit out of its run. */
static void
leave(fp_step *step)
{
    fp_run *run = step->run;
    if (run == NULL) {
        return;
    }
    Py_ssize_t kept = 0;
    for (Py_ssize_t s = 0; s < run->n_steps; s++) {
        if (run->steps[s] != step) {
            run->steps[kept] = run->steps[s];
            if (run->steps[kept]->next_forward == step) {
                run->steps[kept]->next_forward = NULL;
            }
            kept++;
        }
    }
    run->n_steps = kept;
    run->n_order = 0; /* who came before and after it is not known any more: nothing is prefetched in this pass */
    if (run->last_forward == step) {
        run->last_forward = NULL;
    }
    if (run->reducing == step) {
        run->reducing = NULL;
    }
    step->run = NULL;
    Py_DECREF(run);
}

static int
step_clear(PyObject *self)
{
    fp_step *step = (fp_step *)self;
    leave(step);
    Py_CLEAR(step->moved);
    return 0; /* parts stay usable for hooks until the end */
}

static void
step_dealloc(PyObject *self)
{
    fp_step *step = (fp_step *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fp_unit_ref_drop(step->ref);
    leave(step);
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        free_part(&step->parts[k]);
    }
    fp_free(step->parts);
    Py_CLEAR(step->name);
    Py_CLEAR(step->moved);
    Py_CLEAR(step->reason);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- the type Step: methods ---- */

static PyObject *
step_join(PyObject *self, PyObject *run_object)
{
    fp_step *step = (fp_step *)self;
    if (!PyObject_TypeCheck(run_object, run_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Run, got %.200s", Py_TYPE(run_object)->tp_name);
        return NULL;
    }
    fp_run *run = (fp_run *)run_object;
    if (step->run == run) {
        Py_RETURN_NONE;
    }
    if (step->depth > 0 || (step->run != NULL && step->run->in_backward)) {
        PyErr_Format(PyExc_RuntimeError, "%U cannot join another model in the middle of a pass", step->name);
        return NULL;
    }
    fp_step **steps = fp_calloc((size_t)run->n_steps + 1, sizeof *steps);
    if (steps == NULL) {
        return PyErr_NoMemory();
    }
    leave(step);
    for (Py_ssize_t s = 0; s < run->n_steps; s++) {
        steps[s] = run->steps[s];
    }
    steps[run->n_steps++] = step;
    fp_free(run->steps);
    run->steps = steps;
    step->run = (fp_run *)Py_NewRef(run);
    step->full_pass = -1;
    step->keep = 0;
    Py_RETURN_NONE;
}

static PyObject *
step_release(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    return release(step) < 0 || show_all_params(step) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
step_make_views(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        if (make_views(step, k) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* put(views): let the modules have the views, or the original parameters, whatever they have now. */
static PyObject *
step_put(PyObject *self, PyObject *argument)
{
    fp_step *step = (fp_step *)self;
    int views;
    if (fp_as_bool(argument, &views) < 0) {
        return NULL;
    }
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_part *part = &step->parts[k];
        if ((views ? part->views : part->params) != NULL && show(part, views, part->params != NULL) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
step_average_elsewhere(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_average_elsewhere(step->parts[k].flat);
    }
    Py_RETURN_NONE;
}

static PyObject *
step_invalidate(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    step->keep = 0;
    step->full_pass = -1;
    Py_RETURN_NONE;
}

static PyObject *
step_has_frozen(PyObject *self, void *ignored)
{
    const fp_step *step = (fp_step *)self;
    int frozen = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        frozen = frozen || step->parts[k].untracked;
    }
    return PyBool_FromLong(frozen);
}

static PyObject *
step_is_partly_full(PyObject *self, void *ignored)
{
    const fp_step *step = (fp_step *)self;
    int full = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        full = full || fp_flat_is_allocated(step->parts[k].flat);
    }
    return PyBool_FromLong(full);
}

static PyObject *
step_shows_views(PyObject *self, void *ignored)
{
    const fp_step *step = (fp_step *)self;
    return PyBool_FromLong(step->n_parts > 0 && step->parts[0].shows_views);
}

static PyObject *
step_views(PyObject *self, PyObject *ignored)
{
    const fp_step *step = (fp_step *)self;
    PyObject *list = PyList_New(step->n_parts);
    for (Py_ssize_t k = 0; list != NULL && k < step->n_parts; k++) {
        PyObject *views = step->parts[k].views;
        PyList_SET_ITEM(list, k, Py_NewRef(views == NULL ? Py_None : views));
    }
    return list;
}

static PyObject *
step_read_kept(PyObject *self, PyObject *ignored)
{
    fp_step *step = (fp_step *)self;
    PyObject *list = PyList_New(step->n_parts);
    for (Py_ssize_t k = 0; list != NULL && k < step->n_parts; k++) {
        PyObject *kept = fp_flat_kept(step->parts[k].flat);
        if (kept == NULL) {
            Py_CLEAR(list);
        }
        else {
            PyList_SET_ITEM(list, k, kept);
        }
    }
    return list;
}

static PyObject *
step_is_full(PyObject *self, void *ignored)
{
    const fp_step *step = (fp_step *)self;
    int full = step->n_parts > 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        full = full && fp_flat_is_allocated(step->parts[k].flat);
    }
    return PyBool_FromLong(full);
}

static PyMethodDef step_methods[] = {
    {"join", step_join, METH_O, "join($self, run, /)\n--\n\nBecome a unit of the tree that run is of."},
    {"pre_forward", step_pre_forward, METH_NOARGS,
     "pre_forward($self, /)\n--\n\nGather, and let the modules have the views. The outermost unit begins a pass."},
    {"post_forward", step_post_forward, METH_O,
     "post_forward($self, output, /)\n--\n\nPut hooks on the tensors in output, free what is not kept; returns "
     "output."},
    {"abort_forward", step_abort_forward, METH_NOARGS,
     "abort_forward($self, /)\n--\n\nInstead of post_forward, or after it, when there was an exception."},
    {"expect_inputs", step_expect_inputs, METH_NOARGS,
     "expect_inputs($self, /)\n--\n\nA forward whose inputs require grad begins; whether to call inputs_done for it."},
    {"inputs_done", step_inputs_done, METH_NOARGS,
     "inputs_done($self, /)\n--\n\nThe gradients of its inputs are there: free what is frozen."},
    {"release", step_release, METH_NOARGS,
     "release($self, /)\n--\n\nFree the unsharded data; the modules have their parameters again."},
    {"make_views", step_make_views, METH_NOARGS,
     "make_views($self, /)\n--\n\nMake the views for the shard's dtype and device; with no original parameters, let "
     "the "
     "modules have them."},
    {"put", step_put, METH_O,
     "put($self, views, /)\n--\n\nLet the modules have the views, or the original parameters, whatever they have now."},
    {"invalidate", step_invalidate, METH_NOARGS,
     "invalidate($self, /)\n--\n\nThe shard was written: what is gathered is out of date."},
    {"average_elsewhere", step_average_elsewhere, METH_NOARGS,
     "average_elsewhere($self, /)\n--\n\nFrom now on gradients are summed over ranks, not averaged: a hook does that."},
    {"views", step_views, METH_NOARGS, "views($self, /)\n--\n\nThe views of each part, None before there are any."},
    {"kept", step_read_kept, METH_NOARGS,
     "kept($self, /)\n--\n\nThe unsharded gradient that no_sync has kept for each part, or None."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef step_getset[] = {
    {"is_full", step_is_full, NULL, "Whether the unsharded data have memory.", NULL},
    {"is_partly_full", step_is_partly_full, NULL, "Whether some of the unsharded data have memory.", NULL},
    {"has_frozen", step_has_frozen, NULL, "Whether some part has no parameter that requires grad.", NULL},
    {"shows_views", step_shows_views, NULL, "Whether the modules have the views now.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef step_members[] = {
    {"run", T_OBJECT, offsetof(fp_step, run), READONLY, "The Run it has joined, or None."},
    {"name", T_OBJECT, offsetof(fp_step, name), 0, "What messages call the unit."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot step_slots[] = {
    {Py_tp_doc,
     "Step(name, parts, reshard_after_forward, moved, reason)\n--\n\n"
     "One unit: its flat parameters, and what happens to them in a forward and a backward.\n\n"
     "parts: a tuple for each flat parameter (see fp_step.c, read_part); moved: called when a parameter's data\n"
     "is not where it was put; reason: what is said when freed data is used."},
    {Py_tp_new, step_new},
    {Py_tp_dealloc, step_dealloc},
    {Py_tp_traverse, step_traverse},
    {Py_tp_clear, step_clear},
    {Py_tp_methods, step_methods},
    {Py_tp_getset, step_getset},
    {Py_tp_members, step_members},
    {0, NULL},
};

static PyType_Spec step_spec = {
    .name = "flatparam._C.Step",
    .basicsize = sizeof(fp_step),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = step_slots,
};

PyObject *
fp_step_type_new(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &step_spec, NULL);
}

/* ---- functions of the module ---- */

static PyObject *
note_optimizer_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    optimizer_steps++;
    Py_RETURN_NONE;
}

static PyObject *
set_grad(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (fp_check_nargs("set_grad", nargs, 2) < 0 || fp_engine_set_grad(args[0], args[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef fp_step_methods_of_module[] = {
    {"set_grad", FP_FASTCALL(set_grad), METH_FASTCALL,
     "set_grad($module, tensor, grad, /)\n--\n\ntensor.grad = grad, also of another shape or dtype than torch allows."},
    {"note_optimizer_step", FP_FASTCALL(note_optimizer_step), METH_FASTCALL,
     "note_optimizer_step($module, *ignored)\n--\n\nWhat a no_sync backward left full is out of date now."},
    {NULL, NULL, 0, NULL},
};
