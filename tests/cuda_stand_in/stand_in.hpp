// stand_in.hpp -- what the stand-in for CUDA's runtime (runtime.cpp) has for those of its kernels and of NCCL.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

// Queue work on a stream, or add it to the graph that is captured on it. A thread of the stream does it, without the GIL.
void stand_in_put(cudaStream_t stream, std::function<void()> work);

// Whether this thread may do what a graph that is captured does not allow; else the graph is invalid from now on.
bool stand_in_is_safe(const char *what);

bool stand_in_is_capturing(cudaStream_t stream);
