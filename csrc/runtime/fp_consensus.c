/* runtime/fp_consensus.c -- see fp_consensus.h. What is told is small integers, added over the ranks of a group, and at their end
 * one for each rank: which unit (from 1 on) an error of that rank is of. */
#include "runtime/fp_consensus.h"

#include "core/fp_alloc.h"
#include "runtime/fp_unshard.h"

enum { PER_PART = 2 }; /* whether it gets a gradient now; whether there is one from before */

static void
free_exchanges(fp_exchange *exchanges, Py_ssize_t n)
{
    for (Py_ssize_t g = 0; g < n; g++) {
        fp_sum_free(exchanges[g].sum);
        while (exchanges[g].n > 0) {
            Py_DECREF(exchanges[g].steps[--exchanges[g].n]);
        }
        fp_free(exchanges[g].steps);
        fp_free(exchanges[g].flags);
    }
    fp_free(exchanges);
}

static fp_group *
group_of(const fp_unit *step)
{
    return step->parts[0].shard_group;
}

/* The units that keep a copy, by the group that they are spread over, in the order in which they joined; nested: only
 * those whose gradients are reduced in each micro-batch. *n is set also on failure. */
static fp_exchange *
make_exchanges(const fp_root *run, int nested, Py_ssize_t *n)
{
    *n = 0;
    fp_exchange *exchanges = fp_calloc((size_t)run->n_steps, sizeof *exchanges);
    if (exchanges == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t s = 0; s < run->n_steps; s++) {
        fp_unit *step = run->steps[s];
        if (!step->copied || (nested && step->parts[0].refresh_group == NULL)) {
            continue;
        }
        Py_ssize_t g = 0;
        while (g < *n && !fp_group_is_same(group_of(exchanges[g].steps[0]), group_of(step))) {
            g++;
        }
        fp_exchange *exchange = &exchanges[g];
        if (g == *n) {
            exchange->steps = fp_calloc((size_t)run->n_steps, sizeof(fp_unit *));
            if (exchange->steps == NULL) {
                PyErr_NoMemory();
                goto fail;
            }
            (*n)++;
            if (fp_group_place(group_of(step), &exchange->rank, &exchange->ranks) < 0) {
                goto fail;
            }
        }
        exchange->steps[exchange->n++] = (fp_unit *)Py_NewRef(step);
    }
    return exchanges;
fail:
    free_exchanges(exchanges, *n);
    return NULL;
}

static int
make_flags(fp_exchange *exchange, Py_ssize_t n)
{
    exchange->n_flags = n + exchange->ranks;
    exchange->flags = fp_calloc((size_t)exchange->n_flags, sizeof *exchange->flags);
    if (exchange->flags == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int
start(fp_exchange *exchange)
{
    fp_unit *first = exchange->steps[0];
    if (fp_unshard_make_views(first, 0) < 0) {
        return -1;
    }
    PyObject *like = fp_flat_buffer_unsharded(first->parts[0].flat);
    exchange->sum = like == NULL ? NULL
                                 : fp_sum_start(group_of(first), like, exchange->flags, exchange->n_flags,
                                                fp_unit_collectives(first));
    Py_XDECREF(like);
    return exchange->sum == NULL ? -1 : 0;
}

static int
read_sum(fp_exchange *exchange)
{
    fp_sum *sum = exchange->sum;
    exchange->sum = NULL;
    const int status = fp_sum_read(sum, exchange->flags);
    fp_sum_free(sum);
    return status;
}

/* Raise what another rank has told of; 0: none has. */
static int
check_others(const fp_exchange *exchange)
{
    const int32_t *errors = exchange->flags + exchange->n_flags - exchange->ranks;
    for (int rank = 0; rank < exchange->ranks; rank++) {
        if (errors[rank] > 0 && errors[rank] <= exchange->n) {
            const int world_rank = fp_group_world_rank(group_of(exchange->steps[0]), rank);
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_RuntimeError,
                             "%U: rank %d has raised an error that concerns this unit, so all ranks stop here; what is "
                             "wrong stands in that rank's message",
                             exchange->steps[errors[rank] - 1]->name, world_rank);
            }
            return -1;
        }
    }
    return 0;
}

/* ---- before a forward ---- */

static int
is_stale(fp_unit *step)
{
    const int doubted = step->doubted;
    int stale = 0;
    step->doubted = 0;
    for (Py_ssize_t k = 0; k < step->n_parts; k++) {
        const fp_flat_param *part = &step->parts[k];
        stale = stale || !fp_flat_buffer_has_values(part->flat) || part->synced != fp_flat_param_versions(part) ||
                (!part->untracked && part->synced_steps != fp_optimizer_steps);
    }
    for (Py_ssize_t k = 0; doubted && stale == 0 && k < step->n_parts; k++) {
        const int matches = fp_flat_buffer_has_values_of(step->parts[k].flat, step->parts[k].master);
        stale = matches < 0 ? -1 : !matches;
    }
    return stale;
}

/* Where this rank fails it says so, and raises what it has to when the others have heard of it. */
static int
agree_with(fp_exchange *exchange)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (make_flags(exchange, exchange->n) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        fp_unit *step = exchange->steps[i];
        const int looked = type == NULL ? fp_unshard_look_over(step) : 0;
        const int stale = looked < 0 ? 1 : is_stale(step);
        if (type != NULL) {
            PyErr_Clear(); /* one is enough */
        }
        else if (looked < 0 || stale < 0) {
            PyErr_Fetch(&type, &value, &traceback);
            exchange->flags[exchange->n + exchange->rank] = (int32_t)(i + 1);
        }
        exchange->flags[i] = stale != 0;
    }
    const int status = start(exchange) < 0 || read_sum(exchange) < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < exchange->n; i++) {
        fp_unit *step = exchange->steps[i];
        step->stale = exchange->flags[i] != 0;
        step->stale_pass = step->stale ? step->run->pass : step->stale_pass;
    }
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    return status < 0 ? -1 : check_others(exchange);
}

int
fp_consensus_on_stale(fp_root *run)
{
    Py_ssize_t n;
    fp_exchange *exchanges = make_exchanges(run, 0, &n);
    int status = exchanges == NULL ? -1 : 0;
    for (Py_ssize_t g = 0; status == 0 && g < n; g++) {
        status = agree_with(&exchanges[g]);
    }
    if (exchanges != NULL) {
        free_exchanges(exchanges, n);
    }
    return status;
}

/* ---- in a backward ---- */

void
fp_consensus_note_error(fp_root *run, const fp_unit *step)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (run->error == NULL) {
        PyErr_NormalizeException(&type, &value, &traceback);
        run->error = Py_XNewRef(value);
        run->error_step = step;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

static Py_ssize_t
n_owners(const fp_flat_param *part)
{
    return part->refresh_group == NULL ? 0 : PyTuple_GET_SIZE(part->owners);
}

static int
tell(const fp_root *run, fp_exchange *exchange)
{
    Py_ssize_t n = 0;
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        for (Py_ssize_t k = 0; k < exchange->steps[i]->n_parts; k++) {
            n += PER_PART + n_owners(&exchange->steps[i]->parts[k]);
        }
    }
    if (make_flags(exchange, n) < 0) {
        return -1;
    }
    int32_t *flag = exchange->flags;
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        fp_unit *step = exchange->steps[i];
        for (Py_ssize_t k = 0; k < step->n_parts; k++) {
            const fp_flat_param *part = &step->parts[k];
            *flag++ = part->coming;
            *flag++ = fp_flat_buffer_has_kept(part->flat);
            for (Py_ssize_t owner = 0; owner < n_owners(part); owner++) {
                *flag++ = part->cleared[owner];
            }
        }
        if (run->error_step == step) {
            exchange->flags[n + exchange->rank] = (int32_t)(i + 1);
        }
    }
    return start(exchange);
}

int
fp_consensus_on_gradients(fp_root *run)
{
    run->exchanges = make_exchanges(run, !run->synchronize, &run->n_exchanges);
    int status = run->exchanges == NULL ? -1 : 0;
    for (Py_ssize_t g = 0; status == 0 && g < run->n_exchanges; g++) {
        status = tell(run, &run->exchanges[g]);
    }
    return status;
}

static int
hear(fp_exchange *exchange)
{
    if (exchange->sum == NULL) {
        return 0;
    }
    if (read_sum(exchange) < 0) {
        return -1;
    }
    const int32_t *flag = exchange->flags;
    for (Py_ssize_t i = 0; i < exchange->n; i++) {
        for (Py_ssize_t k = 0; k < exchange->steps[i]->n_parts; k++) {
            fp_flat_param *part = &exchange->steps[i]->parts[k];
            part->wanted = *flag++ != 0;
            part->wanted_kept = *flag++ != 0;
            if (part->refresh_group != NULL) {
                const int left = fp_flat_param_clear_kept(part, flag);
                if (left < 0) {
                    return -1;
                }
                part->wanted_kept = part->wanted_kept && left;
            }
            flag += n_owners(part);
        }
    }
    return 0;
}

int
fp_consensus_read(fp_root *run)
{
    int status = 0;
    for (Py_ssize_t g = 0; status == 0 && g < run->n_exchanges; g++) {
        status = hear(&run->exchanges[g]);
    }
    return status;
}

int
fp_consensus_end(fp_root *run)
{
    int status = fp_consensus_read(run);
    if (run->error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(run->error), run->error);
        status = -1;
    }
    for (Py_ssize_t g = 0; status == 0 && g < run->n_exchanges; g++) {
        status = check_others(&run->exchanges[g]);
    }
    fp_consensus_drop(run);
    return status;
}

void
fp_consensus_drop(fp_root *run)
{
    fp_exchange *exchanges = run->exchanges;
    const Py_ssize_t n = run->n_exchanges;
    run->exchanges = NULL;
    run->n_exchanges = 0;
    if (exchanges != NULL) {
        free_exchanges(exchanges, n);
    }
    run->error_step = NULL;
    Py_CLEAR(run->error);
}

int
fp_consensus_traverse(const fp_root *run, visitproc visit, void *arg)
{
    for (Py_ssize_t g = 0; g < run->n_exchanges; g++) {
        for (Py_ssize_t i = 0; i < run->exchanges[g].n; i++) {
            Py_VISIT(run->exchanges[g].steps[i]);
        }
    }
    return 0;
}
