/* core/fp_report.c -- see fp_report.h. */
#include "core/fp_report.h"

#include <errno.h>
#include <stdlib.h>

/* Read digits and the space after them. Returns the rest; NULL: text does not begin so, or the number is too large. */
static const char *
read_number(const char *text, uint64_t most, uint64_t *number)
{
    char *end;
    if (*text < '0' || *text > '9') {
        return NULL;
    }
    errno = 0;
    *number = strtoull(text, &end, 10);
    return errno == 0 && *number <= most && *end == ' ' ? end + 1 : NULL;
}

int
fp_report_read(const char *said, fp_report *report)
{
    uint64_t rank, step, event;
    const char *text = read_number(said, INT64_MAX, &rank);
    if (text != NULL) {
        text = read_number(text, INT64_MAX, &step);
    }
    if (text != NULL) {
        text = read_number(text, UINT64_MAX, &event);
    }
    if (text == NULL) {
        return 0;
    }
    *report = (fp_report){.rank = (int64_t)rank, .step = (int64_t)step, .event = event, .text = text};
    return 1;
}
