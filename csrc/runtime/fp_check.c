/* runtime/fp_check.c -- the invariants of units, of their flat parameters and of the root; see fp_check.h. */
#include "runtime/fp_check.h"

#ifdef FP_CHECK

#include <stdio.h>
#include <stdlib.h>

/* The subject of a check, for its message. */
typedef struct {
    const fp_unit *unit; /* NULL: the root */
    const char *where;
} subject;

static void
hold(int holds, const char *condition, int line, subject of)
{
    if (!holds) {
        fprintf(stderr, "flatparam: %s: in %s does not hold: %s (fp_check.c:%d)\n",
                of.unit == NULL ? "the model" : PyUnicode_AsUTF8(of.unit->name), of.where, condition, line);
        abort();
    }
}

#define HOLDS(condition) hold((condition) != 0, #condition, __LINE__, of)
#define IMPLIES(condition, other) hold(!(condition) || (other), #condition " implies " #other, __LINE__, of)

static void
check_flat_param(const fp_unit *unit, const fp_flat_param *flat_param, const char *where)
{
    const subject of = {unit, where};
    const int in_backward = unit->root != NULL && fp_root_in_backward(unit->root);
    const int has_accumulated = fp_flat_buffer_has_accumulated(flat_param->flat);
    fp_flat_buffer_check(flat_param->flat, where);
    HOLDS(flat_param->owners.n == (flat_param->params == NULL ? 1 : flat_param->attributes.n));
    HOLDS((flat_param->owners.geometry == flat_param->geometry) == (flat_param->params != NULL));
    IMPLIES(flat_param->views == NULL, flat_param->shows < FP_SHOWS_VIEWS && !flat_param->gathered);
    IMPLIES(flat_param->params == NULL, flat_param->shows == FP_SHOWS_NOTHING || flat_param->shows == FP_SHOWS_VIEWS);
    IMPLIES(flat_param->extended != NULL, flat_param->extension != NULL && flat_param->shows >= FP_SHOWS_VIEWS);
    IMPLIES(flat_param->shown != FP_SHOWN_REDUCED, has_accumulated);
    IMPLIES(flat_param->shown == FP_SHOWN_ACCUMULATED, fp_flat_param_plan(flat_param)->primary.group == NULL);
    IMPLIES(flat_param->shown == FP_SHOWN_ACCUMULATED_WIDE, fp_flat_param_plan(flat_param)->primary.group == NULL);
    IMPLIES(flat_param->aside.deferred_reduced != NULL, flat_param->shown == FP_SHOWN_UNREDUCED);
    IMPLIES(fp_flat_param_is_nested(flat_param), fp_flat_param_plan(flat_param)->secondary.group != NULL);
    HOLDS((fp_flat_param_plan(flat_param)->primary.n > 1) == (fp_flat_param_plan(flat_param)->primary.group != NULL));
    HOLDS(flat_param->synced_steps <= fp_optimizer_steps);
    IMPLIES(fp_flat_buffer_has_unreduced(flat_param->flat), in_backward);
    IMPLIES(flat_param->wanted != 0, unit->root->reduce_order.n > 0);
}

void
fp_unit_check(const fp_unit *unit, const char *where)
{
    const subject of = {unit, where};
    const fp_root *root = unit->root;
    Py_ssize_t gathered = 0;
    for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
        const fp_flat_param *flat_param = &unit->flat_params[k];
        check_flat_param(unit, flat_param, where);
        gathered += flat_param->gathered;
        HOLDS(fp_unit_is_sharded(unit) == (fp_flat_param_plan(flat_param)->primary.group != NULL));
        HOLDS(fp_unit_has_secondary_shard(unit) == fp_flat_param_has_secondary_shard(flat_param));
    }
    HOLDS((unit->depth > 0) == fp_unit_is_in_forward(unit));
    HOLDS(unit->pending >= 0);
    IMPLIES(unit->state == FP_UNIT_SHARDED, gathered == 0);
    IMPLIES(fp_unit_is_full(unit), gathered == unit->n_flat_params);
    IMPLIES(unit->state == FP_UNIT_KEPT_FOR_GRAPH, unit->for_graph);
    IMPLIES(unit->state == FP_UNIT_KEPT, !unit->reshard_after_forward);
    IMPLIES(unit->for_graph, unit->recorded >= 0);
    HOLDS((unit->ahead >> 2 & FP_AHEAD_OBSERVED & ~unit->ahead) == 0); /* what is learned was observed */
    if (root == NULL) {
        return;
    }
    HOLDS(unit->gather_pass <= root->pass && unit->entry < root->entries);
    HOLDS(unit->recorded <= root->optimizer_steps && unit->gather_steps <= root->optimizer_steps);
    HOLDS(unit->position < root->order.n);
    IMPLIES(unit->position >= 0, root->order.items[unit->position] == unit);
    IMPLIES(fp_unit_has_secondary_shard(unit), root->reduce_order.n > 0);
}

void
fp_units_check(const fp_root *root, const char *where)
{
    const subject of = {NULL, where};
    Py_ssize_t depth = 0;
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        Py_ssize_t listed = 0;
        for (Py_ssize_t i = 0; i < root->units.n; i++) {
            listed += root->reduce_order.n == 0 ? i == s : root->reduce_order.items[i] == root->units.items[s];
        }
        HOLDS(root->units.items[s]->root == root);
        HOLDS(listed == 1);
        fp_unit_check(root->units.items[s], where);
        depth += root->units.items[s]->depth;
    }
    HOLDS(root->depth == depth);
    HOLDS(root->blocks >= 0);
    HOLDS(root->order.n <= root->order.room && root->units.n <= root->units.room);
    IMPLIES(root->reduce_order.n > 0, root->reduce_order.n == root->units.n);
    HOLDS(root->reduce_order_at >= 0 && root->reduce_order_at <= root->units.n);
    IMPLIES(root->halfway != NULL, root->reducing != NULL && root->halfway != root->reducing);
    IMPLIES(root->consensus.error_unit != NULL, root->consensus.error != NULL);
    IMPLIES(!fp_root_in_backward(root),
            root->reducing == NULL && root->consensus.exchanges == NULL && root->consensus.error == NULL);
}

void
fp_idle_check(const fp_root *root, const char *where)
{
    const subject of = {NULL, where};
    fp_units_check(root, where);
    HOLDS(root->order.n == 0 && root->lock.held <= 1);
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        HOLDS(root->units.items[s]->position == -1 && root->units.items[s]->pending == 0);
        HOLDS(root->units.items[s]->pass == FP_PASS_IDLE || root->units.items[s]->depth > 0);
    }
}

#endif
