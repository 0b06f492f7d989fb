// tensor/fp_offload.cpp -- keep the accumulated gradient of one flat parameter in host memory between backwards; see
// fp_flat_buffer.hpp.
#include <ATen/ops/empty.h>

#include "tensor/fp_flat_buffer.hpp"

namespace fp {
namespace {

// If the accumulated gradient lies in host memory, start to copy it to reload_buffer on the device.
void
start_reload(fp_flat_buffer &flat)
{
    if (!flat.host_valid || flat.reload_buffer.defined()) {
        return;
    }
    check_memory(flat.host, name_of(flat)); /* users reach it by .grad */
    const c10::Device device = flat.unsharded.device();
    at::Tensor buffer = at::empty(flat.host.sizes(), flat.host.options().pinned_memory(false).device(device));
    flat.accumulated_home.move_in(device);
    if (has_streams(device)) {
        flat.has_come = copy_over(buffer, flat.host, device);
    }
    else {
        buffer.copy_(flat.host);
    }
    flat.reload_buffer = std::move(buffer);
}

} // namespace

void
reload(fp_flat_buffer &flat, at::Tensor &accumulator)
{
    if (flat.host_valid) {
        start_reload(flat);
        if (flat.has_come) {
            block_on(flat.has_come, flat.unsharded.device());
            flat.has_left.reset();
        }
        accumulator = std::move(flat.reload_buffer);
        flat.reload_buffer.reset();
        flat.host_valid = false;
    }
    share_accumulated(flat);
}

void
share_accumulated(fp_flat_buffer &flat)
{
    for (const at::Tensor &tensor : {flat.accumulated_grad, flat.partial_reduce_output}) {
        if (tensor.defined()) {
            flat.accumulated_home.share(tensor);
        }
    }
}

void
offload(fp_flat_buffer &flat, at::Tensor &accumulator)
{
    if (!flat.offloads) {
        return;
    }
    check_memory(accumulator, name_of(flat));
    if (!flat.host.defined() || !has_memory(flat.host) || flat.host.sizes() != accumulator.sizes() ||
        flat.host.dtype() != accumulator.dtype()) {
        flat.host = empty_beside(accumulator.device(), accumulator.sizes(), accumulator.options().device(at::kCPU));
    }
    if (has_streams(accumulator.device())) {
        flat.has_left = copy_out(flat.host, std::move(accumulator));
    }
    else {
        flat.host.copy_(accumulator);
    }
    accumulator.reset();
    flat.host_valid = true;
}

void
drop_reload(fp_flat_buffer &flat)
{
    if (flat.reload_buffer.defined()) {
        block_on(flat.has_come, flat.reload_buffer.device());
        flat.reload_buffer.reset();
    }
}

} // namespace fp

extern "C" {

int
fp_flat_buffer_start_reload(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        fp::start_reload(*flat);
    });
}

int
fp_flat_buffer_drop_reload(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] { fp::drop_reload(*flat); });
}

int
fp_flat_buffer_wait_copies(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        if (flat->unsharded.defined() && fp::has_streams(flat->unsharded.device())) {
            fp::wait_copies(flat->unsharded.device());
        }
    });
}

void
fp_flat_buffer_accumulated_bytes(const fp_flat_buffer *flat, int64_t *device, int64_t *host) noexcept
{
    *device = *host = 0;
    for (const at::Tensor &tensor : {flat->accumulated_grad, flat->partial_reduce_output, flat->reload_buffer}) {
        *device += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
    *host = flat->host.defined() ? static_cast<int64_t>(flat->host.nbytes()) : 0;
}

} // extern "C"
