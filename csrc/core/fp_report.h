/* core/fp_report.h -- the text in which a rank reports a collective, or an exception, to the others through their store:
 * "rank step event text". _C.write_report() writes it. Pure C11: no Python.h, no torch. */
#pragma once

#include <stdint.h>

typedef struct {
    int64_t rank;     /* in the world */
    int64_t step;     /* the pass of that rank */
    uint64_t event;   /* 2 * the event of its trace + (1 if it is the first of a pass); of an exception 0 */
    const char *text; /* borrowed from the text that was read */
} fp_report;

/* 1: *report is filled; 0: said is no report. */
int fp_report_read(const char *said, fp_report *report);
