// memory.cpp -- memory of the devices and pinned memory, both of the host; copies. What was not written reads as nonsense.
//
// operations.cpp is loaded with the first call: torch is there by then.
#include "inside.hpp"

#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <sys/mman.h>

using namespace stand_in;

namespace {

const size_t device_bytes = size_t(setting("STAND_IN_MIB", 6144)) << 20;

struct Range {
    size_t bytes;
    int device; // -1: pinned memory of the host
};
auto &ranges = for_good<std::map<char *, Range>>();
auto &used = for_good<std::map<int, size_t>>();

size_t
pages(size_t bytes)
{
    return (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096;
}

const Range *
range_of(const void *memory)
{
    auto after = ranges.upper_bound(static_cast<char *>(const_cast<void *>(memory)));
    if (after == ranges.begin()) {
        return nullptr;
    }
    --after;
    return memory < after->first + after->second.bytes ? &after->second : nullptr;
}

void
load_operations()
{
    static const bool loaded = [] {
        const char *library = std::getenv("STAND_IN_OPERATIONS");
        if (library != nullptr && dlopen(library, RTLD_NOW | RTLD_LOCAL) == nullptr) {
            std::fprintf(stderr, "stand-in for CUDA: %s\n", dlerror());
            std::_Exit(70);
        }
        std::atexit(end_streams); // before torch's own tables are gone
        return true;
    }();
    (void)loaded;
}

cudaError_t
allocate(void **memory, size_t bytes, int device)
{
    const std::lock_guard lock(mutex);
    if (device >= 0) {
        if (const cudaError_t error = unsafe("an allocation")) {
            return error;
        }
        if (used[device] + bytes > device_bytes) {
            return told(cudaErrorMemoryAllocation);
        }
        used[device] += bytes;
    }
    *memory = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::memset(*memory, 0x7f, std::min<size_t>(bytes, 64 << 20));
    ranges[static_cast<char *>(*memory)] = {std::max<size_t>(bytes, 1), device};
    return cudaSuccess;
}

cudaError_t
release(void *memory)
{
    if (memory == nullptr) {
        return cudaSuccess;
    }
    const std::lock_guard lock(mutex);
    const auto found = ranges.find(static_cast<char *>(memory));
    if (found == ranges.end()) {
        return told(cudaErrorInvalidValue);
    }
    if (found->second.device >= 0) {
        if (const cudaError_t error = unsafe("a free")) {
            return error;
        }
        used[found->second.device] -= found->second.bytes;
    }
    munmap(memory, pages(found->second.bytes));
    ranges.erase(found);
    return cudaSuccess;
}

cudaError_t
copy(void *target, const void *source, size_t bytes, Stream *stream, bool is_async)
{
    std::shared_ptr<std::vector<char>> staged;
    bool host_waits = !is_async;
    {
        const std::lock_guard lock(mutex);
        const bool from_pageable = range_of(source) == nullptr, to_pageable = range_of(target) == nullptr;
        if (!is_async) {
            if (const cudaError_t error = unsafe("a copy that waits")) {
                return error;
            }
        }
        if (from_pageable && !stream->capture) { // is read at once
            staged = std::make_shared<std::vector<char>>(static_cast<const char *>(source),
                                                         static_cast<const char *>(source) + bytes);
        }
        put(stream, [=] { std::memmove(target, staged ? staged->data() : source, bytes); });
        host_waits = host_waits || (to_pageable && !stream->capture);
    }
    return host_waits ? wait_for(stream, "for a copy") : cudaSuccess;
}

Stream *
locked_stream_of(cudaStream_t handle)
{
    LOCKED;
    return stream_of(handle);
}

} // namespace

extern "C" {

cudaError_t
cudaMalloc(void **memory, size_t bytes)
{
    load_operations();
    return allocate(memory, bytes, current_device);
}

cudaError_t
cudaFree(void *memory)
{
    load_operations(); // torch begins with cudaFree(0)
    if (memory != nullptr) {
        wait_for_device();
    }
    return release(memory);
}

cudaError_t
cudaHostAlloc(void **memory, size_t bytes, unsigned)
{
    return allocate(memory, bytes, -1);
}

cudaError_t
cudaFreeHost(void *memory)
{
    return release(memory);
}

cudaError_t
cudaHostRegister(void *memory, size_t bytes, unsigned)
{
    LOCKED;
    ranges[static_cast<char *>(memory)] = {bytes, -1};
    return cudaSuccess;
}

cudaError_t
cudaHostUnregister(void *memory)
{
    LOCKED;
    ranges.erase(static_cast<char *>(memory));
    return cudaSuccess;
}

cudaError_t
cudaMemGetInfo(size_t *available, size_t *total)
{
    LOCKED;
    *total = device_bytes;
    *available = device_bytes - used[current_device];
    return cudaSuccess;
}

cudaError_t
cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory)
{
    LOCKED;
    const Range *range = range_of(memory);
    *attributes = {};
    attributes->type = range == nullptr    ? cudaMemoryTypeUnregistered
                       : range->device < 0 ? cudaMemoryTypeHost
                                           : cudaMemoryTypeDevice;
    attributes->device = range == nullptr || range->device < 0 ? 0 : range->device;
    attributes->devicePointer = range != nullptr ? const_cast<void *>(memory) : nullptr;
    attributes->hostPointer = range != nullptr && range->device < 0 ? const_cast<void *>(memory) : nullptr;
    return cudaSuccess;
}

cudaError_t
cudaMemcpyAsync(void *target, const void *source, size_t bytes, cudaMemcpyKind, cudaStream_t handle)
{
    return copy(target, source, bytes, locked_stream_of(handle), true);
}

cudaError_t
cudaMemcpy(void *target, const void *source, size_t bytes, cudaMemcpyKind)
{
    return copy(target, source, bytes, locked_stream_of(nullptr), false);
}

cudaError_t
cudaMemcpyPeerAsync(void *target, int, const void *source, int, size_t bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream);
}

cudaError_t
cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t pitch, size_t width, size_t height,
                  cudaMemcpyKind, cudaStream_t stream)
{
    LOCKED;
    put(stream_of(stream), [=] {
        for (size_t row = 0; row < height; row++) {
            std::memcpy(static_cast<char *>(target) + row * target_pitch,
                        static_cast<const char *>(source) + row * pitch, width);
        }
    });
    return cudaSuccess;
}

cudaError_t
cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    LOCKED;
    put(stream_of(stream), [=] { std::memset(memory, value, bytes); });
    return cudaSuccess;
}

cudaError_t
cudaMemset(void *memory, int value, size_t bytes)
{
    return cudaMemsetAsync(memory, value, bytes, nullptr);
}

} // extern "C"
