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

// Plain dense CPU tensors as the core reads them.
struct Sources {
    std::vector<fp_segment> segments; // no data where a piece is undefined or lies otherwise than its view
    std::vector<size_t> strided;      // the latter
};
// Throws ValueError for a piece whose memory was freed.
Sources sources_of(const Geometry &geometry, const std::vector<at::Tensor> &pieces);

// Whether the core converts from and to dtype; it copies any.
bool is_known_to_core(at::ScalarType dtype);

// The segments of sources into target in one pass over memory, both on the CPU; between them zeros, or for a plain copy
// the item at fill. false: not for these dtypes.
bool pack(const at::Tensor &target, at::ScalarType source_dtype, const std::vector<fp_segment> &segments,
          const How &how, const void *fill = nullptr);

// target (+)= the pieces at their places * scale, by kernels that each take many tensors; zeros where there is none. false:
// nothing was done, some piece is not plain or not on target's device.
bool pack_batched(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces,
                  const How &how);

// target (+)= source * scale, by torch's operations.
void convert_by_ops(const at::Tensor &target, const at::Tensor &source, const How &how);

// The same, both 1-D and equally long; in one pass where both are on the CPU.
void convert(const at::Tensor &target, const at::Tensor &source, const How &how);

} // namespace fp
