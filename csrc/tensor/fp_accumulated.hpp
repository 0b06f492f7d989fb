// tensor/fp_accumulated.hpp -- the gradient that one flat parameter accumulates over micro-batches, and its copy in host memory
// between backwards (offload). fp_flat_buffer owns it; the GIL protects it. name: the unit's name for errors, or null. A user
// may have freed the memory, which .grad shows: then reload() and offload() throw ValueError, and nothing is changed.
//
//   tensor defined   on_host   the accumulated gradient
//   no               false     there is none
//   yes              false     lies in tensor, on the device that computes
//   no               true      lies in host; coming is a copy of it on the device, if start_reload() was called
#pragma once

#include "tensor/fp_streams.hpp"

namespace fp {

struct Accumulated {
    at::Tensor tensor;
    Home home;       // of the memory of tensor, or of coming
    at::Tensor host; // pinned beside an accelerator; kept for the next offload
    bool on_host = false;
    std::optional<Mark> has_left; // after the copy to host
    at::Tensor coming;            // a copy of host on the device, started ahead of its use
    std::optional<Mark> has_come; // after that copy

    bool exists() const
    {
        return tensor.defined() || on_host;
    }

    // Let made, whose memory was allocated now, be the gradient.
    void put(at::Tensor made);

    // If the gradient lies in host memory, let tensor be a copy of it on device. The current stream waits for the copy.
    void reload(const c10::Device &device, const char *name);

    // If the gradient lies in host memory, start to copy it to coming, ahead of reload().
    void start_reload(const c10::Device &device, const char *name);

    // Drop coming; host still has the values. The current stream waits for the copy, as it may use the memory next.
    void drop_reload();

    // Copy tensor to host, and undefine it.
    void offload(const char *name);

    // Tell the allocator that the current stream uses tensor: see Home::share().
    void share() const;

    // Drop the gradient. Does not throw.
    void drop();
};

} // namespace fp
