// tensor/fp_launch.cpp -- see fp_launch.hpp.
#include "tensor/fp_launch.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

extern "C" {
#include "cuda/fp_kernels.h"
}

namespace fp {
namespace {

// The kernels of the one type of accelerator that has some.
struct InUse {
#ifdef FLATPARAM_CUDA
    const fp_kernels *kernels = &fp_cuda_kernels;
#else
    const fp_kernels *kernels = nullptr;
#endif
    c10::DeviceType type = c10::kCUDA;
} in_use;

// Null where there are none. The guard makes device the current one.
const fp_kernels *
kernels_of(const c10::Device &device)
{
    if (in_use.kernels == nullptr || device.type() != in_use.type) {
        return nullptr;
    }
    const c10::DeviceGuard guard(device);
    return in_use.kernels->works(device.index()) ? in_use.kernels : nullptr;
}

// A stream's handle has another name from torch 2.14 on.
template <class Stream>
void *
handle_of(const Stream &stream)
{
    if constexpr (requires { stream.native_handle(); }) {
        return stream.native_handle();
    }
    else {
        return stream.stream_handle();
    }
}

// What one launch is told of its tensors, all of them plain and on one device.
class Pieces {
  public:
    explicit Pieces(const c10::Device &device) : device_(device) {}

    // One piece at `start` of a flat buffer, or next in a list; false: not one that kernels take.
    bool add(const at::Tensor &tensor, std::optional<int64_t> start)
    {
        const std::optional<fp_dtype> dtype = core_dtype(tensor.scalar_type());
        if (!dtype || !is_plain_tensor(tensor) || tensor.device() != device_ ||
            !tensor.is_non_overlapping_and_dense()) {
            return false;
        }
        put(tensor, *dtype, start);
        return true;
    }

    // The same laid out in the order of view, which is dense, whatever strides tensor has.
    bool add(const at::Tensor &tensor, const View &view)
    {
        if (same_layout(tensor, view)) {
            return add(tensor, view.offset);
        }
        const std::optional<fp_dtype> dtype = core_dtype(tensor.scalar_type());
        if (!dtype || !is_plain_tensor(tensor) || tensor.device() != device_ ||
            tensor.sizes() != c10::IntArrayRef(view.shape) || view.numel > UINT32_MAX) {
            return false;
        }
        std::vector<size_t> order;
        for (size_t d = 0; d < view.shape.size(); d++) {
            if (view.shape[d] > 1) {
                order.push_back(d);
            }
        }
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return view.stride[a] > view.stride[b]; });
        put(tensor, *dtype, view.offset);
        const size_t first = dims_.size();
        for (const size_t d : order) {
            const fp_piece_dim dim = {.numel = view.shape[d], .stride = tensor.strides()[d]};
            if (dims_.size() > first && dims_.back().stride == dim.numel * dim.stride) {
                dims_.back() = {.numel = dims_.back().numel * dim.numel, .stride = dim.stride};
            }
            else {
                dims_.push_back(dim);
            }
        }
        pieces_.back().first_dim = static_cast<uint32_t>(first);
        pieces_.back().ndim = static_cast<uint16_t>(dims_.size() - first);
        return true;
    }

    int64_t end() const
    {
        return end_;
    }

    // Queue one launch of a kernel on the current stream. Throws if that fails.
    template <class Job>
    void launch(const fp_kernels &kernels, int (*kernel)(const Job *, const fp_table *, void *), const Job &job) const
    {
        const c10::DeviceGuard guard(device_);
        std::vector<unsigned char> memory(pieces_.size() * sizeof(fp_piece) + dims_.size() * sizeof(fp_piece_dim));
        fp_table table = {
            .memory = memory.data(), .bytes = memory.size(), .n = static_cast<uint32_t>(pieces_.size()), .resident = 0};
        if (!pieces_.empty()) {
            std::memcpy(memory.data(), pieces_.data(), pieces_.size() * sizeof(fp_piece));
        }
        if (!dims_.empty()) {
            std::memcpy(memory.data() + pieces_.size() * sizeof(fp_piece), dims_.data(),
                        dims_.size() * sizeof(fp_piece_dim));
        }
        at::Tensor there; // freed in the order of the stream
        if (table.bytes > kernels.argument_bytes) {
            const auto bytes = static_cast<int64_t>(table.bytes);
            const at::Tensor pinned = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
            std::memcpy(pinned.mutable_data_ptr(), table.memory, table.bytes);
            there = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
            there.copy_(pinned, /*non_blocking=*/true); // torch keeps pinned until it is copied
            table.memory = there.const_data_ptr();
            table.resident = 1;
        }
        const c10::impl::VirtualGuardImpl streams(device_.type());
        const c10::Stream stream = streams.getStream(device_);
        if (!device_.is_cuda()) { // a kernel of a test, which runs at once
            streams.synchronizeStream(stream);
        }
        const int error = kernel(&job, &table, device_.is_cuda() ? handle_of(stream) : nullptr);
        TORCH_CHECK(error == 0, "flatparam: a kernel could not be launched on ", device_, ": ", kernels.message(error));
    }

  private:
    void put(const at::Tensor &tensor, fp_dtype dtype, std::optional<int64_t> start)
    {
        if (tensor.numel() == 0) {
            return;
        }
        check_memory(tensor);
        const void *data = tensor.const_data_ptr();
        const int64_t first = start.value_or(fp_list_start(end_, data, dtype));
        pieces_.push_back({.data = data,
                           .start = first,
                           .numel = tensor.numel(),
                           .first_dim = 0,
                           .ndim = 0,
                           .dtype = static_cast<uint16_t>(dtype)});
        end_ = first + tensor.numel();
    }

    c10::Device device_;
    std::vector<fp_piece> pieces_;
    std::vector<fp_piece_dim> dims_;
    int64_t end_ = 0;
};

bool
list_all(Pieces &list, const std::vector<at::Tensor> &tensors)
{
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](const at::Tensor &tensor) { return list.add(tensor, std::nullopt); });
}

void
pack_into(const at::Tensor &target, const fp_kernels &kernels, const Pieces &pieces, const How &how, double before)
{
    pieces.launch(kernels, kernels.pack,
                  fp_pack_job{.flat = target.mutable_data_ptr(),
                              .begin = 0,
                              .end = target.numel(),
                              .before = before,
                              .scale = how.scale.value_or(1.0),
                              .has_scale = how.scale.has_value(),
                              .accumulate = how.accumulate,
                              .dtype = *core_dtype(target.scalar_type())});
}

} // namespace

bool
launch_pack(const at::Tensor &target, const Geometry &geometry, const std::vector<at::Tensor> &pieces, const How &how)
{
    const fp_kernels *kernels = kernels_of(target.device());
    if (kernels == nullptr || !core_dtype(target.scalar_type())) {
        return false;
    }
    Pieces all(target.device());
    for (size_t i = 0; i < pieces.size(); i++) {
        if (pieces[i].defined() && !all.add(pieces[i], geometry.views[i])) {
            return false;
        }
    }
    pack_into(target, *kernels, all, how, 1.0);
    return true;
}

bool
launch_convert(const at::Tensor &target, const at::Tensor &source, const How &how, double before)
{
    const fp_kernels *kernels = kernels_of(target.device());
    Pieces all(target.device());
    if (kernels == nullptr || !core_dtype(target.scalar_type()) || !target.is_contiguous() || !source.is_contiguous() ||
        !all.add(source, 0)) {
        return false;
    }
    pack_into(target, *kernels, all, how, before);
    return true;
}

at::Tensor
launch_norm(const std::vector<at::Tensor> &tensors, bool is_max, at::ScalarType dtype)
{
    const c10::Device device = tensors.empty() ? c10::Device(c10::kCPU) : tensors[0].device();
    const fp_kernels *kernels = kernels_of(device);
    Pieces list(device);
    if (kernels == nullptr || !list_all(list, tensors) || list.end() == 0) {
        return at::Tensor();
    }
    const at::TensorOptions options = at::TensorOptions().device(device);
    const at::Tensor result = at::empty({}, options.dtype(dtype));
    const at::Tensor partials = at::empty({fp_norm_blocks(list.end()) + int64_t{1}}, options.dtype(at::kDouble));
    list.launch(*kernels, kernels->norm,
                fp_norm_job{.end = list.end(),
                            .partials = partials.mutable_data_ptr<double>(),
                            .result = result.mutable_data_ptr(),
                            .is_max = is_max,
                            .in_fp64 = dtype == at::kDouble});
    return result;
}

bool
launch_scale(const std::vector<at::Tensor> &tensors, const at::Tensor &factor)
{
    const fp_kernels *kernels = kernels_of(factor.device());
    const bool in_fp64 = factor.scalar_type() == at::kDouble;
    Pieces list(factor.device());
    if (kernels == nullptr || (!in_fp64 && factor.scalar_type() != at::kFloat) || !list_all(list, tensors)) {
        return false;
    }
    list.launch(*kernels, kernels->scale,
                fp_scale_job{.end = list.end(), .factor = factor.const_data_ptr(), .in_fp64 = in_fp64});
    for (const at::Tensor &tensor : tensors) {
        tensor.unsafeGetTensorImpl()->bump_version();
    }
    return true;
}

} // namespace fp

void
fp_torch_use_kernels(const fp_kernels *kernels)
{
    fp::in_use.kernels = kernels;
    fp::in_use.type = c10::DeviceType::PrivateUse1;
}
