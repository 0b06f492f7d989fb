// tensor/fp_modes.hpp -- hide operations of the runtime from selective activation checkpoints.
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>

namespace fp {

// While one lives, no selective activation checkpoint sees the operations of this thread. Such a mode of torch.utils.checkpoint
// saves the results of operations in the forward, and returns them when the forward is recomputed. A saved gather would not run
// again, and the memory that was freed since would stay empty. The GIL is held at both ends.
class HiddenCheckpoints {
    std::optional<c10::impl::TorchDispatchModeTLS> before; // the modes to restore; none: there was no checkpoint

  public:
    HiddenCheckpoints();
    HiddenCheckpoints(const HiddenCheckpoints &) = delete;
    HiddenCheckpoints &operator=(const HiddenCheckpoints &) = delete;
    ~HiddenCheckpoints();
};

} // namespace fp
