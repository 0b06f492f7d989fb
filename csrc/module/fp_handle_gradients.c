/* module/fp_handle_gradients.c -- see fp_handle.h. */
#include "module/fp_handle.h"
#include "tensor/fp_gradients.h"
#include "tensor/fp_graph.h"

int
fp_handle_versions(fp_handle_steps *h, fp_versions *found)
{
    int plain = 0;
    *found = (fp_versions){0};
    if (h->padded != NULL) { /* no Python code runs in these */
        PyObject *const masters[] = {h->flat_param, h->shard};
        plain = fp_torch_versions(PySequence_Fast_ITEMS(h->params), PyList_GET_SIZE(h->params), 1, found);
        found->values += fp_param_versions(masters, NULL, 2);
    }
    if (plain == 0) {
        long long values, grads, grad_values;
        PyObject *sums = fp_handle_by_ops(h, "_versions", NULL);
        plain = sums != NULL && PyArg_ParseTuple(sums, "LLL", &values, &grads, &grad_values) ? 1 : -1;
        if (plain > 0) {
            *found = (fp_versions){.values = values, .grads = grads, .grad_values = grad_values};
        }
        Py_XDECREF(sums);
    }
    return plain < 0 ? -1 : 0;
}

PyObject *
fp_handle_note_shown(fp_handle_steps *h, PyObject *ignored)
{
    h->is_shown = 1;
    return fp_none_unless(fp_handle_versions(h, &h->shown));
}

int
fp_handle_is_as_shown(fp_handle_steps *h)
{
    fp_versions now;
    return fp_handle_versions(h, &now) < 0 ? -1
                                           : now.grads == h->shown.grads && now.grad_values == h->shown.grad_values;
}

int
fp_handle_allocate(fp_handle_steps *h, PyObject *tensor)
{
    const int status = fp_torch_allocate(tensor, h->numel);
    return status != 2 ? status : fp_handle_run(h, "_allocate_by_ops", tensor) < 0 ? -1 : 1;
}

int
fp_handle_free(fp_handle_steps *h, PyObject *tensor, const char *by_method)
{
    int status = 0;
    if (h->is_on_host && h->message != NULL) {
        status = fp_torch_free(tensor, PyUnicode_AsUTF8(h->message), 0);
    }
    return status == 0 ? fp_handle_run(h, by_method, tensor) : status < 0 ? -1 : 0;
}

int
fp_handle_check_device(fp_handle_steps *h)
{
    const int on_host =
        h->is_on_host ? fp_handle_truth(PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_IS_CPU])) : 0;
    return on_host != 0 ? (on_host < 0 ? -1 : 0) : fp_handle_run(h, "_check_on_compute_device", h->flat_param);
}

int
fp_handle_clear_grads(PyObject *params)
{
    PyObject *items = PySequence_Tuple(params); /* a copy of ours: what is released may change a list */
    const int plain = items == NULL ? -1 : fp_torch_clear_grads(fp_items(items), PyTuple_GET_SIZE(items));
    Py_XDECREF(items);
    return plain;
}

PyObject *
fp_handle_stop_showing(fp_handle_steps *h, PyObject *ignored)
{
    if (!h->is_shown) {
        Py_RETURN_FALSE;
    }
    int done = fp_handle_is_usual(h) ? fp_handle_is_as_shown(h) : 0;
    done = done > 0 ? fp_handle_clear_grads(h->params) : done;
    if (done <= 0) {
        return done < 0 ? NULL : fp_handle_by_ops(h, "_stop_showing_by_ops", NULL);
    }
    h->is_shown = 0;
    return fp_gradients_set(h->flat_param, Py_None) < 0 ? NULL : Py_NewRef(Py_True);
}

/* Let what the modules have now have its parts of grad as .grad. */
static int
set_unsharded_grads(fp_handle_steps *h, PyObject *grad)
{
    PyObject *done = NULL;
    if (fp_handle_is_usual(h) && fp_torch_all_plain(&grad, 1)) {
        done = fp_module_params_set_grads(h->unit, grad);
        if (done == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear(); /* a parameter is missing or no plain tensor: say which, or take it */
    }
    done = done == NULL ? PyObject_CallMethod(h->flat, "_set_unsharded_grads", "(O)", grad) : done;
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Show the user what he has: what micro-batches have added up, or else what was reduced before. */
static int
show(fp_handle_steps *h)
{
    int status = h->sum_code == SUM_ON_DEVICE && fp_is_set(h->total) && fp_handle_is_usual(h) && !h->is_shown &&
                 h->state_code == IDLE && !h->is_unsharded;
    status = status ? fp_torch_same_storage(h->sum, h->total) : 0;
    status = status > 0 ? fp_handle_clear_grads(h->params) : status;
    if (status <= 0) {
        return status < 0 ? -1 : fp_handle_run(h, "_show", NULL);
    }
    return fp_gradients_set(h->flat_param, h->total) < 0 || set_unsharded_grads(h, h->total) < 0 ||
                   fp_handle_truth(fp_handle_note_shown(h, NULL)) < 0
               ? -1
               : 0;
}

/* grad = zeros, for the backward that comes to add to. */
static int
begin_gradient(fp_handle_steps *h)
{
    PyObject *earlier = fp_handle_truth(fp_handle_stop_showing(h, NULL)) < 0
                            ? NULL
                            : PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_GRAD]);
    int status = earlier == NULL ? -1 : 0;
    if (status == 0 && earlier != Py_None && !h->in_backward) {
        status = fp_handle_run(h, "_set_aside", NULL);
    }
    Py_XDECREF(earlier);
    PyObject *zeros =
        status < 0 || fp_handle_allocate(h, h->grad) < 0 ? NULL : PyObject_CallMethod(h->grad, "zero_", NULL);
    Py_XDECREF(zeros);
    if (zeros == NULL) {
        return -1;
    }
    h->prepared = fp_param_versions(&h->grad, NULL, 1);
    h->in_backward = 1;
    return 0;
}

PyObject *
fp_handle_prepare_gradient(fp_handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL || !h->is_unsharded || (h->state_code != BACKWARD_PRE && h->state_code != IDLE)) {
        return fp_handle_by_ops(h, "_refuse_to_prepare", NULL);
    }
    if (!fp_param_requires_grad(h->flat_param)) {
        Py_RETURN_NONE;
    }
    if (fp_handle_check_device(h) < 0 || (h->prepared < 0 && begin_gradient(h) < 0)) {
        return NULL;
    }
    PyObject *shown = PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_GRAD]);
    int status = shown == NULL      ? -1
                 : shown == Py_None ? PyObject_SetAttr(h->flat_param, fp_handle_names[FP_NAME_GRAD], h->grad)
                                    : 0;
    Py_XDECREF(shown);
    if (status == 0 && h->state_code == BACKWARD_PRE) {
        status = set_unsharded_grads(h, h->grad);
    }
    return fp_none_unless(status);
}

/* Whether what a backward has left is the one buffer, to be added to a sum on this host; -1 on failure. */
static int
is_in_buffer(fp_handle_steps *h)
{
    if (h->padded == NULL || h->state_code != BACKWARD_POST || !h->is_on_host || h->sum_code == SUM_ON_HOST ||
        h->prepared < 0 || !h->in_backward) {
        return 0;
    }
    PyObject *pair[] = {PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_GRAD]), h->grad};
    int same = pair[0] == NULL ? -1 : 0;
    if (same == 0 && fp_torch_all_plain(pair, 2) && !fp_param_requires_grad(h->grad)) {
        same = fp_torch_same_storage(pair[0], pair[1]);
    }
    Py_XDECREF(pair[0]);
    return same;
}

PyObject *
fp_handle_accumulate(fp_handle_steps *h, PyObject *ignored)
{
    const int in_buffer = is_in_buffer(h), is_first = h->sum_code == SUM_NONE;
    if (in_buffer <= 0) {
        return in_buffer < 0 ? NULL : fp_handle_by_ops(h, "_accumulate_by_ops", NULL);
    }
    if (fp_gradients_set(h->flat_param, Py_None) < 0 ||
        (fp_handle_has_views(h) && fp_handle_clear_grads(h->tensors) < 0)) {
        return NULL;
    }
    h->prepared = -1;
    if ((is_first && fp_handle_run(h, "_allocate_sum", NULL) < 0) || fp_torch_convert(h->sum, h->grad, !is_first) < 0) {
        return NULL;
    }
    h->sum_code = SUM_ON_DEVICE;
    Py_RETURN_NONE;
}

PyObject *
fp_handle_free_gradient(fp_handle_steps *h, PyObject *ignored)
{
    if (h->padded == NULL || (h->prepared >= 0 && fp_handle_run(h, "_give_up_gradient", NULL) < 0)) {
        return fp_none_unless(h->padded == NULL ? 0 : -1);
    }
    return fp_none_unless(fp_handle_free(h, h->grad, "_free"));
}

int
fp_handle_leave_backward(fp_handle_steps *h)
{
    if (h->prepared >= 0 && fp_handle_run(h, "_free_unused_gradient", NULL) < 0) {
        return -1;
    }
    h->in_backward = 0;
    PyObject *reduced =
        h->flat_param == NULL ? NULL : PyObject_GetAttr(h->flat_param, fp_handle_names[FP_NAME_SAVED_GRAD]);
    Py_XDECREF(reduced);
    if (reduced == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
    }
    return reduced == NULL ? show(h) : 0;
}

PyObject *
fp_handle_reload(fp_handle_steps *h, PyObject *ignored)
{
    return h->sum_code == SUM_ON_HOST ? fp_handle_by_ops(h, "_reload", NULL) : Py_NewRef(Py_None);
}
