// tensor/fp_accumulated.cpp -- see fp_accumulated.hpp.
#include "tensor/fp_accumulated.hpp"

#include <ATen/ops/empty.h>

#include "tensor/fp_flat_buffer.hpp"

namespace fp {

void
Accumulated::put(at::Tensor made)
{
    home.move_in(made.device());
    tensor = std::move(made);
}

void
Accumulated::start_reload(const c10::Device &device, const char *name)
{
    if (!on_host || coming.defined()) {
        return;
    }
    check_memory(host, name); /* users reach it by .grad */
    at::Tensor buffer = at::empty(host.sizes(), host.options().pinned_memory(false).device(device));
    home.move_in(device);
    if (has_streams(device)) {
        has_come = copy_over(buffer, host, device);
    }
    else {
        buffer.copy_(host);
    }
    coming = std::move(buffer);
}

void
Accumulated::reload(const c10::Device &device, const char *name)
{
    if (on_host) {
        start_reload(device, name);
        if (has_come) {
            block_on(has_come, device);
            has_left.reset();
        }
        tensor = std::move(coming);
        coming.reset();
        on_host = false;
    }
    share();
}

void
Accumulated::drop_reload()
{
    if (coming.defined()) {
        block_on(has_come, coming.device());
        coming.reset();
    }
}

void
Accumulated::offload(const char *name)
{
    check_memory(tensor, name);
    if (!host.defined() || !has_memory(host) || host.sizes() != tensor.sizes() || host.dtype() != tensor.dtype()) {
        host = empty_beside(tensor.device(), tensor.sizes(), tensor.options().device(at::kCPU));
    }
    if (has_streams(tensor.device())) {
        has_left = copy_out(host, std::move(tensor));
    }
    else {
        host.copy_(tensor);
    }
    tensor.reset();
    on_host = true;
}

void
Accumulated::share() const
{
    if (tensor.defined()) {
        home.share(tensor);
    }
}

void
Accumulated::drop()
{
    unless_failed([&] { share(); });
    tensor.reset();
    on_host = false;
}

} // namespace fp

extern "C" {

int
fp_flat_buffer_start_reload(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        flat->accumulated.start_reload(flat->unsharded.device(), fp::name_of(*flat));
    });
}

int
fp_flat_buffer_drop_reload(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] { flat->accumulated.drop_reload(); });
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
    const fp::Accumulated &accumulated = flat->accumulated;
    *device = 0;
    for (const at::Tensor &tensor : {accumulated.tensor, accumulated.coming, flat->unreduced}) {
        *device += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
    *host = accumulated.host.defined() ? static_cast<int64_t>(accumulated.host.nbytes()) : 0;
}

} // extern "C"
