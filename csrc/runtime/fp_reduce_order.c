/* runtime/fp_reduce_order.c -- the order of reductions in a backward; see fp_reduce_order.h. It only decides when:
 * fp_reduction.c reduces, and fp_consensus.c knows which ranks have gradients. */
#include "runtime/fp_reduce_order.h"

#include "runtime/fp_consensus.h"
#include "runtime/fp_members.h"
#include "runtime/fp_reduction.h"
#include "runtime/fp_unshard.h"

enum { AHEAD = 2 }; /* units whose accumulated gradients are copied to the device: the one in backward, and the next */

/* 1: the unit's forward ran in this pass, and awaits backward. All ranks that gather the unit with this one know that alike. */
static int
took_part(const fp_unit *unit)
{
    return unit->position >= 0 && unit->entry >= 0;
}

/* 1: some flat parameter of the unit gets a gradient on this rank that has not come yet. */
static int
is_coming(const fp_unit *unit)
{
    int coming = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        const fp_flat_param *flat_param = &unit->flat_params[k];
        coming = coming || flat_param->reduce_slot == FP_REDUCE_SLOT_COMING;
    }
    return coming;
}

/* ---- the order ---- */

int
fp_reduce_order_join(fp_root *root, fp_unit *unit)
{
    fp_unit_list *order = &root->reduce_order;
    if (order->n == 0 && !fp_unit_has_secondary_shard(unit)) {
        return 0;
    }
    FP_TRY(fp_unit_list_reserve(order, root->units.n + 1));
    while (order->n < root->units.n) { /* the first unit with a secondary shard: the others join before it */
        order->items[order->n] = root->units.items[order->n];
        order->n++;
    }
    order->items[order->n++] = unit;
    return 0;
}

void
fp_reduce_order_leave(fp_root *root, const fp_unit *unit)
{
    fp_unit_list *order = &root->reduce_order;
    for (Py_ssize_t i = 0; i < order->n; i++) {
        if (order->items[i] == unit) {
            root->reduce_order_at -= i < root->reduce_order_at;
            break;
        }
    }
    fp_unit_list_remove(order, unit);
}

/* Sort the units that this pass has run by entry, the last first, among the places that they have. The other units keep
 * their places. Insertion sort: O(n) if the order has not changed. */
static void
learn(fp_root *root)
{
    for (Py_ssize_t i = 1; i < root->units.n; i++) {
        fp_unit *unit = root->reduce_order.items[i];
        Py_ssize_t at = i;
        for (Py_ssize_t j = i - 1; took_part(unit) && j >= 0; j--) {
            fp_unit *other = root->reduce_order.items[j];
            if (took_part(other)) {
                if (other->entry > unit->entry) {
                    break;
                }
                root->reduce_order.items[at] = other;
                at = j;
            }
        }
        root->reduce_order.items[at] = unit;
    }
}

/* ---- a backward ---- */

int
fp_reduce_order_move(const fp_unit *unit, fp_flat_param *flat_param, fp_reduce_slot_event event)
{
    unsigned next;
    FP_TRY(fp_unit_next(unit, &fp_reduce_slot_moves, flat_param->reduce_slot, event, &next));
    flat_param->reduce_slot = next;
    return 0;
}

void
fp_reduce_order_forget(fp_root *root)
{
    fp_consensus_drop(root);
    root->reduce_order_at = root->units.n;
    root->cursor = 0;
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        for (Py_ssize_t k = 0; k < root->units.items[s]->n_flat_params; k++) {
            fp_flat_param *flat_param = &root->units.items[s]->flat_params[k];
            flat_param->reduce_slot = FP_REDUCE_SLOT_OPEN;
            flat_param->wanted = 0;
        }
    }
}

/* Read the user's edits of accumulated gradients, and mark the slots that get a gradient in this backward. tells: 1: an
 * error is noted for all ranks; 0: it is raised here. *shown becomes 1 if a nested flat parameter has an accumulated
 * gradient. */
static int
read_accumulated(fp_root *root, fp_unit *unit, int tells, int *shown)
{
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        fp_flat_param *flat_param = &unit->flat_params[k];
        *shown = *shown || (fp_flat_param_is_nested(flat_param) && fp_flat_buffer_has_accumulated(flat_param->flat));
        if (fp_flat_param_note_user_edits(flat_param, PyUnicode_AsUTF8(unit->name), 0) < 0) {
            if (!tells) {
                return -1;
            }
            fp_consensus_note_error(root, unit);
        }
        if (!fp_flat_param_is_untracked(flat_param) && fp_flat_buffer_is_reached(flat_param->flat)) {
            FP_TRY(fp_reduce_order_move(unit, flat_param, FP_REDUCE_SLOT_EXPECT));
        }
    }
    return 0;
}

int
fp_reduce_order_begin(fp_root *root)
{
    int nested = 0, shown = 0;
    fp_reduce_order_forget(root);
    if (root->reduce_order.n == 0) {
        return 0;
    }
    root->reduce_order_at = 0;
    root->cursor = root->order.n;
    learn(root);
    PyObject *units = fp_unit_list_copy(&root->units);
    int status = units == NULL ? -1 : 0;
    for (Py_ssize_t s = 0; status == 0 && s < PyTuple_GET_SIZE(units); s++) {
        fp_unit *unit = (fp_unit *)PyTuple_GET_ITEM(units, s);
        const int removed = unit->root == root && fp_unit_has_secondary_shard(unit) ? fp_members_drop_removed(unit) : 1;
        status = removed < 0 ? -1 : 0;
        if (removed == 0) {
            const int in_steps = fp_flat_param_is_nested(&unit->flat_params[0]);
            nested = nested || in_steps;
            status = read_accumulated(root, unit, fp_root_synchronizes(root) || in_steps, &shown);
        }
    }
    Py_XDECREF(units);
    FP_TRY(status);
    if (fp_root_synchronizes(root) || nested) {
        FP_TRY(fp_consensus_on_gradients(root));
    }
    return shown ? fp_consensus_read(root) : 0; /* clear what other ranks have cleared before adding to it */
}

/* The turn of a flat parameter has come: FP_REDUCE_* says over which groups its gradient is reduced; 0: none; -1: error.
 * took: the unit's forward ran in this pass. Asks what other ranks have only if this rank has no gradient: that may have
 * to wait. */
static int
how_far(fp_root *root, const fp_flat_param *flat_param, int took)
{
    const int nested = fp_flat_param_is_nested(flat_param);
    const int has_accumulated =
        nested ? fp_flat_buffer_has_unreduced(flat_param->flat) : fp_flat_buffer_has_accumulated(flat_param->flat);
    if (!fp_root_synchronizes(root) && !nested) {
        return 0;
    }
    if (flat_param->reduce_slot == FP_REDUCE_SLOT_PACKED || has_accumulated) {
        return nested && !fp_root_synchronizes(root) ? FP_REDUCE_INNER : FP_REDUCE_ALL;
    }
    FP_TRY(fp_consensus_read(root));
    if (!nested) {
        return flat_param->wanted != 0 ? FP_REDUCE_ALL : 0;
    }
    return (took && (flat_param->wanted & FP_WANTED_GRADIENT) ? FP_REDUCE_INNER : 0) |
           (fp_root_synchronizes(root) && flat_param->wanted != 0 ? FP_REDUCE_OUTER : 0);
}

/* Give a flat parameter its turn: reduce it, and free its unsharded data. */
static int
pass_part(fp_unit *unit, fp_flat_param *flat_param, int took)
{
    fp_root *root = unit->root;
    const int far = how_far(root, flat_param, took);
    FP_TRY(far);
    FP_TRY(fp_reduce_order_move(unit, flat_param, FP_REDUCE_SLOT_PASS));
    if (far > 0) {
        FP_TRY(fp_reduction_start(unit, flat_param, NULL, far));
    }
    if (took && !fp_flat_param_is_untracked(flat_param) && flat_param->gathered) {
        FP_TRY(fp_unshard_pass(unit, flat_param));
    }
    return fp_flat_buffer_drop_reload(flat_param->flat);
}

int
fp_reduce_order_flush(fp_root *root, Py_ssize_t cursor)
{
    while (root->reduce_order_at < root->units.n) {
        fp_unit *unit = root->reduce_order.items[root->reduce_order_at];
        const int took = took_part(unit);
        const int comes = cursor >= 0 && is_coming(unit);
        if (fp_unit_has_secondary_shard(unit) && took && (unit->entered <= cursor || comes)) {
            return 0;
        }
        root->reduce_order_at++;
        int status = 0;
        Py_INCREF(unit);
        for (Py_ssize_t k = 0; status == 0 && fp_unit_has_secondary_shard(unit) && k < unit->n_flat_params; k++) {
            fp_flat_param *flat_param = &unit->flat_params[k];
            if (flat_param->reduce_slot != FP_REDUCE_SLOT_PASSED &&
                (took || !comes)) { /* else its gradient comes later, and is reduced at once then */
                status = pass_part(unit, flat_param, took);
            }
        }
        Py_DECREF(unit);
        FP_TRY(status);
    }
    return 0;
}

int
fp_reduce_order_start_reload(fp_root *root)
{
    int ahead = 0;
    if (root->reduce_order.n == 0) {
        return 0;
    }
    for (Py_ssize_t i = root->reduce_order_at; ahead < AHEAD && i < root->units.n; i++) {
        fp_unit *unit = root->reduce_order.items[i];
        if (!fp_unit_has_secondary_shard(unit) || !is_coming(unit)) {
            continue;
        }
        ahead++;
        for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
            if (unit->flat_params[k].reduce_slot == FP_REDUCE_SLOT_COMING) {
                FP_TRY(fp_flat_buffer_start_reload(unit->flat_params[k].flat));
            }
        }
    }
    return 0;
}

/* Move the cursor to position. For each unit on the way, to which no gradient came here, do what a backward that came to
 * it would do: gather it, prefetch the next one, give units their turn. Other ranks may come to it, and they issue these
 * collectives. */
static int
advance(fp_root *root, Py_ssize_t position)
{
    while (root->cursor > position) {
        const Py_ssize_t cursor = --root->cursor;
        FP_TRY(fp_reduce_order_flush(root, cursor));
        if (cursor == position || cursor < 0) {
            continue;
        }
        fp_unit *unit = root->order.items[cursor];
        if (unit != NULL && fp_unit_has_secondary_shard(unit) && !fp_unit_is_full(unit) &&
            fp_unit_awaits_backward(unit)) {
            FP_TRY(fp_unit_is_recorded(unit) ? fp_unshard_make_full(unit) : fp_unshard_start(unit));
        }
        fp_unit *next = cursor > 0 ? root->order.items[cursor - 1] : NULL;
        if ((root->prefetch & (FP_PREFETCH_PRE | FP_PREFETCH_POST)) && next != NULL) {
            FP_TRY(fp_unshard_prefetch(next));
        }
    }
    return 0;
}

int
fp_reduce_order_reach(fp_unit *unit)
{
    fp_root *root = unit->root;
    if (root->reduce_order.n == 0 || unit->position < 0) {
        return 0;
    }
    if (unit->position < root->cursor) {
        return advance(root, unit->position);
    }
    int passed = fp_unit_has_secondary_shard(unit);
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        passed = passed && unit->flat_params[k].reduce_slot == FP_REDUCE_SLOT_PASSED &&
                 !fp_flat_param_is_untracked(&unit->flat_params[k]);
    }
    return passed;
}

int
fp_reduce_order_has(const fp_unit *unit, const fp_flat_param *flat_param)
{
    return fp_unit_has_secondary_shard(unit) && flat_param->reduce_slot != FP_REDUCE_SLOT_PASSED && took_part(unit);
}

int
fp_reduce_order_end(fp_root *root)
{
    if (root->reduce_order.n == 0) {
        return 0;
    }
    FP_TRY(advance(root, -1));
    FP_TRY(fp_reduce_order_flush(root, -1));
    return fp_consensus_end(root);
}
