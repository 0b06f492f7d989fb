// tensor/fp_convert.hpp -- copying, converting and adding dense tensors in one pass over memory, by the core's kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tensor/fp_bridge.hpp"

extern "C" {
#include "core/fp_pack.h"
}

namespace fp {

// What converting and packing do to the elements of target.
struct How {
    std::optional<double> scale; // multiply by it, in target's dtype
    bool accumulate = false;     // add to target
};

// What follows throws ValueError for a source or target that is freed or too small.

// The core's name for a dtype that it converts from and to; it copies any.
std::optional<fp_dtype> core_dtype(at::ScalarType dtype);

// The segments of sources into target in one pass over memory, both on the CPU; between them zeros, or for a plain copy
// the item at fill. false: not for these dtypes.
bool pack(const at::Tensor &target, at::ScalarType source_dtype, const std::vector<fp_segment> &segments,
          const How &how, const void *fill = nullptr);

// target (+)= the pieces at their places * scale; zeros where there is none. In one pass where all is plain, on the CPU and
// of the dtype in options; else by kernels, ours or torch's, that each take many tensors; else by torch's operations on what
// options describe. name: of the unit in errors, or null.
void pack_pieces(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces,
                 const at::TensorOptions &options, const How &how, const char *name = nullptr);

// target (+)= source * scale, both 1-D and equally long; in one pass where both are on the CPU or the device has kernels.
void convert(const at::Tensor &target, const at::Tensor &source, const How &how);

// tensor / divisor, rounded to its dtype, as dtype. Here and in the next one tensor may be changed.
at::Tensor divided(at::Tensor tensor, double divisor, at::ScalarType dtype);

// target += that, as target's dtype.
void add_divided(const at::Tensor &target, const at::Tensor &tensor, double divisor);

} // namespace fp
