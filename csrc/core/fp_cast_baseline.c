/* core/fp_cast_baseline.c -- the kernels in plain C, for every processor. */
#define FP_TABLE fp_cast_baseline
#define FP_TARGET
#include "core/fp_cast_kernels.h"
