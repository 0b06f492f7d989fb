/* tensor/fp_pulse.h -- a sign of life: a thread that answers other processes while Python does not come to it, because it
 * computes or holds the GIL. A process that does not answer is stopped, gone or out of reach. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

typedef struct fp_pulse fp_pulse;

/* Looks every interval seconds into the store of the process group that torch registered as group, at call below prefix,
 * and sets answer below prefix to what is new there. Ends when the group is destroyed or its store is gone. NULL with an
 * exception. */
fp_pulse *fp_pulse_start(const char *group, const char *prefix, const char *answer, double interval);
void fp_pulse_stop(fp_pulse *pulse);

FP_END_C
