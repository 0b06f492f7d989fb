// tensor/fp_launch.hpp -- pack, measure and scale tensors of an accelerator by our kernels (cuda/fp_kernels.h), in few launches
// on the current stream. The host does not wait. The GIL may be held or not.
//
// A function returns false, or an undefined tensor, with nothing done, if the device has no kernels or they cannot take one of
// the tensors. The caller then uses torch's operations. If a launch fails, RuntimeError is thrown.
#pragma once

#include "tensor/fp_convert.hpp"

extern "C" {
#include "cuda/fp_kernels.h"
}

namespace fp {

// target (+)= pieces * scale, each piece at its place of geometry; zeros where there is no piece. An undefined piece counts as
// zeros. See How in fp_convert.hpp.
bool launch_pack(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces,
                 const How &how);

// target (+)= (source * before, rounded to source's dtype) * scale; both contiguous and equally long.
bool launch_convert(const at::Tensor &target, const at::Tensor &source, const How &how, double before = 1.0);

// The sum of the squares (is_max: the largest magnitude) of all elements of tensors, which are on one device: a 0-dim tensor of
// dtype on it.
at::Tensor launch_norm(const std::vector<at::Tensor> &tensors, bool is_max, at::ScalarType dtype);

// tensors *= factor, a 0-dim tensor on their device in fp32 or fp64, rounded to the dtype of each tensor first.
bool launch_scale(const std::vector<at::Tensor> &tensors, const at::Tensor &factor);

// The number of the CUDA graph that is captured on stream; 0: none. No value: the device has no kernels, so CUDA cannot be
// asked.
std::optional<uint64_t> capture_on(const c10::Stream &stream);

// While one lives, this thread may query device and wait for it, even while another thread captures a CUDA graph: the capture
// does not fail by it. It has no effect if the device has no kernels.
class SparedCaptures {
  public:
    explicit SparedCaptures(const c10::Device &device);
    SparedCaptures(const SparedCaptures &) = delete;
    SparedCaptures &operator=(const SparedCaptures &) = delete;
    ~SparedCaptures();

  private:
    const fp_kernels *kernels_;
    int mode_ = 0; // the mode of captures to restore
};

} // namespace fp
