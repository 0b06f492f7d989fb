// nccl.cpp -- a stand-in for libnccl: collectives of processes of this machine through shared memory, in the order of streams.
//
// Sums are in the order of ranks. Ranks whose collectives differ wait for each other until they abort, as NCCL's do.
#include "stand_in.hpp"

#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

extern "C" {
#include "core/fp_float.h"
}

namespace {

constexpr size_t SLOT = 1 << 20; // bytes of each rank that are on their way
constexpr int MOST = 16;         // ranks

enum class Kind : int { all_gather, all_reduce, reduce_scatter, broadcast, reduce };

struct Asked {
    Kind kind;
    size_t count;
    int dtype, op, root;
    bool operator==(const Asked &) const = default;
};

struct Shared {
    std::atomic<uint64_t> at[MOST];
    Asked asked[MOST];
};

} // namespace

struct ncclComm {
    int rank, ranks;
    Shared *shared = nullptr;
    char *slots = nullptr;
    uint64_t at = 0;
    std::atomic<bool> aborted = false;
    std::atomic<uint64_t> issued = 0, ended = 0; // whatever its stream, what was issued first is done first
    std::vector<std::pair<int, double>> factors; // what is multiplied before it is added: dtype, factor
};

namespace {

using Comm = std::shared_ptr<ncclComm>;

// Communicators live on with the work that uses them.
Comm
kept(ncclComm_t comm)
{
    return Comm(comm, [](ncclComm *) {});
}

// All ranks have come here; false: given up.
bool
meet(ncclComm &comm)
{
    const uint64_t here = ++comm.at;
    comm.shared->at[comm.rank] = here;
    for (int rank = 0; rank < comm.ranks; rank++) {
        for (int tries = 0; comm.shared->at[rank] < here; tries++) {
            if (comm.aborted) {
                return false;
            }
            if (tries > 100) {
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
            std::this_thread::yield();
        }
    }
    return true;
}

size_t
size_of(int dtype)
{
    switch (dtype) {
        case ncclInt8:
        case ncclUint8:
            return 1;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        default:
            return 8;
    }
}

template <class Raw, class Wide, Wide (*widen)(Raw), Raw (*narrow)(Wide)> struct Converted {
    Raw raw;
    Wide value() const
    {
        return widen(raw);
    }
    static Converted of(Wide value)
    {
        return {narrow(value)};
    }
};

template <class Value> struct Plain {
    Value raw;
    Value value() const
    {
        return raw;
    }
    static Plain of(Value value)
    {
        return {value};
    }
};

// target = target (op) source
template <class Element>
void
join(void *target, const void *source, size_t n, int op)
{
    auto *to = static_cast<Element *>(target);
    const auto *from = static_cast<const Element *>(source);
    for (size_t i = 0; i < n; i++) {
        const auto a = to[i].value(), b = from[i].value();
        to[i] = Element::of(op == ncclProd  ? a * b
                            : op == ncclMax ? (a > b ? a : b)
                            : op == ncclMin ? (a < b ? a : b)
                                            : a + b);
    }
}

template <class Element>
void
multiply(void *target, size_t n, double factor)
{
    auto *to = static_cast<Element *>(target);
    for (size_t i = 0; i < n; i++) {
        to[i] = Element::of(static_cast<decltype(to[i].value())>(to[i].value() * factor));
    }
}

using Half = Converted<uint16_t, float, fp_f32_of_f16, fp_f16_of_f32>;
using Brain = Converted<uint16_t, float, fp_f32_of_bf16, fp_bf16_of_f32>;

#define FOR_DTYPE(dtype, CALL)                                                                                         \
    switch (dtype) {                                                                                                   \
        case ncclInt8:                                                                                                 \
            CALL(Plain<int8_t>);                                                                                       \
            break;                                                                                                     \
        case ncclUint8:                                                                                                \
            CALL(Plain<uint8_t>);                                                                                      \
            break;                                                                                                     \
        case ncclInt32:                                                                                                \
            CALL(Plain<int32_t>);                                                                                      \
            break;                                                                                                     \
        case ncclInt64:                                                                                                \
            CALL(Plain<int64_t>);                                                                                      \
            break;                                                                                                     \
        case ncclFloat16:                                                                                              \
            CALL(Half);                                                                                                \
            break;                                                                                                     \
        case ncclBfloat16:                                                                                             \
            CALL(Brain);                                                                                               \
            break;                                                                                                     \
        case ncclFloat32:                                                                                              \
            CALL(Plain<float>);                                                                                        \
            break;                                                                                                     \
        case ncclFloat64:                                                                                              \
            CALL(Plain<double>);                                                                                       \
            break;                                                                                                     \
        default:                                                                                                       \
            std::fprintf(stderr, "stand-in for NCCL: dtype %d is not here\n", dtype);                                  \
            std::_Exit(70);                                                                                            \
    }

struct Call {
    Comm comm;
    Asked asked;
    const char *send;
    char *receive;
    double factor;
    std::optional<uint64_t> ticket; // none in a graph, which keeps the order of issue by itself

    size_t bytes() const
    {
        return asked.count * size_of(asked.dtype);
    }
    char *slot(int rank) const
    {
        return comm->slots + size_t(rank) * SLOT;
    }

    // `n` bytes of this rank for all; then take(), in which they are there.
    template <class Take> bool exchanged(const char *from, size_t n, bool is_summed, const Take &take) const
    {
        std::memcpy(slot(comm->rank), from, n);
        if (is_summed && factor != 1.0) {
#define CALL(Element) multiply<Element>(slot(comm->rank), n / sizeof(Element), factor)
            FOR_DTYPE(asked.dtype, CALL)
#undef CALL
        }
        if (!meet(*comm)) {
            return false;
        }
        take();
        return meet(*comm);
    }

    void sum_into(char *to, size_t n) const
    {
        std::memcpy(to, slot(0), n);
        for (int rank = 1; rank < comm->ranks; rank++) {
#define CALL(Element) join<Element>(to, slot(rank), n / sizeof(Element), asked.op)
            FOR_DTYPE(asked.dtype, CALL)
#undef CALL
        }
    }

    void alone() const
    {
        std::memmove(receive, send, bytes());
        if (factor != 1.0) {
#define CALL(Element) multiply<Element>(receive, asked.count, factor)
            FOR_DTYPE(asked.dtype, CALL)
#undef CALL
        }
    }

    void operator()() const
    {
        while (ticket && comm->ended != *ticket && !comm->aborted) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        run();
        comm->ended += ticket.has_value();
    }

    void run() const
    {
        if (comm->aborted) {
            return;
        }
        if (comm->ranks == 1) {
            alone();
            return;
        }
        if (asked.count == 0) {
            return;
        }
        comm->shared->asked[comm->rank] = asked;
        if (!meet(*comm)) {
            return;
        }
        for (int rank = 0; rank < comm->ranks; rank++) {
            const Asked &other = comm->shared->asked[rank];
            if (!(other == asked)) {
                std::fprintf(stderr,
                             "stand-in for NCCL: rank %d: kind %d, %zu of dtype %d; rank %d: kind %d, %zu of %d\n",
                             comm->rank, int(asked.kind), asked.count, asked.dtype, rank, int(other.kind), other.count,
                             other.dtype);
                while (!comm->aborted) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
                return;
            }
        }
        const int parts = asked.kind == Kind::reduce_scatter ? comm->ranks : 1;
        for (int part = 0; part < parts; part++) {
            for (size_t done = 0; done < bytes(); done += SLOT) {
                const size_t n = std::min(SLOT, bytes() - done);
                if (!one(part, done, n)) {
                    return;
                }
            }
        }
    }

    bool one(int part, size_t done, size_t n) const
    {
        switch (asked.kind) {
            case Kind::all_gather:
                return exchanged(send + done, n, false, [&] {
                    for (int rank = 0; rank < comm->ranks; rank++) {
                        std::memcpy(receive + size_t(rank) * bytes() + done, slot(rank), n);
                    }
                });
            case Kind::all_reduce:
                return exchanged(send + done, n, true, [&] { sum_into(receive + done, n); });
            case Kind::reduce:
                return exchanged(send + done, n, true, [&] {
                    if (comm->rank == asked.root) {
                        sum_into(receive + done, n);
                    }
                });
            case Kind::reduce_scatter:
                return exchanged(send + size_t(part) * bytes() + done, n, true, [&] {
                    if (part == comm->rank) {
                        sum_into(receive + done, n);
                    }
                });
            case Kind::broadcast:
                return exchanged(send + done, n, false, [&] { std::memcpy(receive + done, slot(asked.root), n); });
        }
        return false;
    }
};

ncclResult_t
begin(Kind kind, const void *send, void *receive, size_t count, int dtype, int op, int root, ncclComm_t comm,
      cudaStream_t stream)
{
    double factor = 1.0;
    if (op == ncclAvg) {
        factor = 1.0 / comm->ranks;
    }
    else if (op >= ncclNumOps) {
        factor = comm->factors.at(size_t(op - ncclNumOps)).second;
    }
    std::optional<uint64_t> ticket;
    if (!stand_in_is_capturing(stream)) {
        ticket = comm->issued++;
    }
    const int as = op >= ncclNumOps || op == ncclAvg ? int(ncclSum) : op;
    stand_in_put(stream, Call{kept(comm),
                              {kind, count, dtype, as, root},
                              static_cast<const char *>(send),
                              static_cast<char *>(receive),
                              factor,
                              ticket});
    return ncclSuccess;
}

} // namespace

extern "C" {

ncclResult_t
ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t
ncclGetUniqueId(ncclUniqueId *id)
{
    std::random_device random;
    *id = {};
    std::snprintf(id->internal, sizeof id->internal, "/stand-in-nccl-%08x%08x", random(), random());
    return ncclSuccess;
}

ncclResult_t
ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *)
{
    if (ranks > MOST || !stand_in_is_safe("a communicator is made")) {
        return ranks > MOST ? ncclInvalidArgument : ncclUnhandledCudaError;
    }
    auto *comm = new ncclComm{rank, ranks};
    *made = comm;
    if (ranks == 1) {
        return ncclSuccess;
    }
    const size_t bytes = sizeof(Shared) + size_t(ranks) * SLOT;
    const int file = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, off_t(bytes)) != 0) {
        return ncclSystemError;
    }
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    comm->shared = static_cast<Shared *>(memory);
    comm->slots = static_cast<char *>(memory) + sizeof(Shared);
    if (!meet(*comm)) {
        return ncclSystemError;
    }
    if (rank == 0) {
        shm_unlink(id.internal);
    }
    return ncclSuccess;
}

ncclResult_t
ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

ncclResult_t
ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int rank, int, ncclUniqueId *ids, ncclConfig_t *config)
{
    return ncclCommInitRankConfig(comm, ranks, ids[0], rank, config);
}

ncclResult_t
ncclCommAbort(ncclComm_t comm)
{
    if (comm != nullptr) { // torch's second abort of one communicator, which NCCL takes, too
        comm->aborted = true;
    }
    return ncclSuccess;
}

ncclResult_t
ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error)
{
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t
ncclCommCount(const ncclComm_t comm, int *count)
{
    *count = comm->ranks;
    return ncclSuccess;
}

ncclResult_t
ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

const char *
ncclGetErrorString(ncclResult_t error)
{
    return error == ncclSuccess ? "no error" : "an error of the stand-in for NCCL";
}

const char *
ncclGetLastError(ncclComm_t)
{
    return "";
}

ncclResult_t
ncclMemAlloc(void **memory, size_t bytes)
{
    return cudaMalloc(memory, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t
ncclMemFree(void *memory)
{
    return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t
ncclCommRegister(const ncclComm_t, void *memory, size_t, void **handle)
{
    *handle = memory;
    return ncclSuccess;
}

ncclResult_t
ncclCommWindowRegister(ncclComm_t, void *memory, size_t, ncclWindow_t *window, int)
{
    *window = static_cast<ncclWindow_t>(memory);
    return ncclSuccess;
}

ncclResult_t
ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t dtype, ncclScalarResidence_t, ncclComm_t comm)
{
    double factor = 0.0;
    switch (dtype) {
        case ncclFloat64:
            factor = *static_cast<double *>(scalar);
            break;
        case ncclFloat32:
            factor = *static_cast<float *>(scalar);
            break;
        case ncclFloat16:
            factor = fp_f32_of_f16(*static_cast<uint16_t *>(scalar));
            break;
        case ncclBfloat16:
            factor = fp_f32_of_bf16(*static_cast<uint16_t *>(scalar));
            break;
        default:
            return ncclInvalidArgument;
    }
    comm->factors.emplace_back(dtype, factor);
    *op = static_cast<ncclRedOp_t>(ncclNumOps + comm->factors.size() - 1);
    return ncclSuccess;
}

ncclResult_t
ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream)
{
    return begin(Kind::all_gather, send, receive, count, dtype, ncclSum, 0, comm, stream);
}

ncclResult_t
ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
              cudaStream_t stream)
{
    return begin(Kind::all_reduce, send, receive, count, dtype, op, 0, comm, stream);
}

ncclResult_t
ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                  cudaStream_t stream)
{
    return begin(Kind::reduce_scatter, send, receive, count, dtype, op, 0, comm, stream);
}

ncclResult_t
ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
           ncclComm_t comm, cudaStream_t stream)
{
    return begin(Kind::reduce, send, receive, count, dtype, op, root, comm, stream);
}

ncclResult_t
ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
              cudaStream_t stream)
{
    return begin(Kind::broadcast, send, receive, count, dtype, ncclSum, root, comm, stream);
}

ncclResult_t
ncclBcast(void *memory, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream)
{
    return ncclBroadcast(memory, memory, count, dtype, root, comm, stream);
}

} // extern "C"
