// tensor/fp_offload.cpp -- accumulated gradients of one flat parameter in host memory between backwards.
#include <ATen/ops/empty.h>

#include "tensor/fp_flat_buffer.hpp"

namespace fp {
namespace {

// Start the copy of what lies in host memory to the device.
void
bring_back(fp_flat_buffer &flat)
{
    if (!flat.host_valid || flat.ahead.defined()) {
        return;
    }
    const c10::Device device = flat.full.device();
    flat.ahead = at::empty(flat.host.sizes(), flat.host.options().pinned_memory(false).device(device));
    if (has_streams(flat.ahead)) {
        flat.has_come = copy_over(flat.ahead, flat.host, device);
    }
    else {
        flat.ahead.copy_(flat.host);
    }
}

} // namespace

void
reload(fp_flat_buffer &flat, at::Tensor &accumulator)
{
    if (!flat.host_valid) {
        return;
    }
    bring_back(flat);
    if (flat.has_come) {
        block_on(flat.has_come, flat.full.device());
        flat.has_left.reset();
    }
    accumulator = std::move(flat.ahead);
    flat.ahead.reset();
    flat.host_valid = false;
}

void
offload(fp_flat_buffer &flat, at::Tensor &accumulator)
{
    if (!flat.offloads) {
        return;
    }
    if (!flat.host.defined() || flat.host.sizes() != accumulator.sizes() || flat.host.dtype() != accumulator.dtype()) {
        const at::TensorOptions options = accumulator.options().device(at::kCPU);
        flat.host = at::empty(accumulator.sizes(), options.pinned_memory(has_streams(accumulator)));
    }
    if (has_streams(accumulator)) {
        flat.has_left = copy_out(flat.host, std::move(accumulator));
    }
    else {
        flat.host.copy_(accumulator);
    }
    accumulator.reset();
    flat.host_valid = true;
}

} // namespace fp

extern "C" {

int
fp_flat_buffer_bring_back(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        fp::bring_back(*flat);
        return 0;
    });
}

int
fp_flat_buffer_leave_there(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        if (flat->ahead.defined()) {
            fp::block_on(flat->has_come, flat->ahead.device()); /* its memory is used next */
            flat->ahead.reset();
        }
        return 0;
    });
}

int
fp_flat_buffer_settle_copies(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        if (flat->offloads && flat->full.defined() && fp::has_streams(flat->full)) {
            fp::settle_copies(flat->full.device());
        }
        return 0;
    });
}

void
fp_flat_buffer_kept_bytes(const fp_flat_buffer *flat, int64_t *device, int64_t *host) noexcept
{
    *device = *host = 0;
    for (const at::Tensor &tensor : {flat->kept, flat->partial, flat->ahead}) {
        *device += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
    *host = flat->host.defined() ? static_cast<int64_t>(flat->host.nbytes()) : 0;
}

} // extern "C"
