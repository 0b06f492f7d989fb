// tensor/fp_watch.hpp -- which streams wait for the collectives of groups that are watched.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tensor/fp_watch.h"

namespace fp {

// The current stream of device waits for a collective of group.
void note_waiting(const c10d::ProcessGroup &group, const c10::Device &device);

} // namespace fp
