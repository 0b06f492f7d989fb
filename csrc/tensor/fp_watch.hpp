// tensor/fp_watch.hpp -- what groups that are watched have to do: whether a device, or the host, waits for other ranks.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tensor/fp_watch.h"

namespace fp {

// From its making to its end, a collective over group makes its communicator, if is_first.
class Connecting {
  public:
    Connecting(const c10d::ProcessGroup &group, bool is_first);
    Connecting(const Connecting &) = delete;
    Connecting &operator=(const Connecting &) = delete;
    ~Connecting();

  private:
    const c10d::ProcessGroup *group_; // null: it is not the first
};

// A collective over group was begun. No stream waits for it yet.
void note_begun(const c10d::ProcessGroup &group, const c10::intrusive_ptr<c10d::Work> &work);

// The current stream of device waits for it. work: null if Python has begun it.
void note_waiting(const c10d::ProcessGroup &group, const c10d::Work *work, const c10::Device &device);

} // namespace fp
