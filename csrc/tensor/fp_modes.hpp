// tensor/fp_modes.hpp -- hide operations of the runtime from selective activation checkpoints (torch.utils.checkpoint).
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>

namespace fp {

// While one lives, no selective activation checkpoint sees the operations of this thread. Such a checkpoint is a dispatch mode
// that saves the results of operations in the forward, and returns them when the forward is recomputed. A saved gather would
// not run again, and the memory that was freed since would have no values. Other modes still see the operations. The GIL is
// held when it is made and destroyed.
class HiddenCheckpoints {
    std::optional<c10::impl::TorchDispatchModeTLS> before; // the modes to restore; none: there was no checkpoint

  public:
    HiddenCheckpoints();
    HiddenCheckpoints(const HiddenCheckpoints &) = delete;
    HiddenCheckpoints &operator=(const HiddenCheckpoints &) = delete;
    ~HiddenCheckpoints();
};

} // namespace fp
