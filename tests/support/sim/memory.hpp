// memory.hpp -- memory of the device, and pinned memory.
#pragma once

#include "streams.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace {

int64_t room = -1;                                      // bytes at most; negative: no end
int64_t bytes_now = 0, bytes_peak = 0, allocations = 0; // of blocks that there were none to use again for
struct Block {
    size_t bytes;
    int64_t stream; // that it was allocated on, and goes back to
};
auto &blocks = for_good<std::unordered_map<void *, Block>>(); // in use
auto &unused = for_good<
    OfRank<std::multimap<std::pair<int64_t, size_t>, void *>>>(); // by stream and size: blocks are never given back
auto &streamed = for_good<std::unordered_set<void *>>(); // by record_stream: not used again, whatever becomes of it

using Free = void (*)(void *);
std::mutex &aside_mutex = for_good<std::mutex>();
auto &aside = for_good<OfRank<std::vector<std::pair<Free, void *>>>>(); // what is to be freed

// Nobody who frees memory waits for the mutex: the last reference may go in a thread of gloo's, for which its holder waits.
template <Free now>
void
free_now_or_later(void *memory)
{
    check_not_ended();
    const Tried locked(mutex(), std::try_to_lock);
    if (locked) {
        now(memory);
        return;
    }
    const std::lock_guard adding(aside_mutex);
    aside().emplace_back(now, memory);
}

// The mutex is held.
void
free_what_is_aside()
{
    std::vector<std::pair<Free, void *>> taken;
    {
        const std::lock_guard taking(aside_mutex);
        taken.swap(aside());
    }
    for (const auto &[now, memory] : taken) {
        now(memory);
    }
}

void
free_block(void *memory)
{
    const auto found = blocks.find(memory);
    const Block block = found->second;
    blocks.erase(found);
    bytes_now -= static_cast<int64_t>(block.bytes);
    if (streamed.erase(memory) == 0) {
        put(block.stream, [memory, block] { std::memset(memory, 0x7f, block.bytes); });
        unused().emplace(std::make_pair(block.stream, block.bytes), memory);
    }
}

// All that was to be done has been done, each stream in its order: no block was written to since it was freed.
void
check_unused()
{
    for (const auto &[of, memory] : unused()) {
        const auto *bytes = static_cast<const unsigned char *>(memory), *end = bytes + of.second;
        const auto *other = std::find_if(bytes, end, [](unsigned char byte) { return byte != 0x7f; });
        TORCH_CHECK(other == end, "memory was written to after it was freed: ", of.second, " bytes of stream ",
                    of.first, ", at byte ", other - bytes);
    }
}

void
keep_for_stream(const c10::DataPtr &data, const c10::Stream &stream)
{
    const Locked locked(mutex());
    const auto block = blocks.find(data.get_context());
    if (block != blocks.end() && block->second.stream != stream.id()) {
        streamed.insert(data.get_context());
    }
}

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const Locked locked(mutex());
        free_what_is_aside();
        if (bytes == 0) {
            return {nullptr, device_here()};
        }
        const auto lacking = bytes_now + static_cast<int64_t>(bytes) - room;
        TORCH_CHECK_WITH(OutOfMemoryError, room < 0 || lacking <= 0, "no room for ", bytes, " bytes: ", lacking,
                         " too few");
        const auto found = unused().find(std::make_pair(current, bytes));
        void *memory = found == unused().end() ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : found->second;
        if (found != unused().end()) {
            unused().erase(found);
        }
        else {
            std::memset(memory, 0x7f, bytes); // new memory is not empty either
            allocations++;
        }
        blocks[memory] = {bytes, current};
        bytes_now += static_cast<int64_t>(bytes);
        bytes_peak = std::max(bytes_peak, bytes_now);
        return {memory, memory, free_now_or_later<free_block>, device_here()};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return free_now_or_later<free_block>;
    }
    void copy_data(void *target, const void *source, size_t bytes) const override
    {
        default_copy_data(target, source, bytes);
    }
} device_memory;
REGISTER_ALLOCATOR(SIM, &device_memory)

int64_t pinned_now = 0;
auto &pinned = for_good<std::map<char *, size_t>>(); // ranges

void
free_pinned(void *memory)
{
    pinned_now -= static_cast<int64_t>(pinned[static_cast<char *>(memory)]);
    pinned.erase(static_cast<char *>(memory));
    std::free(memory);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const Locked locked(mutex());
        void *memory = std::malloc(std::max<size_t>(bytes, 1));
        pinned[static_cast<char *>(memory)] = bytes;
        pinned_now += static_cast<int64_t>(bytes);
        return {memory, memory, free_now_or_later<free_pinned>, c10::Device(c10::kCPU)};
    }
    void copy_data(void *target, const void *source, size_t bytes) const override
    {
        default_copy_data(target, source, bytes);
    }
} pinned_memory;

bool
is_pinned(const void *data)
{
    const Locked locked(mutex());
    auto after = pinned.upper_bound(static_cast<char *>(const_cast<void *>(data)));
    if (after == pinned.begin()) {
        return false;
    }
    --after;
    return data < after->first + std::max<size_t>(after->second, 1);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return true;
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override
    {
        return true;
    }
    c10::DeviceIndex deviceCount() const override
    {
        return static_cast<c10::DeviceIndex>(devices);
    }
    c10::DeviceIndex getCurrentDevice() const override
    {
        return device_here().index();
    }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override
    {
        return device_here().index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override
    {
        return device_here().index();
    }
    bool isPinnedPtr(const void *data) const override
    {
        return is_pinned(data);
    }
    c10::Allocator *getPinnedMemoryAllocator() const override
    {
        return &pinned_memory;
    }
    at::Device getDeviceFromPtr(void *) const override
    {
        return device_here();
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override
    {
        return at::detail::getDefaultCPUGenerator();
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        c10::DataPtr grown = device_memory.allocate(bytes);
        if (bytes != 0 && storage.nbytes() != 0) {
            const Locked locked(mutex());
            put(current, [to = grown.get(), from = storage.data(), n = std::min(bytes, storage.nbytes())] {
                std::memcpy(to, from, n);
            });
        }
        storage.set_data_ptr_noswap(std::move(grown));
        storage.set_nbytes(bytes);
    }
};

} // namespace
