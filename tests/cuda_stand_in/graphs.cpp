// graphs.cpp -- graphs: what is put to streams that take part in a capture is kept, in its order, and done at each launch.
#include "inside.hpp"

using namespace stand_in;

extern "C" {

cudaError_t
cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
{
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

cudaError_t
cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode)
{
    LOCKED;
    Stream *stream = stream_of(handle);
    if (stream->is_default || stream->capture) {
        return told(cudaErrorStreamCaptureUnsupported);
    }
    auto capture = std::make_shared<Capture>();
    static unsigned long long last = 0;
    capture->id = ++last;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    stream->capture = capture;
    captures.insert(capture.get());
    return cudaSuccess;
}

cudaError_t
cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    LOCKED;
    Stream *stream = stream_of(handle);
    const std::shared_ptr<Capture> capture = stream->capture;
    *graph = nullptr;
    if (!capture || capture->origin != stream) {
        return told(capture ? cudaErrorStreamCaptureUnmatched : cudaErrorIllegalState);
    }
    captures.erase(capture.get());
    for (Stream *each : streams) {
        if (each->capture == capture) {
            each->capture = nullptr;
        }
    }
    if (capture->invalid) {
        return told(cudaErrorStreamCaptureInvalidated);
    }
    for (const auto &[each, issued] : capture->issued) {
        if (capture->reached[stream][each] < issued) {
            return told(cudaErrorStreamCaptureUnjoined);
        }
    }
    *graph = reinterpret_cast<cudaGraph_t>(new std::vector<Work>(std::move(capture->nodes)));
    return cudaSuccess;
}

cudaError_t
cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status)
{
    LOCKED;
    const Stream *stream = stream_of(handle);
    *status = !stream->capture           ? cudaStreamCaptureStatusNone
              : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t
cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *id,
                         cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                         size_t *count)
{
    cudaStreamIsCapturing(handle, status);
    LOCKED;
    const Stream *stream = stream_of(handle);
    if (id != nullptr && stream->capture) {
        *id = stream->capture->id;
    }
    if (graph != nullptr) {
        *graph = nullptr;
    }
    if (dependencies != nullptr) {
        *dependencies = nullptr;
    }
    if (edges != nullptr) {
        *edges = nullptr;
    }
    if (count != nullptr) {
        *count = 0;
    }
    return cudaSuccess;
}

cudaError_t
cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    *exec = reinterpret_cast<cudaGraphExec_t>(new std::vector<Work>(*reinterpret_cast<std::vector<Work> *>(graph)));
    return cudaSuccess;
}

cudaError_t
cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    LOCKED;
    put(stream_of(stream), [nodes = *reinterpret_cast<std::vector<Work> *>(exec)] {
        for (const Work &node : nodes) {
            node();
        }
    });
    return cudaSuccess;
}

cudaError_t
cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete reinterpret_cast<std::vector<Work> *>(exec);
    return cudaSuccess;
}

cudaError_t
cudaGraphDestroy(cudaGraph_t graph)
{
    delete reinterpret_cast<std::vector<Work> *>(graph);
    return cudaSuccess;
}

cudaError_t
cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count)
{
    *count = reinterpret_cast<std::vector<Work> *>(graph)->size();
    return cudaSuccess;
}

} // extern "C"
