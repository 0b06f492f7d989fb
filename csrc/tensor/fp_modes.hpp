// tensor/fp_modes.hpp -- what flatparam does for a forward is no part of it: a selective checkpoint does not keep it.
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>

namespace fp {

// While one lives, operations of this thread are seen by no selective activation checkpoint. Such a mode of
// torch.utils.checkpoint keeps what operations of a forward gave, and gives that instead of doing them again when the
// forward is recomputed: a gather that it kept would leave memory that was freed since as it is. The GIL is held.
class HiddenCheckpoints {
    std::optional<c10::impl::TorchDispatchModeTLS> before; // if there were any

  public:
    HiddenCheckpoints();
    HiddenCheckpoints(const HiddenCheckpoints &) = delete;
    HiddenCheckpoints &operator=(const HiddenCheckpoints &) = delete;
    ~HiddenCheckpoints();
};

} // namespace fp
