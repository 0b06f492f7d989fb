// tensor/fp_launch.hpp -- tensors of an accelerator packed, measured and scaled by its kernels, each in one launch that is
// queued on the current stream. Nothing is done, and false returned, where the device has no kernels or they do not take
// some tensor: then torch's operations do it.
#pragma once

#include "tensor/fp_convert.hpp"

extern "C" {
#include "cuda/fp_kernels.h"
}

namespace fp {

// target (+)= the pieces at their places * scale; zeros where there is none.
bool launch_pack(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces,
                 const How &how);

// target (+)= source * before, in source's dtype, * scale; both contiguous and equally long.
bool launch_convert(const at::Tensor &target, const at::Tensor &source, const How &how, double before = 1.0);

// The sum of the squares, or the largest magnitude, of all elements in a 0-dim tensor of their device; undefined: not done.
at::Tensor launch_norm(const std::vector<at::Tensor> &tensors, bool is_max, at::ScalarType dtype);

// tensors *= factor, a 0-dim one of their device in fp32 or fp64, rounded to the dtype of each before.
bool launch_scale(const std::vector<at::Tensor> &tensors, const at::Tensor &factor);

// Which graph is captured on a stream; 0: none. Nullopt: CUDA cannot be asked, as the device has no kernels.
std::optional<uint64_t> capture_on(const c10::Stream &stream);

// From its making to its end, what the calling thread asks of device, or waits for, spoils no capture of another thread, nor
// fails because of one. Nothing changes where the device has no kernels.
class SparedCaptures {
  public:
    explicit SparedCaptures(const c10::Device &device);
    SparedCaptures(const SparedCaptures &) = delete;
    SparedCaptures &operator=(const SparedCaptures &) = delete;
    ~SparedCaptures();

  private:
    const fp_kernels *kernels_;
    int mode_ = 0; // before
};

} // namespace fp
