// tensor/fp_launch.cpp -- see fp_launch.hpp.
#include "tensor/fp_launch.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/select.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace fp {
namespace {

// The kernels, and the type of accelerator that they are for.
struct InUse {
    const fp_kernels *kernels = &fp_cuda_kernels;
    c10::DeviceType type = c10::kCUDA;
} in_use;

// The kernels for device; null: none. The guard makes device the current one, as CUDA is asked about that.
const fp_kernels *
kernels_of(const c10::Device &device)
{
    if (in_use.kernels == nullptr || device.type() != in_use.type) {
        return nullptr;
    }
    const c10::DeviceGuard guard(device);
    return in_use.kernels->works(device.index()) ? in_use.kernels : nullptr;
}

// The handle of a stream for CUDA; it has another name from torch 2.14 on.
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

// The table of tensors for launches, all of them plain and on one device.
class Pieces {
  public:
    explicit Pieces(const c10::Device &device) : device_(device) {}

    // Add a tensor at element `start` of a flat buffer, or as the next one of a list. false: kernels cannot take it.
    bool add(const at::Tensor &tensor, std::optional<int64_t> start)
    {
        const std::optional<fp_dtype> dtype = dtype_of(tensor);
        if (!dtype || !tensor.is_non_overlapping_and_dense()) {
            return false;
        }
        put(tensor, *dtype, start);
        return true;
    }

    // Add a tensor at view's place and in view's order, whatever strides it has: as dimensions from the slowest, merged if
    // adjacent.
    bool add(const at::Tensor &tensor, const View &view)
    {
        if (same_layout(tensor, view)) {
            return add(tensor, view.offset);
        }
        const std::optional<fp_dtype> dtype = dtype_of(tensor);
        if (!dtype || tensor.sizes() != c10::IntArrayRef(view.shape) || view.numel > UINT32_MAX) {
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

    size_t count() const
    {
        return pieces_.size();
    }

    // Split the pieces, in order, into runs whose tables fit into the arguments of a launch: call(first piece, end) for each.
    template <class Call> void for_each_run(const fp_kernels &kernels, Call &&call) const
    {
        size_t first = 0, bytes = 0;
        for (size_t i = 0; i < pieces_.size(); i++) {
            const size_t more = bytes_of(pieces_[i]);
            if (bytes + more > kernels.argument_bytes) {
                call(first, i);
                first = i;
                bytes = 0;
            }
            bytes += more;
        }
        call(first, pieces_.size());
    }

    // The first element of piece i, and the one behind its last.
    int64_t start_of(size_t i) const
    {
        return pieces_[i].start;
    }
    int64_t end_of(size_t i) const
    {
        return pieces_[i].start + pieces_[i].numel;
    }

    // Queue one launch of a kernel on the current stream, for pieces [first, stop). Their starts in its table are `base` less.
    // RuntimeError if the launch fails.
    template <class Job>
    void launch(const fp_kernels &kernels, int (*kernel)(const Job *, const fp_table *, void *), const Job &job,
                size_t first, size_t stop, int64_t base) const
    {
        const c10::DeviceGuard guard(device_);
        const size_t n = stop - first;
        size_t bytes = 0;
        for (size_t i = first; i < stop; i++) {
            bytes += bytes_of(pieces_[i]);
        }
        std::vector<unsigned char> memory(bytes);
        auto *const pieces = reinterpret_cast<fp_piece *>(memory.data());
        auto *const dims = reinterpret_cast<fp_piece_dim *>(pieces + n), *next = dims;
        for (size_t i = 0; i < n; i++) {
            const fp_piece &piece = pieces_[first + i];
            pieces[i] = piece;
            pieces[i].start -= base;
            pieces[i].first_dim = static_cast<uint32_t>(next - dims);
            next = std::copy_n(dims_.begin() + piece.first_dim, piece.ndim, next);
        }
        const fp_table table = {.memory = memory.data(), .bytes = memory.size(), .n = static_cast<uint32_t>(n)};
        const c10::impl::VirtualGuardImpl streams(device_.type());
        const c10::Stream stream = streams.getStream(device_);
        if (!device_.is_cuda()) { // a kernel of a test, which runs at once
            streams.synchronizeStream(stream);
        }
        const int error = kernel(&job, &table, device_.is_cuda() ? handle_of(stream) : nullptr);
        TORCH_CHECK(error == 0, "flatparam: a kernel could not be launched on ", device_, ": ", kernels.message(error));
    }

  private:
    // The core's dtype of tensor; none: kernels cannot take it.
    std::optional<fp_dtype> dtype_of(const at::Tensor &tensor) const
    {
        const bool is_ours = is_plain_tensor(tensor) && tensor.device() == device_;
        return is_ours ? core_dtype(tensor.scalar_type()) : std::nullopt;
    }

    static size_t bytes_of(const fp_piece &piece)
    {
        return sizeof(fp_piece) + piece.ndim * sizeof(fp_piece_dim);
    }

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

// Pack in one launch for each run. A run also fills the padding before its first piece, and the last run the padding at the
// end.
void
pack_into(const at::Tensor &target, const fp_kernels &kernels, const Pieces &pieces, const How &how, double before)
{
    pieces.for_each_run(kernels, [&](size_t first, size_t stop) {
        const bool is_last = stop == pieces.count();
        pieces.launch(kernels, kernels.pack,
                      fp_pack_job{.flat = target.mutable_data_ptr(),
                                  .begin = first == 0 ? 0 : pieces.end_of(first - 1),
                                  .end = is_last ? target.numel() : pieces.end_of(stop - 1),
                                  .before = before,
                                  .scale = how.scale.value_or(1.0),
                                  .has_scale = how.scale.has_value(),
                                  .accumulate = how.accumulate,
                                  .dtype = *core_dtype(target.scalar_type())},
                      first, stop, 0);
    });
}

// For each run of a list: call(first piece, end, the base of its table, its elements from there on).
template <class Call>
void
for_each_list(const fp_kernels &kernels, const Pieces &list, Call &&call)
{
    list.for_each_run(kernels, [&](size_t first, size_t stop) {
        if (first < stop) {
            const int64_t base =
                list.start_of(first) / FP_LIST_WIDTH * FP_LIST_WIDTH; // keeps the alignment of the pieces
            call(first, stop, base, list.end_of(stop - 1) - base);
        }
    });
}

} // namespace

std::optional<uint64_t>
capture_on(const c10::Stream &stream)
{
    const fp_kernels *kernels = stream.device().is_cuda() ? kernels_of(stream.device()) : nullptr;
    return kernels == nullptr ? std::nullopt : std::optional<uint64_t>(kernels->capture(handle_of(stream)));
}

SparedCaptures::SparedCaptures(const c10::Device &device)
    : kernels_(device.type() == in_use.type ? in_use.kernels : nullptr)
{
    if (kernels_ != nullptr) {
        mode_ = kernels_->set_capture_mode(FP_CAPTURE_MODE_RELAXED);
    }
}

SparedCaptures::~SparedCaptures()
{
    if (kernels_ != nullptr) {
        (void)kernels_->set_capture_mode(mode_);
    }
}

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
    if (kernels == nullptr || !list_all(list, tensors) || list.count() == 0) {
        return at::Tensor();
    }
    const at::TensorOptions options = at::TensorOptions().device(device);
    int64_t runs = 0;
    int64_t blocks = 0;
    for_each_list(*kernels, list, [&](size_t, size_t, int64_t, int64_t numel) {
        runs++;
        blocks = std::max<int64_t>(blocks, fp_norm_blocks(numel));
    });
    const bool in_fp64 = runs > 1 || dtype == at::kDouble; // several runs are added before they are rounded
    const at::Tensor results = at::empty({runs}, options.dtype(in_fp64 ? at::kDouble : at::kFloat));
    const at::Tensor partials = at::empty({blocks + 1}, options.dtype(at::kDouble));
    auto *result = static_cast<unsigned char *>(results.mutable_data_ptr());
    for_each_list(*kernels, list, [&](size_t first, size_t stop, int64_t base, int64_t numel) {
        list.launch(*kernels, kernels->norm,
                    fp_norm_job{.end = numel,
                                .partials = partials.mutable_data_ptr<double>(),
                                .result = result,
                                .is_max = is_max,
                                .in_fp64 = in_fp64},
                    first, stop, base);
        result += results.element_size();
    });
    return (runs == 1 ? results[0] : is_max ? results.amax() : results.sum()).to(dtype);
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
    for_each_list(*kernels, list, [&](size_t first, size_t stop, int64_t base, int64_t numel) {
        list.launch(*kernels, kernels->scale,
                    fp_scale_job{.end = numel, .factor = factor.const_data_ptr(), .in_fp64 = in_fp64}, first, stop,
                    base);
    });
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
