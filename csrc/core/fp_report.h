/* core/fp_report.h -- the report of a rank about a collective, or an exception, which the other ranks read in their store. It
 * is the text "rank step event text", with three decimal numbers. _C.write_report() writes it; desync/fp_watch.cpp and
 * _C.read_report() read it. Pure C11: no Python.h, no torch. Nothing is allocated; safe without the GIL. */
#pragma once

#include <stdint.h>

typedef struct {
    int64_t rank;     /* in the world */
    int64_t step;     /* passes that this rank had begun */
    uint64_t event;   /* 2 * the event in its trace (core/fp_trace.h) + (1 if it is the first of a pass); of an
                     * exception: how many that rank has raised in this step */
    const char *text; /* words for people, UTF-8; points into the text that fp_report_read() took */
} fp_report;

/* Read a terminated text, which may come from another version or program. 1: *report is filled, and borrows said; 0: said is
 * no report, and nothing is written. */
int fp_report_read(const char *said, fp_report *report);
