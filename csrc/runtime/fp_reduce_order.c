/* runtime/fp_reduce_order.c -- see fp_reduce_order.h. */
#include "runtime/fp_reduce_order.h"

#include "core/fp_alloc.h"
#include "runtime/fp_consensus.h"
#include "runtime/fp_reduction.h"
#include "runtime/fp_unshard.h"

enum { AHEAD = 2 }; /* units: the one whose gradient is computed, and the next */

/* Whether all ranks that share what the unit gathers from have run it in the pass that this backward is of. */
static int
took_part(const fp_unit *step)
{
    return step->position >= 0 && step->entered_pass == step->run->pass;
}

static int
is_coming(const fp_unit *step)
{
    int coming = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        const fp_flat_param *part = &step->parts[k];
        coming = coming || (part->coming && !part->packed && !part->passed);
    }
    return coming;
}

/* ---- the line ---- */

int
fp_reduce_order_join(fp_root *run, fp_unit *step)
{
    fp_unit **line = fp_calloc((size_t)run->n_steps + 1, sizeof *line);
    if (line == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < run->n_steps; i++) {
        line[i] = run->line[i];
    }
    line[run->n_steps] = step;
    fp_free(run->line);
    run->line = line;
    return 0;
}

void
fp_reduce_order_leave(fp_root *run, const fp_unit *step)
{
    Py_ssize_t kept = 0, at = run->line_at;
    for (Py_ssize_t i = 0; i < run->n_steps; i++) {
        if (run->line[i] != step) {
            run->line[kept++] = run->line[i];
        }
        else if (i < run->line_at) {
            at--;
        }
    }
    run->line_at = at;
}

/* Units that this pass has run take each other's places, so that they come in the reverse order of their entries; what it
 * has not run stays where it is. Insertion: nothing moves but where the order has changed. */
static void
learn(fp_root *run)
{
    for (Py_ssize_t i = 1; i < run->n_steps; i++) {
        fp_unit *step = run->line[i];
        Py_ssize_t at = i;
        for (Py_ssize_t j = i - 1; took_part(step) && j >= 0; j--) {
            fp_unit *other = run->line[j];
            if (took_part(other)) {
                if (other->entry > step->entry) {
                    break;
                }
                run->line[at] = other;
                at = j;
            }
        }
        run->line[at] = step;
    }
}

/* ---- a backward ---- */

void
fp_reduce_order_forget(fp_root *run)
{
    fp_consensus_drop(run);
    run->line_at = run->n_steps;
    run->cursor = 0;
    for (Py_ssize_t s = 0; s < run->n_steps; s++) {
        for (Py_ssize_t k = 0; k < run->steps[s]->n_parts; k++) {
            fp_flat_param *part = &run->steps[s]->parts[k];
            part->coming = part->wanted = part->wanted_kept = part->packed = part->passed = 0;
        }
    }
}

/* What the user has done to gradients of micro-batches before counts from here on. *shown: some were nested. */
static int
read_kept(fp_root *run, fp_unit *step, int tells, int *shown)
{
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        *shown = *shown || (part->refresh_group != NULL && fp_flat_buffer_has_kept(part->flat));
        if (fp_flat_param_read_kept(part, PyUnicode_AsUTF8(step->name)) < 0) {
            if (!tells) {
                return -1;
            }
            fp_consensus_note_error(run, step);
        }
        part->coming = !part->untracked && fp_flat_buffer_is_reached(part->flat);
    }
    return 0;
}

int
fp_reduce_order_begin(fp_root *run)
{
    int nested = 0, shown = 0;
    fp_reduce_order_forget(run);
    if (!run->copies) {
        return 0;
    }
    run->line_at = 0;
    run->cursor = run->n_order;
    learn(run);
    PyObject *units = fp_root_units(run);
    int status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *step = (fp_unit *)PyTuple_GET_ITEM(units, s);
        if (step->run == run && step->copied) {
            const int in_steps = step->parts[0].refresh_group != NULL;
            nested = nested || in_steps;
            status = read_kept(run, step, run->synchronize || in_steps, &shown);
        }
    }
    Py_XDECREF(units);
    if (status < 0) {
        return -1;
    }
    if ((run->synchronize || nested) && fp_consensus_on_gradients(run) < 0) {
        return -1;
    }
    return shown ? fp_consensus_read(run) : 0; /* before anything is added to what was cleared elsewhere */
}

/* How far a part's gradient is reduced now that its turn has come; 0: not at all; -1. */
static int
how_far(fp_root *run, const fp_flat_param *part, int took)
{
    const int nested = part->refresh_group != NULL;
    const int has = part->packed || part->deferred;
    if (!run->synchronize && !nested) {
        return 0;
    }
    if (has || (!nested && fp_flat_buffer_has_kept(part->flat))) {
        return nested && !run->synchronize ? FP_REDUCE_INNER : FP_REDUCE_ALL;
    }
    if (fp_consensus_read(run) < 0) {
        return -1;
    }
    if (!nested) {
        return part->wanted || part->wanted_kept ? FP_REDUCE_ALL : 0;
    }
    return (took && part->wanted ? FP_REDUCE_INNER : 0) |
           (run->synchronize && (part->wanted || part->wanted_kept) ? FP_REDUCE_OUTER : 0);
}

static int
pass_part(fp_unit *step, fp_flat_param *part, int took)
{
    fp_root *run = step->run;
    const int far = how_far(run, part, took);
    part->passed = 1;
    part->packed = 0;
    if (far < 0 || (far > 0 && fp_reduction_start(step, part, NULL, far) < 0)) {
        return -1;
    }
    if (took && !part->untracked && part->full && (run->synchronize || step->reshard_after_forward)) {
        if ((run->synchronize && part->param_group != NULL && fp_flat_buffer_forget_whole(part->flat) < 0) ||
            fp_unshard_release_part(step, part) < 0 || fp_flat_param_show_params(part) < 0) {
            return -1;
        }
    }
    return fp_flat_buffer_leave_there(part->flat);
}

int
fp_reduce_order_flush(fp_root *run, Py_ssize_t cursor)
{
    while (run->line_at < run->n_steps) {
        fp_unit *step = run->line[run->line_at];
        const int took = took_part(step);
        const int comes = cursor >= 0 && is_coming(step);
        if (step->copied && took && (step->entered <= cursor || comes)) {
            return 0;
        }
        run->line_at++;
        int status = 0;
        Py_INCREF(step);
        for (Py_ssize_t k = 0; status == 0 && step->copied && k < step->n_parts; k++) {
            fp_flat_param *part = &step->parts[k];
            if (!part->passed && (took || !comes)) { /* else it is reduced when its gradient comes */
                status = pass_part(step, part, took);
            }
        }
        Py_DECREF(step);
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

int
fp_reduce_order_bring_back(fp_root *run)
{
    int ahead = 0;
    for (Py_ssize_t i = run->line_at; ahead < AHEAD && i < run->n_steps; i++) {
        fp_unit *step = run->line[i];
        if (!step->copied || !is_coming(step)) {
            continue;
        }
        ahead++;
        for (Py_ssize_t k = 0; k < step->n_parts; k++) {
            if (step->parts[k].coming && !step->parts[k].packed && fp_flat_buffer_bring_back(step->parts[k].flat) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Do what backward does when it comes to the units before position, which it has passed over. */
static int
advance(fp_root *run, Py_ssize_t position)
{
    while (run->cursor > position) {
        const Py_ssize_t cursor = --run->cursor;
        if (fp_reduce_order_flush(run, cursor) < 0) {
            return -1;
        }
        if (cursor == position || cursor < 0) {
            continue;
        }
        fp_unit *step = run->order[cursor];
        if (step != NULL && step->copied && !step->full && step->awaits_backward && fp_unshard_start(step) < 0) {
            return -1;
        }
        fp_unit *next = cursor > 0 ? run->order[cursor - 1] : NULL;
        if (run->backward_prefetch != FP_PREFETCH_NONE && next != NULL && fp_unshard_prefetch(next) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fp_reduce_order_reach(fp_unit *step)
{
    fp_root *run = step->run;
    if (!run->copies || step->position < 0) {
        return 0;
    }
    if (step->position < run->cursor) {
        return advance(run, step->position);
    }
    int passed = step->copied;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        passed = passed && step->parts[k].passed && !step->parts[k].untracked;
    }
    return passed;
}

int
fp_reduce_order_has(const fp_unit *step, const fp_flat_param *part)
{
    return step->copied && !part->passed && took_part(step);
}

int
fp_reduce_order_end(fp_root *run)
{
    if (!run->copies) {
        return 0;
    }
    return advance(run, -1) < 0 || fp_reduce_order_flush(run, -1) < 0 ? -1 : fp_consensus_end(run);
}
