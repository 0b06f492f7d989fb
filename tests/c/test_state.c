/* test_state.c -- the tables of legal moves: what a unit and a flat parameter do in a step, what is refused in words that fit,
 * and what every state has a way out of. */
#include "core/fp_state.h"

#include <string.h>

#include "check.h"

static const fp_state_table *const tables[] = {&fp_pass_moves,     &fp_unit_moves,        &fp_data_moves,
                                               &fp_gradient_moves, &fp_reduce_slot_moves, &fp_shown_moves};

/* The state after events, which end with -1; -1 if one of them is illegal. */
static int
after(const fp_state_table *table, const int *events)
{
    unsigned state = 0;
    for (; *events >= 0; events++) {
        if (fp_state_next(table, state, (unsigned)*events, &state) != FP_OK) {
            return -1;
        }
    }
    return (int)state;
}
#define AFTER(table, ...) after(&table, (const int[]){__VA_ARGS__, -1})

static void
check_refusals(const fp_state_table *table)
{
    char text[FP_STATE_MESSAGE_BYTES], small[10];
    unsigned next = 77;
    CHECK_EQ(fp_state_next(table, table->n_states, 0, &next), FP_EINVAL);
    CHECK_EQ(fp_state_next(table, (unsigned)-1, 0, &next), FP_EINVAL);
    CHECK_EQ(fp_state_next(table, 0, table->n_events, &next), FP_EINVAL);
    CHECK_EQ(fp_state_next(table, 0, (unsigned)-1, &next), FP_EINVAL);
    CHECK_EQ(next, 77);
    for (unsigned event = 0; event < table->n_events; event++) {
        int possible = 0;
        for (unsigned state = 0; state < table->n_states; state++) {
            next = 77;
            const fp_status status = fp_state_next(table, state, event, &next);
            CHECK(status == FP_OK ? next < table->n_states : status == FP_ESTATE && next == 77);
            possible += status == FP_OK;
            fp_state_message(table, state, event, text, sizeof text);
            CHECK(strlen(text) < sizeof text - 1);
            CHECK(strstr(text, table->states[state]) != NULL && strstr(text, table->events[event]) == text);
            fp_state_message(table, state, event, small, sizeof small);
            CHECK_EQ(strlen(small), sizeof small - 1);
        }
        CHECK(possible > 0);
    }
}

/* From each state the first one can be come to again. */
static void
check_ways_back(const fp_state_table *table)
{
    for (unsigned state = 0; state < table->n_states; state++) {
        unsigned reached = 1U << state;
        for (unsigned round = 0; round < table->n_states; round++) {
            for (unsigned from = 0; from < table->n_states; from++) {
                for (unsigned event = 0; event < table->n_events; event++) {
                    unsigned next;
                    if ((reached >> from & 1U) && fp_state_next(table, from, event, &next) == FP_OK) {
                        reached |= 1U << next;
                    }
                }
            }
        }
        CHECK(reached & 1U);
    }
}

static void
check_steps(void)
{
    CHECK_EQ(AFTER(fp_pass_moves, FP_PASS_BEGIN_FORWARD, FP_PASS_END_FORWARD, FP_PASS_EXPECT_BACKWARD,
                   FP_PASS_BEGIN_BACKWARD, FP_PASS_FINISH_BACKWARD),
             FP_PASS_IDLE);
    CHECK_EQ(AFTER(fp_pass_moves, FP_PASS_BEGIN_BACKWARD, FP_PASS_BEGIN_FORWARD, FP_PASS_END_FORWARD),
             FP_PASS_BACKWARD); /* recomputed */
    CHECK_EQ(AFTER(fp_pass_moves, FP_PASS_BEGIN_FORWARD, FP_PASS_END_FORWARD, FP_PASS_EXPECT_BACKWARD,
                   FP_PASS_BEGIN_FORWARD, FP_PASS_END_FORWARD),
             FP_PASS_AWAITING_BACKWARD); /* a second forward without gradients */
    CHECK_EQ(AFTER(fp_pass_moves, FP_PASS_BEGIN_FORWARD, FP_PASS_END_FORWARD, FP_PASS_END_FORWARD), -1);
    CHECK_EQ(AFTER(fp_pass_moves, FP_PASS_BEGIN_BACKWARD, FP_PASS_EXPECT_BACKWARD), -1);
    CHECK_EQ(AFTER(fp_unit_moves, FP_UNIT_BEGIN_GATHER, FP_UNIT_END_START, FP_UNIT_USE, FP_UNIT_ARRIVE, FP_UNIT_KEEP,
                   FP_UNIT_USE, FP_UNIT_ARRIVE, FP_UNIT_FREE_SOME, FP_UNIT_FREE),
             FP_UNIT_SHARDED);
    CHECK_EQ(AFTER(fp_unit_moves, FP_UNIT_BEGIN_GATHER, FP_UNIT_END_START, FP_UNIT_KEEP, FP_UNIT_KEEP_FOR_GRAPH),
             FP_UNIT_KEPT_FOR_GRAPH);
    CHECK_EQ(AFTER(fp_unit_moves, FP_UNIT_BEGIN_GATHER, FP_UNIT_FREE, FP_UNIT_END_START), -1);
    CHECK_EQ(AFTER(fp_unit_moves, FP_UNIT_BEGIN_GATHER, FP_UNIT_END_START, FP_UNIT_FREE, FP_UNIT_ARRIVE), -1);
    CHECK_EQ(AFTER(fp_data_moves, FP_DATA_REFRESH, FP_DATA_ARRIVE, FP_DATA_GATHER, FP_DATA_ARRIVE), FP_DATA_UNSHARDED);
    CHECK_EQ(AFTER(fp_data_moves, FP_DATA_GATHER, FP_DATA_FORGET), -1); /* a collective writes to it */
    CHECK_EQ(AFTER(fp_data_moves, FP_DATA_GATHER, FP_DATA_ABANDON, FP_DATA_FORGET), -1);
    CHECK_EQ(AFTER(fp_data_moves, FP_DATA_GATHER, FP_DATA_ABANDON, FP_DATA_ARRIVE), FP_DATA_SHARDED);
    CHECK_EQ(AFTER(fp_gradient_moves, FP_GRADIENT_PACK, FP_GRADIENT_REDUCE_INNER, FP_GRADIENT_ACCUMULATE,
                   FP_GRADIENT_REDUCE, FP_GRADIENT_SEND, FP_GRADIENT_TAKE),
             FP_GRADIENT_NONE);
    CHECK_EQ(AFTER(fp_gradient_moves, FP_GRADIENT_PACK, FP_GRADIENT_PACK),
             FP_GRADIENT_PACKED);                                                 /* one joins the other */
    CHECK_EQ(AFTER(fp_gradient_moves, FP_GRADIENT_REDUCE, FP_GRADIENT_PACK), -1); /* would write to it */
    CHECK_EQ(AFTER(fp_gradient_moves, FP_GRADIENT_REDUCE, FP_GRADIENT_REDUCE), -1);
    CHECK_EQ(AFTER(fp_gradient_moves, FP_GRADIENT_REDUCE, FP_GRADIENT_TAKE, FP_GRADIENT_TAKE), -1);
    CHECK_EQ(AFTER(fp_reduce_slot_moves, FP_REDUCE_SLOT_EXPECT, FP_REDUCE_SLOT_PACK, FP_REDUCE_SLOT_EXPECT,
                   FP_REDUCE_SLOT_PASS),
             FP_REDUCE_SLOT_PASSED);
    CHECK_EQ(AFTER(fp_reduce_slot_moves, FP_REDUCE_SLOT_PASS, FP_REDUCE_SLOT_PACK), FP_REDUCE_SLOT_PASSED);
    CHECK_EQ(AFTER(fp_shown_moves, FP_SHOWN_SHOW_WIDE, FP_SHOWN_READ, FP_SHOWN_SHOW_UNREDUCED), FP_SHOWN_UNREDUCED);
    CHECK_EQ(AFTER(fp_shown_moves, FP_SHOWN_SHOW_ACCUMULATED, FP_SHOWN_SHOW_UNREDUCED), -1);
    CHECK_EQ(AFTER(fp_reduce_slot_moves, FP_REDUCE_SLOT_PASS, FP_REDUCE_SLOT_EXPECT),
             -1); /* others are reduced since */
}

int
main(void)
{
    for (size_t t = 0; t < sizeof tables / sizeof tables[0]; t++) {
        check_refusals(tables[t]);
        check_ways_back(tables[t]);
    }
    check_steps();
    return check_result();
}
