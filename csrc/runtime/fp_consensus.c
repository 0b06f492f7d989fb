/* runtime/fp_consensus.c -- the all-reduces of flags by which ranks agree about units; see fp_consensus.h. Each is one
 * int32 sum over a group: the flags of each unit, then one error slot a rank: 1 + the index of the unit that raised there;
 * 0: none did. */
#include "runtime/fp_consensus.h"

#include "core/fp_alloc.h"
#include "runtime/fp_fresh.h"
#include "runtime/fp_members.h"
#include "runtime/fp_unshard.h"

enum { PER_PART = 2 }; /* flags of a flat parameter in a backward: a gradient comes now; there is an accumulated one */

static void
free_exchanges(fp_exchange *exchanges, Py_ssize_t n)
{
    for (Py_ssize_t g = 0; g < n; g++) {
        fp_sum_free(exchanges[g].sum);
        while (exchanges[g].n > 0) {
            Py_DECREF(exchanges[g].units[--exchanges[g].n]);
        }
        fp_free(exchanges[g].units);
        fp_free(exchanges[g].flags);
    }
    fp_free(exchanges);
}

static fp_group *
group_of(const fp_unit *unit)
{
    return fp_flat_param_plan(&unit->flat_params[0])->primary.group;
}

/* New exchanges, one for each group over which units with is_in(unit) that take part are sharded. Units stay in the order in
 * which they joined. *n: their number. The caller frees them with free_exchanges(). NULL with an exception. */
static fp_exchange *
make_exchanges(const fp_root *root, int (*is_in)(const fp_unit *unit), Py_ssize_t *n)
{
    *n = 0;
    fp_exchange *exchanges = fp_new_array(root->units.n, sizeof *exchanges);
    FP_NEED_NULL(exchanges);
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        fp_unit *unit = root->units.items[s];
        const int takes_part = is_in(unit) ? fp_members_takes_part(unit) : 0;
        if (takes_part < 0) {
            goto fail;
        }
        if (!takes_part) {
            continue;
        }
        Py_ssize_t g = 0;
        while (g < *n && !fp_group_is_same(group_of(exchanges[g].units[0]), group_of(unit))) {
            g++;
        }
        fp_exchange *exchange = &exchanges[g];
        if (g == *n) {
            exchange->units = fp_new_array(root->units.n, sizeof(fp_unit *));
            if (exchange->units == NULL) {
                goto fail;
            }
            (*n)++;
            if (fp_group_place(group_of(unit), &exchange->rank, &exchange->ranks) < 0) {
                goto fail;
            }
        }
        exchange->units[exchange->n++] = (fp_unit *)Py_NewRef(unit);
    }
    return exchanges;
fail:
    free_exchanges(exchanges, *n);
    return NULL;
}

/* Make the flags: n of units and the error slots, all 0. */
static int
make_flags(fp_exchange *exchange, Py_ssize_t n)
{
    exchange->n_flags = n + exchange->ranks;
    exchange->flags = fp_new_array(exchange->n_flags, sizeof *exchange->flags);
    return exchange->flags == NULL ? -1 : 0;
}

/* Start the all-reduce of the flags. kind: FP_EVENT_*, for the collective trace. */
static int
start(fp_exchange *exchange, unsigned kind)
{
    fp_unit *first = exchange->units[0];
    FP_TRY(fp_unshard_make_views(first, 0));
    PyObject *like = fp_flat_buffer_unsharded(first->flat_params[0].flat);
    exchange->sum = like == NULL ? NULL
                                 : fp_sum_start(group_of(first), like, exchange->flags, exchange->n_flags,
                                                fp_unit_collectives(first), kind, (uint32_t)exchange->n);
    Py_XDECREF(like);
    return exchange->sum == NULL ? -1 : 0;
}

/* Wait for the all-reduce: flags becomes the sums. */
static int
read_sum(fp_exchange *exchange)
{
    fp_sum *sum = exchange->sum;
    exchange->sum = NULL;
    const int status = fp_sum_read(sum, exchange->flags);
    fp_sum_free(sum);
    return status;
}

/* -1 with RuntimeError that names rank and unit if some rank has filled its error slot; an exception that is set stays. */
static int
check_others(const fp_exchange *exchange)
{
    const int32_t *errors = exchange->flags + exchange->n_flags - exchange->ranks;
    for (int rank = 0; rank < exchange->ranks; rank++) {
        if (errors[rank] > 0 && errors[rank] <= exchange->n) {
            const int world_rank = fp_group_world_rank(group_of(exchange->units[0]), rank);
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_RuntimeError,
                             "%U: rank %d has raised an error that concerns this unit, so all ranks stop here; the "
                             "message of that rank has the cause",
                             exchange->units[errors[rank] - 1]->name, world_rank);
            }
            return -1;
        }
    }
    return 0;
}

/* ---- before a forward ---- */

/* A question that ranks ask each other about units. */
typedef struct {
    int (*is_in)(const fp_unit *unit);    /* 1: it is asked about this unit; alike on all ranks */
    int (*ask)(fp_unit *unit);            /* this rank's answer: 1 or 0; -1 with an exception set */
    void (*hear)(fp_unit *unit, int any); /* any: 1 if some rank has answered 1 */
    unsigned kind;                        /* FP_EVENT_* of its all-reduce */
} question;

/* Is the unit stale? Writes of users go into the shard first; they are an answer of 1. */
static int
ask_old(fp_unit *unit)
{
    const int looked = fp_unshard_sync_user_writes(unit);
    return looked != 0 ? looked : fp_fresh_is_old(unit);
}

static void
hear_old(fp_unit *unit, int any)
{
    unit->stale = any ? FP_STALE_YES : FP_STALE_NO;
}

static int
ask_learned(fp_unit *unit)
{
    return (unit->ahead & FP_AHEAD_SAW_WRITES) != 0;
}

static const question old = {fp_fresh_is_asked, ask_old, hear_old, FP_EVENT_AGREES};
static const question learned = {fp_fresh_is_learned_next, ask_learned, fp_fresh_end_learning, FP_EVENT_LEARNS};

/* Ask over one group. A rank whose ask() fails still takes part, answers 1, and fills its error slot; it raises its own
 * exception after the all-reduce, so that no rank waits for it. */
static int
agree_with(fp_exchange *exchange, const question *asked)
{
    PyObject *error = NULL;
    FP_TRY(make_flags(exchange, exchange->n));
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        const int told = error == NULL ? asked->ask(exchange->units[i]) : 1;
        if (told < 0) {
            error = PyErr_GetRaisedException();
            exchange->flags[exchange->n + exchange->rank] = (int32_t)(i + 1);
        }
        exchange->flags[i] = told != 0;
    }
    int status = start(exchange, asked->kind);
    if (status == 0) {
        status = read_sum(exchange);
    }
    for (Py_ssize_t i = 0; status == 0 && i < exchange->n; i++) {
        asked->hear(exchange->units[i], exchange->flags[i] != 0);
    }
    if (error != NULL) {
        PyErr_SetRaisedException(error);
        return -1;
    }
    return status < 0 ? -1 : check_others(exchange);
}

/* Ask over all groups that have a unit in question. */
static int
agree(const fp_root *root, const question *asked)
{
    Py_ssize_t n, in = 0;
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        in += asked->is_in(root->units.items[s]);
    }
    fp_exchange *exchanges = in == 0 ? NULL : make_exchanges(root, asked->is_in, &n);
    int status = in == 0 || exchanges != NULL ? 0 : -1;
    for (Py_ssize_t g = 0; exchanges != NULL && status == 0 && g < n; g++) {
        status = agree_with(&exchanges[g], asked);
    }
    if (exchanges != NULL) {
        free_exchanges(exchanges, n);
    }
    return status;
}

/* Nobody is asked about removed units: if one runs all the same, all ranks gather it. */
static int
make_removed_stale(const fp_root *root)
{
    for (Py_ssize_t s = 0; s < root->units.n; s++) {
        fp_unit *unit = root->units.items[s];
        const int has = fp_fresh_is_asked(unit) ? fp_members_has(unit) : 1;
        FP_TRY(has);
        unit->stale = has ? unit->stale : FP_STALE_YES;
    }
    return 0;
}

int
fp_consensus_before_forward(fp_root *root)
{
    FP_TRY(make_removed_stale(root));
    FP_TRY(agree(root, &old));
    return agree(root, &learned);
}

/* ---- in a backward ---- */

void
fp_consensus_note_error(fp_root *root, const fp_unit *unit)
{
    PyObject *error = PyErr_GetRaisedException();
    if (root->consensus.error == NULL) {
        root->consensus.error = error;
        root->consensus.error_unit = unit;
    }
    else {
        Py_XDECREF(error);
    }
}

/* Flags for the owners of a flat parameter: one each if it is nested; else none. */
static Py_ssize_t
n_owners(const fp_flat_param *flat_param)
{
    return fp_flat_param_is_nested(flat_param) ? flat_param->owners.n : 0;
}

/* Fill the flags of one exchange, and start it. hear() reads them in the same order. */
static int
tell(const fp_root *root, fp_exchange *exchange)
{
    Py_ssize_t n = 0;
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        for (Py_ssize_t k = 0; k < exchange->units[i]->n_flat_params; k++) {
            n += PER_PART + n_owners(&exchange->units[i]->flat_params[k]);
        }
    }
    FP_TRY(make_flags(exchange, n));
    int32_t *flag = exchange->flags;
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        fp_unit *unit = exchange->units[i];
        for (Py_ssize_t k = 0; k < unit->n_flat_params; k++) {
            const fp_flat_param *flat_param = &unit->flat_params[k];
            *flag++ = flat_param->reduce_slot == FP_REDUCE_SLOT_COMING;
            *flag++ = fp_flat_buffer_has_accumulated(flat_param->flat);
            for (Py_ssize_t owner = 0; owner < n_owners(flat_param); owner++) {
                *flag++ = flat_param->aside.cleared[owner];
            }
        }
        if (root->consensus.error_unit == unit) {
            exchange->flags[n + exchange->rank] = (int32_t)(i + 1);
        }
    }
    return start(exchange, FP_EVENT_AGREES_ON_GRADIENTS);
}

static int
keeps_copy(const fp_unit *unit)
{
    return fp_unit_has_secondary_shard(unit);
}

/* Also in no_sync: gradients of nested units are reduced over the secondary group in each micro-batch. */
static int
is_nested(const fp_unit *unit)
{
    return fp_unit_has_secondary_shard(unit) && fp_flat_param_is_nested(&unit->flat_params[0]);
}

int
fp_consensus_on_gradients(fp_root *root)
{
    root->consensus.exchanges =
        make_exchanges(root, fp_root_synchronizes(root) ? keeps_copy : is_nested, &root->consensus.n);
    int status = root->consensus.exchanges == NULL ? -1 : 0;
    for (Py_ssize_t g = 0; status == 0 && g < root->consensus.n; g++) {
        status = tell(root, &root->consensus.exchanges[g]);
    }
    return status;
}

/* Wait for one exchange, unless it was read, and write its results into the flat parameters. */
static int
hear(fp_exchange *exchange)
{
    if (exchange->sum == NULL) {
        return 0;
    }
    FP_TRY(read_sum(exchange));
    const int32_t *flag = exchange->flags;
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        for (Py_ssize_t k = 0; k < exchange->units[i]->n_flat_params; k++) {
            fp_flat_param *flat_param = &exchange->units[i]->flat_params[k];
            flat_param->wanted = *flag++ != 0 ? FP_WANTED_GRADIENT : 0;
            flat_param->wanted |= *flag++ != 0 ? FP_WANTED_ACCUMULATED : 0;
            if (fp_flat_param_is_nested(flat_param)) {
                const int left = fp_flat_param_clear_accumulated(flat_param, flag);
                FP_TRY(left);
                if (!left) {
                    flat_param->wanted &= ~(unsigned)FP_WANTED_ACCUMULATED;
                }
            }
            flag += n_owners(flat_param);
        }
    }
    return 0;
}

int
fp_consensus_read(fp_root *root)
{
    int status = 0;
    for (Py_ssize_t g = 0; status == 0 && g < root->consensus.n; g++) {
        status = hear(&root->consensus.exchanges[g]);
    }
    return status;
}

int
fp_consensus_end(fp_root *root)
{
    int status = fp_consensus_read(root);
    if (root->consensus.error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(root->consensus.error), root->consensus.error);
        status = -1;
    }
    for (Py_ssize_t g = 0; status == 0 && g < root->consensus.n; g++) {
        status = check_others(&root->consensus.exchanges[g]);
    }
    fp_consensus_drop(root);
    return status;
}

void
fp_consensus_drop(fp_root *root)
{
    fp_exchange *exchanges = root->consensus.exchanges;
    const Py_ssize_t n = root->consensus.n;
    root->consensus.exchanges = NULL;
    root->consensus.n = 0;
    free_exchanges(exchanges, n);
    root->consensus.error_unit = NULL;
    Py_CLEAR(root->consensus.error);
}

int
fp_consensus_traverse(const fp_root *root, visitproc visit, void *arg)
{
    for (Py_ssize_t g = 0; g < root->consensus.n; g++) {
        for (Py_ssize_t i = 0; i < root->consensus.exchanges[g].n; i++) {
            Py_VISIT(root->consensus.exchanges[g].units[i]);
        }
    }
    return 0;
}
