/* runtime/fp_types.c -- loops over units and flat parameters, and checked moves; see fp_types.h. */
#include "runtime/fp_types.h"

#include "core/fp_alloc.h"

int64_t fp_optimizer_steps;

PyObject *
fp_unit_collectives(const fp_unit *unit)
{
    return unit->root->through_python ? unit->root->collectives : NULL;
}

int
fp_unit_list_reserve(fp_unit_list *list, Py_ssize_t room)
{
    if (room <= list->room) {
        return 0;
    }
    fp_unit **items = fp_new_array(room, sizeof *items);
    FP_NEED(items);
    for (Py_ssize_t i = 0; i < list->n; i++) {
        items[i] = list->items[i];
    }
    fp_free(list->items);
    list->items = items;
    list->room = room;
    return 0;
}

int
fp_unit_list_add(fp_unit_list *list, fp_unit *unit)
{
    if (list->n == list->room && fp_unit_list_reserve(list, list->room == 0 ? 64 : 2 * list->room) < 0) {
        return -1;
    }
    list->items[list->n++] = unit;
    return 0;
}

void
fp_unit_list_remove(fp_unit_list *list, const fp_unit *unit)
{
    Py_ssize_t left = 0;
    for (Py_ssize_t i = 0; i < list->n; i++) {
        if (list->items[i] != unit) {
            list->items[left++] = list->items[i];
        }
    }
    list->n = left;
}

PyObject *
fp_unit_list_copy(const fp_unit_list *list)
{
    PyObject *units = NULL;
    while (units == NULL || PyTuple_GET_SIZE(units) != list->n) { /* the allocation may collect units */
        Py_XSETREF(units, PyTuple_New(list->n));
        FP_NEED_NULL(units);
    }
    for (Py_ssize_t s = 0; s < list->n; s++) {
        PyTuple_SET_ITEM(units, s, Py_NewRef(list->items[s]));
    }
    return units;
}

int
fp_unit_check_idle(const fp_unit *unit, const char *what)
{
    if (fp_unit_is_in_forward(unit) || (unit->root != NULL && fp_root_in_backward(unit->root))) {
        return fp_raise(PyExc_RuntimeError, "%U cannot %s in the middle of a pass", unit->name, what);
    }
    return 0;
}

int
fp_unit_each(const fp_unit *unit, int (*call)(fp_flat_param *flat_param))
{
    int status = 0;
    for (Py_ssize_t k = 0; status == 0 && k < unit->n_flat_params; k++) {
        status = call(&unit->flat_params[k]);
    }
    return status;
}

/* Call a function for the array of a unit's flat buffers. 0, without a call, for one flat parameter, or if Python does the
 * collectives. */
static int
for_all(const fp_unit *unit, int what, int (*call)(fp_flat_buffer *const *, Py_ssize_t, PyObject *, int))
{
    if (unit->n_flat_params < 2 || fp_unit_collectives(unit) != NULL) {
        return 0;
    }
    fp_flat_buffer **flats = fp_new_array(unit->n_flat_params, sizeof *flats);
    FP_NEED(flats);
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        flats[k] = unit->flat_params[k].flat;
    }
    const int status = call(flats, unit->n_flat_params, unit->flat_params[0].shard, what);
    fp_free(flats);
    return status;
}

int
fp_unit_can_join(const fp_unit *unit, int what)
{
    return for_all(unit, what, fp_flat_buffers_can_join);
}

int
fp_unit_begin_together(const fp_unit *unit, int what)
{
    return for_all(unit, what, fp_flat_buffers_begin);
}

int
fp_unit_end_together(const fp_unit *unit, int what, int status)
{
    PyObject *error = status < 0 ? PyErr_GetRaisedException() : NULL;
    const int ended = for_all(unit, what, fp_flat_buffers_end);
    if (error != NULL) {
        PyErr_SetRaisedException(error); /* it hides an error of the end */
    }
    return ended < 0 ? -1 : status;
}

int
fp_root_each(fp_root *root, int (*call)(fp_root *root, fp_unit *unit))
{
    PyObject *units = fp_unit_list_copy(&root->units);
    int status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        status = call(root, (fp_unit *)PyTuple_GET_ITEM(units, s));
    }
    Py_XDECREF(units);
    return status;
}

int
fp_unit_next(const fp_unit *unit, const fp_state_table *table, unsigned state, unsigned event, unsigned *next)
{
    char text[FP_STATE_MESSAGE_BYTES];
    if (fp_state_next(table, state, event, next) == FP_OK) {
        return 0;
    }
    fp_state_message(table, state, event, text, sizeof text);
    return fp_raise(PyExc_RuntimeError, "%U: %s", unit->name, text);
}
