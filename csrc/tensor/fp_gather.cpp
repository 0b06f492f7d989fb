// tensor/fp_gather.cpp -- gather the shards of all ranks into the storage of one flat parameter; see fp_flat_buffer.h.
//
// Nothing may read memory that is not filled yet: the collective writes by `filling`, a second storage over the same
// memory. The storage of unsharded is hidden until the wait, so that a read of a view raises and does not return old bytes.
// end_filling() takes the second storage back.
//
// Where the wait takes place: a collective from C++ has a work, and wait_for_gather() waits for it. One from Python has
// waited itself. A fill without a collective is ordered by the mark was_filled.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <vector>

#include "tensor/fp_convert.hpp"
#include "tensor/fp_flat_buffer.hpp"
#include "tensor/fp_begun.hpp"
#include "tensor/fp_launch.hpp"

namespace fp {
namespace {

// The tensor to which a gather writes.
const at::Tensor &
target_of(const fp_flat_buffer &flat)
{
    return flat.filling.defined() ? flat.filling : flat.unsharded_data;
}

// Let an access to unsharded or a view raise reason; NULL: let it read the values.
void
set_hidden(fp_flat_buffer &flat, const char *reason)
{
    flat.is_hidden = set_freed_reason(storage_of(flat.unsharded), reason);
}

// The tensor as collectives send it: bytes for dtypes that not every backend knows, such as fp8. Python's as_sent() does
// the same.
at::Tensor
as_sent(const at::Tensor &tensor)
{
    const at::ScalarType dtype = tensor.scalar_type();
    const bool known = c10::isComplexType(dtype) || (c10::isFloatingType(dtype) && tensor.itemsize() > 1);
    return known ? tensor : tensor.view(at::kByte);
}

// Start to gather over group. false: Python has done it, and has waited.
bool
gather_over(fp_flat_buffer &flat, fp_group &group, const at::Tensor &whole, const at::Tensor &own,
            PyObject *collectives)
{
    check_memory(own, name_of(flat));
    if (flat.packed.may && own.is_cpu()) { // not if it was moved to a device since _begin_pack()
        flat.packed.own = own;
        return true;
    }
    const at::Tensor output = as_sent(whole), input = as_sent(own);
    announce(group, FP_EVENT_GATHERS);
    if (collectives != nullptr || !group.native) {
        call_python(collectives, "all_gather", output, input, group);
        return false;
    }
    flat.gather.begin(group, all_gather(group, output, input));
    return true;
}

// A hook of Python's collective may have freed the memory that it gathers to: RuntimeError.
void
check_not_freed(const fp_flat_buffer &flat)
{
    TORCH_CHECK(memory_of(storage_of(flat.unsharded)) >= bytes_of(flat),
                flat.unit ? flat.unit->name : "a flat parameter",
                ": it was freed while it was gathered: a hook of a collective cannot free it");
}

// The same into the unsharded tensor.
void
gather_all(fp_flat_buffer &flat, fp_group &group, const at::Tensor &input, PyObject *collectives)
{
    if (gather_over(flat, group, target_of(flat), input, collectives)) {
        move(flat, FP_DATA_GATHER);
        return;
    }
    check_not_freed(flat);
    move(flat, FP_DATA_FILL);
}

// The memory of whole through a second storage, which keeps whole's alive.
at::Tensor
by_own_storage(const at::Tensor &whole)
{
    c10::StorageImpl *const storage = storage_of(whole);
    auto owner = std::make_unique<c10::Storage>(whole.storage());
    c10::DataPtr memory(
        const_cast<void *>(address_of(storage)), owner.get(),
        [](void *kept) { delete static_cast<c10::Storage *>(kept); }, storage->device());
    owner.release();
    at::Tensor made = alias(whole, whole.sizes(), whole.strides(), whole.storage_offset());
    made.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(memory), nullptr, /*resizable=*/false)));
    return made;
}

// The collective has ended: take its storage back. A backend that has kept the tensor finds no memory there.
void
end_filling(fp_flat_buffer &flat)
{
    if (flat.filling.defined()) {
        c10::StorageImpl *const storage = storage_of(flat.filling);
        set_freed_reason(storage, "flatparam: the collective that wrote to this tensor has ended");
        storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
        flat.filling.reset();
    }
}

// Until the wait an access to the values raises reason. A graph that reaches the unit past its outputs, for example, would read
// them before.
void
hide(fp_flat_buffer &flat, const char *reason)
{
    if (flat.packed.own.defined() || (flat.filling.defined() && (flat.gather || flat.was_filled))) {
        set_hidden(flat, reason);
    }
    else {
        end_filling(flat);
    }
}

// If the values are there, allow access to them.
void
show(fp_flat_buffer &flat)
{
    if (flat.data == FP_DATA_UNSHARDED) {
        end_filling(flat);
        if (flat.is_hidden) {
            set_hidden(flat, nullptr);
        }
    }
}

// Note that the pending gather has failed. Nothing is gathered; a secondary shard that it made is dropped.
void
fail(fp_flat_buffer &flat)
{
    end_filling(flat);
    flat.gather.work.reset();
    flat.packed.own.reset();
    flat.packed.pack.reset();
    flat.next_secondary_shard.reset();
    move(flat, FP_DATA_FAIL);
}

// A gather of another capture of a CUDA graph never runs here: count it as failed.
void
drop_void(fp_flat_buffer &flat)
{
    if (flat.gather && flat.is_under_way() && flat.home.is_void()) {
        fail(flat);
    }
}

// slot = shard, converted; a shard on the host is copied to the device first.
void
fill(fp_flat_buffer &flat, const at::Tensor &slot, const at::Tensor &shard)
{
    if (slot.device() == shard.device()) {
        convert(slot, shard, {});
        return;
    }
    check_memory(shard, name_of(flat));
    convert(slot, shard.to(slot.device(), /*non_blocking=*/true), {});
    flat.was_read.emplace(recorded_now(slot.device()));
}

// Give the unsharded tensor memory, registered with the backend where that is asked for. Returns whether it has values of an
// earlier gather.
bool
make_room(fp_flat_buffer &flat)
{
    c10::StorageImpl *const storage = storage_of(flat.unsharded);
    const size_t bytes = bytes_of(flat);
    const bool is_new = memory_of(storage) != bytes;
    at::Tensor made;
    if (is_new) {
        fp_group *const group = flat.secondary.group != nullptr ? flat.secondary.group : flat.primary.group;
        made = registered(group, static_cast<int64_t>(bytes), flat.unsharded_data.options().dtype(at::kByte));
    }
    resize_storage(storage, bytes, nullptr, false,
                   made.defined() ? storage_of(made)->set_data_ptr(c10::DataPtr()) : c10::DataPtr());
    flat.home.move_in(flat.unsharded.device(), is_new);
    return !std::exchange(flat.is_hidden, false) && !is_new;
}

// Whether the group can send the shard from its own memory. Otherwise the shard is copied to its place in the flat buffer
// first:
//   - on the host, and for strategies that gather once a step (stays_full, secondary shards): there the gathered values are
//   used
//     even if the shard is written to meanwhile
//   - in registered memory: only the flat buffer is registered
//   - where dtype or device differ
bool
is_sent_from_its_place(const fp_flat_buffer &flat, const at::Tensor &shard, PyObject *collectives)
{
    const at::Tensor &whole = flat.unsharded_data;
    return flat.primary.n > 1 && !flat.stays_full && flat.secondary.group == nullptr && collectives == nullptr &&
           flat.primary.group->native && has_streams(whole.device()) &&
           !registers(*flat.primary.group, whole.device()) && shard.device() == whole.device() &&
           shard.dtype() == whole.dtype() && shard.is_contiguous() && !shard.is_conj() && !shard.is_neg() &&
           shard.numel() == flat.shard_numel;
}

// Queue the gather on the current stream. refreshes: gather the secondary shard from the outer group first, into refreshed; an
// undefined refreshed: an interrupted call has begun that.
void
put_gather(fp_flat_buffer &flat, const at::Tensor &shard, bool from_its_place, bool refreshes,
           const at::Tensor &refreshed, PyObject *collectives)
{
    if (refreshes) {
        if (refreshed.defined()) {
            const int64_t first = flat.primary.rank * flat.shard_numel - flat.secondary.rank * flat.part_numel();
            at::Tensor copy = refreshed, slot = alias(copy, flat.shard_numel, int64_t{1}, first);
            fill(flat, slot, shard);
            if (gather_over(flat, *flat.outer_group, copy, slot, collectives)) {
                move(flat, FP_DATA_REFRESH);
            }
            flat.next_secondary_shard = std::move(copy);
        }
        wait_for_gather(flat);
        flat.secondary_shard = std::move(flat.next_secondary_shard);
        flat.next_secondary_shard.reset();
    }
    if (flat.secondary_shard.defined()) {
        gather_all(flat, *flat.secondary.group, flat.secondary_shard, collectives);
        return;
    }
    if (from_its_place) {
        at::Tensor sent = alias(shard, flat.shard_numel, int64_t{1}, shard.storage_offset());
        gather_all(flat, *flat.primary.group, sent, collectives);
        return;
    }
    at::Tensor slot = alias(target_of(flat), flat.shard_numel, int64_t{1}, flat.primary.rank * flat.shard_numel);
    fill(flat, slot, shard);
    if (flat.primary.n > 1) {
        gather_all(flat, *flat.primary.group, slot, collectives);
    }
    else {
        move(flat, FP_DATA_FILL);
    }
}

// The process group over which all flats issue a collective of this kind, if it is one group and its backend can join them;
// else null. Not on the CPU, and not with a secondary shard.
c10d::ProcessGroup *
group_of_all(fp_flat_buffer *const *flats, Py_ssize_t n, const c10::Device &device, int what)
{
    c10d::ProcessGroup *native = nullptr;
    for (Py_ssize_t k = 0; n > 1 && !device.is_cpu() && k < n; k++) {
        const fp_group *const group = what == FP_JOIN_REPLICAS ? flats[k]->replicate_group : flats[k]->primary.group;
        if (group == nullptr || flats[k]->secondary.group != nullptr || (k > 0 && group->native.get() != native) ||
            (what == FP_JOIN_REDUCTIONS && flats[k]->in_order != 0)) {
            return nullptr;
        }
        native = group->native.get();
    }
    return native != nullptr && native->getBackend(device.type())->supportsCoalescing() ? native : nullptr;
}

// The memory of a tensor on the host, also where an access raises.
std::byte *
memory_at(const at::Tensor &tensor)
{
    auto *const memory = static_cast<std::byte *>(const_cast<void *>(address_of(storage_of(tensor))));
    return memory + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

// The gather has ended. If it was a pack's, copy the values of this flat parameter from it.
void
arrive(fp_flat_buffer &flat)
{
    const std::shared_ptr<Pack> pack = std::move(flat.packed.pack);
    if (pack && flat.data == FP_DATA_GATHERING) {
        const size_t bytes = bytes_of(flat) / static_cast<size_t>(flat.primary.n);
        std::byte *to = memory_at(target_of(flat));
        const std::byte *from = memory_at(pack->whole) + flat.packed.first;
        for (int rank = 0; rank < flat.primary.n; rank++, to += bytes, from += pack->stride) {
            std::memcpy(to, from, bytes);
        }
    }
    move(flat, FP_DATA_ARRIVE);
}

// Gather what the flat parameters send as one. Python has waited; else each waits for the work of all.
void
gather_pack(const std::vector<fp_flat_buffer *> &flats, PyObject *collectives)
{
    fp_group &group = *flats[0]->primary.group;
    const auto pack = std::make_shared<Pack>();
    pack->stride = 0;
    for (fp_flat_buffer *flat : flats) {
        flat->packed.first = pack->stride;
        pack->stride += static_cast<int64_t>(flat->packed.own.nbytes());
    }
    const at::TensorOptions options = flats[0]->unsharded_data.options().dtype(at::kByte);
    pack->own = at::empty({pack->stride}, options);
    pack->whole = at::empty({pack->stride * flats[0]->primary.n}, options);
    for (const fp_flat_buffer *flat : flats) {
        std::memcpy(memory_at(pack->own) + flat->packed.first, memory_at(flat->packed.own), flat->packed.own.nbytes());
    }
    const uint32_t hash = hash_of(flats, [](const fp_flat_buffer *flat) { return flat->primary.group->numbers[0]; });
    announce(group, FP_EVENT_GATHERS, hash >> 8 << 8 | static_cast<uint32_t>(std::min(flats.size(), size_t{255})));
    c10::intrusive_ptr<c10d::Work> work;
    if (collectives != nullptr || !group.native) {
        call_python(collectives, "all_gather", pack->whole, pack->own, group);
        std::for_each(flats.begin(), flats.end(), [](const fp_flat_buffer *flat) { check_not_freed(*flat); });
    }
    else {
        work = all_gather(group, pack->whole, pack->own);
    }
    for (fp_flat_buffer *flat : flats) {
        flat->packed.own.reset();
        flat->packed.pack = pack;
        flat->primary.group->given_up = false;
        if (work) {
            flat->gather.begin(*flat->primary.group, work);
        }
        else {
            arrive(*flat);
            show(*flat);
        }
    }
}

// The collective of this kind (FP_JOIN_*).
Pending &
pending_of(fp_flat_buffer &flat, int what)
{
    return what == FP_JOIN_GATHERS ? flat.gather : flat.reduction;
}

} // namespace

bool
is_lost(fp_flat_buffer &flat)
{
    drop_void(flat);
    if (!flat.gather || (flat.data != FP_DATA_ABANDONED && !is_broken(*flat.gather.group))) {
        return false;
    }
    move(flat, FP_DATA_ABANDON);
    const SparedCaptures spared(flat.unsharded.device());
    if (!flat.gather.work->isCompleted()) {
        return true;
    }
    try {
        flat.gather.work->synchronize(); // gloo's work is completed before its stream has copied to the device
    }
    catch (...) { // it has failed: nothing writes any more
    }
    fail(flat);
    return false;
}

void
wait_for_fill(fp_flat_buffer &flat)
{
    if (flat.was_filled) {
        block_on(flat.was_filled, flat.unsharded.device());
    }
}

void
wait_for_gather(fp_flat_buffer &flat)
{
    TORCH_CHECK(!flat.packed.own.defined(), flat.unit ? flat.unit->name : "a flat parameter",
                ": it is used while its gather begins: a hook of a collective cannot use or free it");
    wait_for_fill(flat);
    drop_void(flat);
    if (!flat.gather) {
        show(flat);
        return;
    }
    try {
        wait_for(flat.gather);
    }
    catch (...) {
        if (!flat.gather && flat.is_under_way()) {
            fail(flat);
        }
        throw;
    }
    if (!flat.gather && flat.is_under_way()) { // else another thread has waited for it meanwhile
        arrive(flat);
    }
    show(flat);
}

} // namespace fp

extern "C" {

int
fp_flat_buffers_can_join(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what)
{
    return fp::guarded(-1, [&] {
        return fp::group_of_all(flats, n, flats[0]->device_for(fp::unpack(shard)), what) != nullptr ? 1 : 0;
    });
}

int
fp_flat_buffers_begin(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what)
{
    return fp::guarded(-1, [&] {
        const c10::Device device = flats[0]->device_for(fp::unpack(shard));
        c10d::ProcessGroup *const native = fp::group_of_all(flats, n, device, what);
        if (native == nullptr) {
            return 0;
        }
        native->startCoalescing(device.type());
        for (Py_ssize_t k = 0; k < n; k++) {
            fp::pending_of(*flats[k], what).join = fp::Pending::Join::may;
        }
        return 1;
    });
}

int
fp_flat_buffers_end(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *shard, int what)
{
    return fp::guarded(-1, [&] {
        const c10::Device device = flats[0]->device_for(fp::unpack(shard));
        c10d::ProcessGroup *const native = fp::group_of_all(flats, n, device, what);
        c10::intrusive_ptr<c10d::Work> work;
        {
            const fp::WithoutGil released;
            work = native->endCoalescing(device.type());
            fp::note_begun(*native, work);
        }
        for (Py_ssize_t k = 0; k < n; k++) {
            fp::pending_of(*flats[k], what).end_join(work);
        }
    });
}

int
fp_flat_buffers_fit(const fp_flat_buffer *a, const fp_flat_buffer *b)
{
    return fp::guarded(-1, [&] {
        for (const fp_flat_buffer *flat : {a, b}) {
            if (flat->primary.n < 2 || !flat->unsharded.defined()) {
                return 0;
            }
        }
        const c10::Device device = a->unsharded.device();
        if (b->unsharded.device() != device || fp_group_is_same(a->primary.group, b->primary.group) == 0) {
            return 0;
        }
        fp_flat_buffer *const both[] = {const_cast<fp_flat_buffer *>(a), const_cast<fp_flat_buffer *>(b)};
        return device.is_cpu() || fp::group_of_all(both, 2, device, FP_JOIN_GATHERS) != nullptr ? 1 : 0;
    });
}

int64_t
fp_flat_buffer_gathered_bytes(const fp_flat_buffer *flat) noexcept
{
    return flat->unsharded.defined() ? static_cast<int64_t>(fp::bytes_of(*flat)) : 0;
}

int
fp_flat_buffers_begin_pack(fp_flat_buffer *const *flats, Py_ssize_t n) noexcept
{
    const int packs = flats[0]->unsharded.is_cpu();
    for (Py_ssize_t k = 0; k < n; k++) {
        flats[k]->packed.may = packs;
    }
    return packs;
}

int
fp_flat_buffers_gather_pack(fp_flat_buffer *const *flats, Py_ssize_t n, PyObject *collectives, int failed)
{
    const auto sends = [](const fp_flat_buffer *flat) { return flat->packed.own.defined(); };
    std::for_each(flats, flats + n, [](fp_flat_buffer *flat) { flat->packed.may = false; });
    const int status = failed ? -1 : fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        std::vector<fp_flat_buffer *> senders;
        std::copy_if(flats, flats + n, std::back_inserter(senders), sends);
        if (!senders.empty()) {
            fp::gather_pack(senders, collectives);
        }
    });
    for (Py_ssize_t k = 0; k < n; k++) {
        if (sends(flats[k])) { /* the gather has not begun */
            fp::unless_failed([&] { fp::fail(*flats[k]); });
        }
    }
    return status;
}

int
fp_flat_buffer_gathers_ahead(const fp_flat_buffer *flat) noexcept
{
    return flat->unsharded.defined() && fp::has_streams(flat->unsharded.device());
}

int
fp_flat_buffer_gather(fp_flat_buffer *flat, PyObject *shard_object, PyObject *const *views, PyObject *collectives,
                      int changed, int refresh, int goes_on, const char *reason)
{
    return fp::guarded(-1, [&] {
        const fp::Plainly plainly;
        const at::Tensor &shard = fp::unpack(shard_object);
        if (changed) {
            fp::change_version(*flat, views);
        }
        fp::show_version(*flat, views);
        if (flat->data == FP_DATA_BORROWED) {
            return 1;
        }
        fp::wait_for_gather(*flat);
        fp::end_filling(*flat); /* left by a gather whose storage was replaced before it ended */
        fp::move(*flat, FP_DATA_FORGET);
        if (!goes_on) {
            flat->next_secondary_shard.reset();
        }
        const bool from_shards = refresh || !flat->secondary_shard.defined();
        if (from_shards) {
            flat->secondary_shard.reset();
        }
        const bool refreshes = from_shards && flat->outer_group != nullptr;
        at::Tensor copy;
        if (refreshes && !flat->next_secondary_shard.defined()) {
            copy = at::empty({flat->part_numel()}, flat->unsharded_data.options());
        }
        const c10::Device device = flat->unsharded.device();
        /* Values of an earlier gather stay readable, as a kept graph reads them: the new ones are the same, or it is
         * refused. */
        const char *const hidden = fp::make_room(*flat) ? nullptr : reason;
        if (collectives == nullptr && (flat->primary.n > 1 || fp::has_streams(device))) {
            flat->filling = fp::by_own_storage(flat->unsharded_data);
        }
        const bool from_its_place = fp::is_sent_from_its_place(*flat, shard, collectives);
        /* No allocation below outlives the gather: its memory would belong to that stream. */
        std::optional<fp::OnOwnStream> gathering;
        if (!from_its_place) {
            gathering.emplace(device, fp::Purpose::gather);
        }
        try {
            fp::put_gather(*flat, shard, from_its_place, refreshes, copy, collectives);
        }
        catch (...) {
            if (gathering) {
                gathering->join(); /* that stream may write to memory that is freed now */
            }
            fp::end_filling(*flat);
            fp::set_hidden(*flat, hidden);
            throw;
        }
        if (fp::has_streams(device) && !flat->gather) {
            flat->was_filled.emplace(fp::recorded_now(device));
        }
        fp::hide(*flat, hidden);
        return from_shards ? 1 : 0;
    });
}

int
fp_flat_buffer_wait(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] { fp::wait_for_gather(*flat); });
}

int
fp_flat_buffer_hide(fp_flat_buffer *flat, const char *reason)
{
    return fp::guarded(-1, [&] {
        if (!flat->is_hidden && flat->unsharded.defined() && flat->data != FP_DATA_BORROWED && !flat->is_under_way() &&
            fp::memory_of(fp::storage_of(flat->unsharded)) > 0) {
            fp::set_hidden(*flat, reason);
        }
    });
}

int
fp_flat_buffer_give_up(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        fp::drop_void(*flat);
        const fp::Pending gather = flat->gather; /* without the GIL another thread may replace it */
        if (!gather || fp::is_captured(flat->unsharded.device())) {
            return; /* captured work has not run */
        }
        const fp::SparedCaptures spared(flat->unsharded.device());
        const std::shared_ptr<fp::Pack> pack = flat->packed.pack;
        gather.group->given_up = gather.group->given_up || (pack && pack->given_up);
        const bool ended = fp::give_up(gather);
        if (pack) {
            pack->given_up = gather.group->given_up;
        }
        if (!ended) {
            fp::move(*flat, FP_DATA_ABANDON);
        }
        else if (gather.work->isCompleted()) {
            fp::wait_for_gather(*flat); /* returns at once; forgets a gather that has failed */
        }
    });
}

int
fp_flat_buffer_wait_read(fp_flat_buffer *flat)
{
    return fp::guarded(-1, [&] {
        std::optional<fp::Mark> read =
            std::move(flat->was_read); /* the flat may be freed while this waits without the GIL */
        flat->was_read.reset();
        fp::wait_until(read);
    });
}

} // extern "C"
