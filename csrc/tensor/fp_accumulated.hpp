// tensor/fp_accumulated.hpp -- the gradient that one flat parameter accumulates over micro-batches, and its copy in host memory
// between backwards (offload). The GIL protects it. name: of the unit, in errors; null: there is none yet.
//
//   tensor undefined, !on_host   there is none
//   tensor                       it lies on the device that computes
//   on_host                      host has the values, and the device has none, or a copy that is on its way (coming)
#pragma once

#include "tensor/fp_streams.hpp"

namespace fp {

struct Accumulated {
    at::Tensor tensor;
    Home home;       // of the memory of tensor and coming
    at::Tensor host; // pinned beside an accelerator; kept for the next offload
    bool on_host = false;
    std::optional<Mark> has_left; // after the copy to host
    at::Tensor coming;            // a copy of host on the device, started ahead of its use
    std::optional<Mark> has_come; // after that copy

    bool exists() const
    {
        return tensor.defined() || on_host;
    }

    // Take made as the gradient, whose memory was allocated now.
    void put(at::Tensor made);

    // If it lies in host memory, move it to tensor on device. The current stream waits for the copy.
    void reload(const c10::Device &device, const char *name);

    // If it lies in host memory, start to copy it to coming.
    void start_reload(const c10::Device &device, const char *name);

    // Drop the copy that reload() would use. The current stream waits for it, as it may use the memory next.
    void drop_reload();

    // Move tensor to host memory.
    void offload(const char *name);

    // Tell the allocator that the current stream uses tensor: see Home::share().
    void share() const;

    // There is none any more. Does not throw.
    void drop();
};

} // namespace fp
