/* runtime/fp_reduction.c -- the reductions of a backward: started unit by unit, each taken up when the next ones start. */
#include "runtime/fp_reduction.h"

int
fp_reduction_take(fp_unit *step, fp_flat_param *part)
{
    PyObject *grad = fp_flat_buffer_take(part->flat, part->master, fp_unit_collectives(step));
    int status = grad == NULL ? -1 : 0;
    if (status == 0 && grad != Py_None) {
        status = fp_flat_param_add_reduced(part, grad);
        if (status == 0 && step->reduced != NULL && step->reduced != Py_None) {
            PyObject *result = PyObject_CallFunction(step->reduced, "n", (Py_ssize_t)(part - step->parts));
            status = result == NULL ? -1 : 0;
            Py_XDECREF(result);
        }
    }
    Py_XDECREF(grad);
    return status;
}

/* Start the second half of a unit's reductions, or take what they have given. */
static int
advance(fp_unit *step)
{
    int status = 0;
    Py_XINCREF(step);
    for (Py_ssize_t k = 0; step != NULL && status == 0 && k < step->n_parts; k++) {
        fp_flat_param *part = &step->parts[k];
        const int done = fp_flat_buffer_advance(part->flat, part->master, fp_unit_collectives(step));
        status = done > 0 ? fp_reduction_take(step, part) : done;
    }
    Py_XDECREF(step);
    return status;
}

/* The same for the units whose reductions were started before this one's. */
static int
advance_previous(fp_unit *step)
{
    fp_root *run = step->run;
    if (run->reducing == NULL || run->reducing == step) {
        return 0;
    }
    return (run->halfway != step && advance(run->halfway) < 0) || advance(run->reducing) < 0 ? -1 : 0;
}

int
fp_reduction_start(fp_unit *step, fp_flat_param *part, const fp_gradients *gradients, int how_far)
{
    fp_root *run = step->run;
    part->deferred = 0;
    fp_flat_buffer_note_trained(part->flat, fp_flat_param_items(part->owners), PyTuple_GET_SIZE(part->owners));
    if (fp_reduction_take(step, part) < 0 || /* of another graph in this pass */
        (how_far == FP_REDUCE_OUTER &&
         (advance_previous(step) < 0 || advance(step) < 0)) || /* they go over the same group */
        fp_flat_buffer_reduce(part->flat, gradients, part->master, fp_unit_collectives(step), how_far) < 0 ||
        advance_previous(step) < 0) {
        return -1;
    }
    run->reductions++;
    if (run->reducing != step) {
        run->halfway = run->reducing;
        run->reducing = step;
    }
    return 0;
}
