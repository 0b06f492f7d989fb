/* core/fp_status.c -- the words for the result codes. */
#include "core/fp_status.h"

const char *
fp_status_message(fp_status status)
{
    switch (status) {
        case FP_OK:
            return "no error";
        case FP_EINVAL:
            return "an argument is out of range";
        case FP_EOVERFLOW:
            return "a size does not fit 64 bits";
        case FP_ENOMEM:
            return "out of memory";
        case FP_ESTATE:
            return "the life cycle does not allow this move";
    }
    return "unknown status";
}
