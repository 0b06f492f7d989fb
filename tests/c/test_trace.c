/* test_trace.c -- what is expected after what: passes that alternate, repeat in cycles and change; what was missed; memory that
 * ends. */
#include "core/fp_trace.h"

#include "check.h"
#include "core/fp_alloc.h"

static fp_trace_verdict
note(fp_trace *order, uint64_t event, int new_pass)
{
    fp_trace_verdict verdict = FP_TRACE_OTHER;
    CHECK_EQ(fp_trace_note(order, event, new_pass, &verdict), FP_OK);
    fp_trace_begin(order);
    return verdict;
}

/* A pass of the events from first to last; counts what was not expected. */
static int
pass(fp_trace *order, uint64_t first, uint64_t last)
{
    int surprises = 0;
    for (uint64_t event = first; event <= last; event++) {
        surprises += note(order, event, event == first) != FP_TRACE_EXPECTED;
    }
    return surprises;
}

static void
test_nothing_is_expected_at_first_and_everything_then(void)
{
    fp_trace *order = fp_trace_new();
    CHECK_EQ(note(order, 0, 1), FP_TRACE_NEW);
    for (uint64_t event = 1; event < 40; event++) {
        CHECK_EQ(note(order, event, 0), FP_TRACE_NEW);
    }
    CHECK_EQ(note(order, 0, 1), FP_TRACE_NEW);
    CHECK_EQ(note(order, 1, 0), FP_TRACE_EXPECTED);
    fp_trace_free(order);
    order = fp_trace_new();
    CHECK_EQ(note(order, 7, 1), FP_TRACE_NEW);
    CHECK_EQ(note(order, 8, 0), FP_TRACE_NEW);
    CHECK_EQ(note(order, 7, 1), FP_TRACE_NEW); /* a second pass was not known to come */
    CHECK_EQ(note(order, 8, 0), FP_TRACE_EXPECTED);
    CHECK_EQ(note(order, 7, 1), FP_TRACE_EXPECTED);
    CHECK_EQ(note(order, 9, 0), FP_TRACE_OTHER);
    CHECK_EQ(fp_trace_count(order), 6);
    CHECK_EQ(fp_trace_passes(order), 3);
    fp_trace_free(order);
}

static void
test_a_pass_that_ends_elsewhere_is_another(void)
{
    fp_trace *order = fp_trace_new();
    pass(order, 1, 4);
    pass(order, 1, 4);
    CHECK_EQ(pass(order, 1, 4), 0);
    CHECK_EQ(pass(order, 1, 2), 0);
    CHECK_EQ(note(order, 1, 1), FP_TRACE_OTHER); /* 3 was expected */
    fp_trace_free(order);
}

/* Training, then evaluation, then training: asked about where it changes, and once more where the memory of
 * passes is full of one kind again. */
static void
test_what_alternates_is_asked_about_where_it_changes(void)
{
    fp_trace *order = fp_trace_new();
    for (int round = 0; round < 4; round++) {
        int surprises = 0;
        for (int i = 0; i < 50; i++) {
            surprises += pass(order, 1, 20); /* forward is 1 to 10 */
        }
        for (int i = 0; i < 30; i++) {
            surprises += pass(order, 1, 10);
        }
        CHECK(round == 0 || surprises <= 4);
    }
    fp_trace_free(order);
}

/* Cycles no longer than the memory are learnt whole: nothing is asked any more. */
static void
test_cycles_are_learnt(void)
{
    for (int length = 2; length <= FP_TRACE_PASSES; length++) {
        fp_trace *order = fp_trace_new();
        int late = 0;
        for (int i = 0; i < 8 * FP_TRACE_PASSES; i++) {
            const int surprises = pass(order, 1, i % length == length - 1 ? 12 : 8);
            late += i >= 4 * FP_TRACE_PASSES ? surprises : 0;
        }
        CHECK_EQ(late, 0);
        fp_trace_free(order);
    }
}

/* Passes that leave out one of many at random: what comes after it is known. */
static void
test_what_is_left_out_at_random_costs_a_question_or_two(void)
{
    fp_trace *order = fp_trace_new();
    uint32_t random = 1;
    int surprises = 0;
    for (int i = 0; i < 400; i++) {
        random = random * 1664525u + 1013904223u;
        const uint64_t out = 2 + (random >> 16) % 46;
        for (uint64_t event = 1; event <= 48; event++) {
            if (event != out && note(order, event, event == 1) != FP_TRACE_EXPECTED && i >= 200) {
                surprises++;
            }
        }
    }
    CHECK(surprises <= 200 * 4);
    fp_trace_free(order);
}

/* Two processes with one past say the same, also when the table was cleared. */
static void
test_verdicts_follow_from_the_events(void)
{
    fp_trace *a = fp_trace_new(), *b = fp_trace_new();
    uint32_t random = 5;
    int forgot = 0;
    for (int64_t i = 0; i < 3 * FP_TRACE_MOST; i++) {
        random = random * 1664525u + 1013904223u;
        const uint64_t event = random >> 20;
        const fp_trace_verdict verdict = note(a, event, event % 8 == 0);
        CHECK_EQ(note(b, event, event % 8 == 0), verdict);
        forgot += i > FP_TRACE_MOST && verdict == FP_TRACE_NEW;
    }
    CHECK(forgot > 0);
    fp_trace_free(a);
    fp_trace_free(b);
}

static void
test_recent_events_are_found(void)
{
    fp_trace *order = fp_trace_new();
    uint64_t event = 77;
    int new_pass = 77;
    CHECK_EQ(fp_trace_at(order, 0, &event, &new_pass), 0);
    for (int64_t i = 0; i < FP_TRACE_RECENT + 10; i++) {
        note(order, (uint64_t)i, i % 5 == 0);
    }
    CHECK_EQ(fp_trace_at(order, 9, &event, &new_pass), 0);
    CHECK_EQ(fp_trace_at(order, -1, &event, &new_pass), 0);
    CHECK_EQ(fp_trace_at(order, FP_TRACE_RECENT + 10, &event, &new_pass), 0);
    CHECK_EQ(event, 77);
    for (int64_t i = 10; i < FP_TRACE_RECENT + 10; i++) {
        CHECK_EQ(fp_trace_at(order, i, &event, &new_pass), 1);
        CHECK_EQ(event, i);
        CHECK_EQ(new_pass, i % 5 == 0);
    }
    fp_trace_free(order);
}

static void
miss(fp_trace *order, uint64_t event)
{
    fp_trace_verdict verdict;
    CHECK_EQ(fp_trace_note(order, event, 0, &verdict), FP_OK);
}

static void
test_what_does_not_begin_was_missed(void)
{
    fp_trace *order = fp_trace_new(), *same = fp_trace_new(), *other = fp_trace_new();
    int64_t index = 77;
    uint64_t digest = 77, event;
    int new_pass;
    CHECK_EQ(pass(order, 0, 3), 4);
    CHECK_EQ(pass(order, 0, 3), 1);
    miss(order, 4);
    CHECK_EQ(fp_trace_missed(order, &index, &digest), 0); /* it may begin yet */
    CHECK_EQ(index, 77);
    CHECK(fp_trace_at(order, 8, &event, &new_pass) == 1 && event == 4);
    note(order, 5, 0);
    CHECK_EQ(fp_trace_missed(order, &index, &digest), 1);
    CHECK_EQ(index, 8);
    CHECK(fp_trace_at(order, 8, &event, &new_pass) == 1 && event == FP_TRACE_MISSED && new_pass == 0);
    CHECK(fp_trace_at(order, 9, &event, &new_pass) == 1 && event == 5);
    note(order, 6, 0);
    uint64_t later = digest;
    CHECK(fp_trace_missed(order, &index, &later) == 1 && index == 8 && later == digest);
    fp_trace_confirm_not_begun(order);
    CHECK_EQ(fp_trace_missed(order, &index, &digest), 0);
    CHECK(fp_trace_has_begun(order, 7) && !fp_trace_has_begun(order, 8) && fp_trace_has_begun(order, 10));
    CHECK(!fp_trace_has_begun(order, 11) && !fp_trace_has_begun(order, -1));

    for (uint64_t i = 1; i < 3;
         i++) { /* those who have missed the same find that they have, and others that they have not */
        miss(order, i);
        miss(same, i);
        miss(other, i == 1 ? 1 : 3);
    }
    miss(order, 9);
    note(same, 9, 0);
    note(other, 9, 0);
    uint64_t of_same, of_other;
    CHECK_EQ(fp_trace_missed(order, &index, &digest), 1);
    CHECK_EQ(index, 11);
    CHECK(fp_trace_missed(same, &index, &of_same) && index == 0 && of_same == digest);
    CHECK(fp_trace_missed(other, &index, &of_other) && of_other != digest);
    CHECK_EQ(fp_trace_has_begun(order, 13), 0);
    fp_trace_launch(order); /* the one that may yet begin */
    note(order, 9, 0);
    CHECK(fp_trace_missed(order, &index, &digest) && index == 11 && digest == 0);
    miss(order, 5);
    note(order, 9, 0);
    CHECK(fp_trace_missed(order, &index, &digest) && digest == 0); /* and stays unknown */
    fp_trace_confirm_not_begun(order);
    miss(order, 5);
    note(order, 9, 0);
    CHECK(fp_trace_missed(order, &index, &digest) && digest != 0);
    fp_trace_free(order);
    fp_trace_free(same);
    fp_trace_free(other);
}

static void
test_what_was_joined_breaks_too(void)
{
    fp_trace *order = fp_trace_new(), *other = fp_trace_new(), *third = fp_trace_new();
    fp_alloc_fail_at(1);
    CHECK_EQ(fp_trace_join(order, other), FP_ENOMEM);
    fp_alloc_fail_at(0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(fp_trace_join(order, other), FP_OK);
    }
    CHECK_EQ(fp_trace_join(order, third), FP_OK);
    fp_trace_break(other, FP_TRACE_LOST);
    CHECK(fp_trace_broken(other) == FP_TRACE_LOST && fp_trace_broken(order) == FP_TRACE_WHOLE);
    fp_trace_set_broken(other, FP_TRACE_BROKEN);
    CHECK_EQ(fp_trace_broken(other), FP_TRACE_LOST);
    fp_trace_set_broken(other, FP_TRACE_WHOLE);
    fp_trace_set_broken(other, FP_TRACE_BROKEN);
    CHECK_EQ(fp_trace_broken(other), FP_TRACE_BROKEN);
    fp_trace_free(third);
    fp_trace_break(order, FP_TRACE_LOST);
    CHECK(fp_trace_broken(other) == FP_TRACE_LOST && fp_trace_broken(order) == FP_TRACE_LOST);
    fp_trace_free(order);
    fp_trace_free(other);
}

static void
test_what_does_not_fit_changes_nothing(void)
{
    for (int64_t k = 1; k <= 3; k++) {
        fp_alloc_fail_at(k);
        CHECK(fp_trace_new() == NULL);
    }
    fp_alloc_fail_at(0);
    fp_trace *order = fp_trace_new();
    fp_trace_verdict verdict = FP_TRACE_EXPECTED;
    CHECK_EQ(fp_trace_note(order, FP_TRACE_MISSED, 0, &verdict), FP_EINVAL);
    fp_alloc_fail_at(1); /* the first time that the table grows */
    int64_t i = 0;
    while (fp_trace_note(order, (uint64_t)i, 0, &verdict) == FP_OK && i < 1000) {
        i++;
    }
    CHECK(i > 10 && i < 1000);
    CHECK_EQ(fp_trace_count(order), i);
    CHECK_EQ(note(order, (uint64_t)i, 0), FP_TRACE_NEW);
    CHECK_EQ(fp_trace_count(order), i + 1);
    fp_trace_free(order);
    fp_trace_free(NULL);
}

int
main(void)
{
    test_nothing_is_expected_at_first_and_everything_then();
    test_a_pass_that_ends_elsewhere_is_another();
    test_what_alternates_is_asked_about_where_it_changes();
    test_cycles_are_learnt();
    test_what_is_left_out_at_random_costs_a_question_or_two();
    test_verdicts_follow_from_the_events();
    test_recent_events_are_found();
    test_what_does_not_begin_was_missed();
    test_what_was_joined_breaks_too();
    test_what_does_not_fit_changes_nothing();
    CHECK_EQ(fp_alloc_live(), 0);
    return check_result();
}
