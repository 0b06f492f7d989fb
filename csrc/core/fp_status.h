/* core/fp_status.h -- the result codes of the core. Pure C11: no Python.h, no torch. After a failure nothing was written,
 * unless a function says otherwise. fp_fail() (python/fp_args.h) turns a code into an exception. */
#pragma once

typedef enum {
    FP_OK = 0,
    FP_EINVAL,    /* an argument is outside its range */
    FP_EOVERFLOW, /* a size does not fit int64_t */
    FP_ENOMEM,    /* an allocation failed */
    FP_ESTATE,    /* a move that is illegal in this state (core/fp_state.h) */
} fp_status;
