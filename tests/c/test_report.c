/* test_report.c -- the reports of ranks: read as they are written; any other text is none, and leaves the struct as it was. */
#include <inttypes.h>
#include <string.h>

#include "core/fp_report.h"

#include "check.h"

static void
test_a_report_is_read_as_it_is_written(void)
{
    const fp_report written[] = {
        {0, 0, 0, ""},
        {3, 17, 42, "gathers the unit of Block"},
        {INT64_MAX, INT64_MAX, UINT64_MAX, "a text of 3 words 4 numbers"},
    };
    for (size_t i = 0; i < sizeof(written) / sizeof(written[0]); i++) {
        char said[200];
        snprintf(said, sizeof(said), "%" PRId64 " %" PRId64 " %" PRIu64 " %s", written[i].rank, written[i].step,
                 written[i].event, written[i].text);
        fp_report got;
        CHECK_EQ(fp_report_read(said, &got), 1);
        CHECK_EQ(got.rank, written[i].rank);
        CHECK_EQ(got.step, written[i].step);
        CHECK(got.event == written[i].event);
        CHECK(strcmp(got.text, written[i].text) == 0);
    }
}

static void
test_other_texts_are_no_reports(void)
{
    const char *const others[] = {"",           " ",          "1",          "1 2",          "1 2 3",
                                  "a 2 3 text", "1 b 3 text", "1 2 c text", "{\"rank\": 1}"};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        fp_report got;
        CHECK_EQ(fp_report_read(others[i], &got), 0);
    }
}

int
main(void)
{
    test_a_report_is_read_as_it_is_written();
    test_other_texts_are_no_reports();
    return check_result();
}
