// tensor/fp_convert.hpp -- copy, convert and add dense tensors in one pass over memory: on the CPU by the core's kernels, on an
// accelerator by ours (fp_launch.hpp), else by torch's operations. The GIL may be held or not; autograd is off (Plainly).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tensor/fp_bridge.hpp"

extern "C" {
#include "core/fp_pack.h"
}

namespace fp {

// The arithmetic of the functions below: target = source, or target += source, in target's dtype.
struct How {
    std::optional<double> scale; // multiply source by it, in target's dtype
    bool accumulate = false;     // add to the elements of target
};

// The functions below write target (+)= f(source), where (+)= is = or +=. Unless they say otherwise they throw ValueError,
// before they write, if source or target has less memory than it needs.

// The core's number of a dtype; none: the core copies elements of this dtype, and does not convert them.
std::optional<fp_dtype> core_dtype(at::ScalarType dtype);

// Pack segments of source_dtype into target, 1-D and contiguous, both on the CPU, in one pass and several threads. The gaps
// become zeros; in a plain copy they become the item at fill, of target's dtype. false: the core has no kernel for these
// dtypes, and nothing was done. It does not check memory.
bool pack(const at::Tensor &target, at::ScalarType source_dtype, const std::vector<fp_segment> &segments,
          const How &how, const void *fill = nullptr);

// target (+)= pieces * scale, each piece at its place of geometry; zeros where there is no piece. An undefined piece counts as
// zeros. It is one pass if all pieces are plain, on the CPU and of the dtype in options; else kernels, ours or torch's, that
// each take many tensors; else torch's operations with options. name: the unit's name for errors; or null.
void pack_pieces(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces,
                 const at::TensorOptions &options, const How &how, const char *name = nullptr);

// target (+)= source * scale, both 1-D and equally long; one pass if both are on the CPU, or the device has kernels.
void convert(const at::Tensor &target, const at::Tensor &source, const How &how);

// tensor / divisor, rounded to tensor's dtype and then to dtype. tensor may be changed, and returned.
at::Tensor divided(at::Tensor tensor, double divisor, at::ScalarType dtype);

// target += tensor / divisor, rounded to tensor's dtype before. tensor may be changed.
void add_divided(const at::Tensor &target, const at::Tensor &tensor, double divisor);

} // namespace fp
