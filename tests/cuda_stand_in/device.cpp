// device.cpp -- what CUDA says of devices, versions and errors.
#include "inside.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include <dlfcn.h>

namespace stand_in {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

} // namespace

int
setting(const char *name, int otherwise)
{
    const char *value = std::getenv(name);
    return value == nullptr ? otherwise : std::atoi(value);
}

cudaError_t
told(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady) {
        last_error = error;
    }
    return error;
}

} // namespace stand_in

using namespace stand_in;

// As many as there are, or as CUDA_VISIBLE_DEVICES names.
static const int devices = [] {
    const int all = setting("STAND_IN_DEVICES", 2);
    const char *visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible == nullptr) {
        return all;
    }
    const std::string names = visible;
    return names.empty() ? 0 : std::min(all, 1 + int(std::count(names.begin(), names.end(), ',')));
}();

extern "C" {

cudaError_t
cudaGetDeviceCount(int *count)
{
    *count = devices;
    return devices == 0 ? told(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t
cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

cudaError_t
cudaSetDevice(int device)
{
    if (device < 0 || device >= devices) {
        return told(cudaErrorInvalidDevice);
    }
    current_device = device;
    return cudaSuccess;
}

cudaError_t
cudaGetDeviceProperties(cudaDeviceProp *properties, int)
{
    *properties = {};
    std::strcpy(properties->name, "stand-in for a GPU");
    properties->major = 9;
    properties->minor = 0;
    size_t available;
    cudaMemGetInfo(&available, &properties->totalGlobalMem);
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 50 << 20;
    properties->concurrentKernels = 1;
    properties->unifiedAddressing = 1;
    properties->maxGridSize[0] = INT32_MAX;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    return cudaSuccess;
}

cudaError_t
cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    *value = attribute == cudaDevAttrComputeCapabilityMajor    ? 9
             : attribute == cudaDevAttrMultiProcessorCount     ? 132
             : attribute == cudaDevAttrMaxThreadsPerBlock      ? 1024
             : attribute == cudaDevAttrMaxSharedMemoryPerBlock ? 48 << 10
             : attribute == cudaDevAttrWarpSize                ? 32
                                                               : 0;
    return cudaSuccess;
}

cudaError_t
cudaDeviceGetPCIBusId(char *id, int length, int device)
{
    std::snprintf(id, size_t(length), "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t
cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t
cudaDeviceCanAccessPeer(int *can, int, int)
{
    *can = 1;
    return cudaSuccess;
}

cudaError_t
cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t
cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t
cudaGetLastError()
{
    return std::exchange(last_error, cudaSuccess);
}

cudaError_t
cudaPeekAtLastError()
{
    return last_error;
}

const char *
cudaGetErrorString(cudaError_t error)
{
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureUnjoined:
            return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureIsolation:
            return "dependency created on uncaptured work in another stream";
        default:
            return "an error of the stand-in for CUDA";
    }
}

const char *
cudaGetErrorName(cudaError_t error)
{
    return cudaGetErrorString(error);
}

static int
not_supported()
{
    return 801;
}

cudaError_t
cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                 cudaDriverEntryPointQueryResult *result)
{
    *function = dlsym(RTLD_DEFAULT, name);
    *function = *function == nullptr ? reinterpret_cast<void *>(not_supported) : *function;
    if (result != nullptr) {
        *result = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

} // extern "C"
