/* core/fp_status.h -- the result codes of the core. Pure C11: no Python.h, no torch. */
#pragma once

typedef enum {
    FP_OK = 0,
    FP_EINVAL,    /* an argument is outside its range; nothing was written */
    FP_EOVERFLOW, /* a size does not fit int64_t; nothing was written */
    FP_ENOMEM,    /* an allocation failed; nothing was written */
    FP_ESTATE,    /* a move that the life cycle of a unit does not allow */
} fp_status;
