// kernels.cpp -- our kernels without torch. racecheck is run on this: in a process with torch it ends in kernels of torch's. Few and
// many tensors of each dtype are packed, measured and scaled, and what comes out is compared with arithmetic. Prints the first that
// differs; returns 1 then.
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

extern "C" {
#include "core/fp_float.h"
#include "cuda/fp_kernels.h"
}

static constexpr fp_dtype dtypes[] = {FP_F64, FP_F32, FP_BF16, FP_F16};
enum { MANY = 300, NUMEL = 80000 };                  // tensors, and elements of all of them, at most
static constexpr uint32_t counts[] = {3, 100, MANY}; // the first two fit into small arguments

static void
check(int error)
{
    if (error != cudaSuccess) {
        std::printf("%s\n", fp_cuda_kernels.message(error));
        std::exit(1);
    }
}

static void
check_equal(double found, double wanted, const char *what, int64_t at)
{
    if (found != wanted) {
        std::printf("%s: found %g, expected %g, at %lld\n", what, found, wanted, static_cast<long long>(at));
        std::exit(1);
    }
}

// n tensors, each at a multiple of 16 bytes. A few have thousands of elements, many have 1 + 13 * i % 257. Every element of tensor i
// is 1 + i % 7.
struct Tensors {
    uint32_t n;
    fp_dtype dtype;
    int64_t numel[MANY];
    int64_t place[MANY]; // in bytes
    int64_t bytes;
};

static Tensors tensors;
static unsigned char host[NUMEL * sizeof(double)];
static unsigned char *device, *flat;

static double
value_of(uint32_t i)
{
    return 1 + i % 7;
}

static void
make(uint32_t n, fp_dtype dtype)
{
    tensors.n = n;
    tensors.dtype = dtype;
    tensors.bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        tensors.numel[i] = n < 10 ? 9000 * (i + 1) + i : 1 + 13 * i % 257;
        tensors.place[i] = tensors.bytes;
        for (int64_t k = 0; k < tensors.numel[i]; k++) {
            fp_store_f64(host + tensors.place[i], static_cast<size_t>(k), dtype, value_of(i));
        }
        tensors.bytes += (tensors.numel[i] * static_cast<int64_t>(fp_dtype_bytes(dtype)) + 15) / 16 * 16;
    }
    check(cudaMemcpy(device, host, static_cast<size_t>(tensors.bytes), cudaMemcpyHostToDevice));
}

// Their table, in the flat buffer or as a list, and where it ends.
static fp_table
table(bool is_list, int64_t *end)
{
    static fp_piece pieces[MANY];
    *end = 0;
    for (uint32_t i = 0; i < tensors.n; i++) {
        const void *data = device + tensors.place[i];
        const int64_t start = is_list ? fp_list_start(*end, data, tensors.dtype) : *end;
        pieces[i] = {data, start, tensors.numel[i], 0, 0, static_cast<uint16_t>(tensors.dtype)};
        *end = start + tensors.numel[i];
    }
    return {pieces, tensors.n * sizeof(fp_piece), tensors.n};
}

static void
check_pack(fp_dtype to)
{
    int64_t end = 0, at = 0;
    const fp_table of = table(false, &end);
    const size_t bytes = static_cast<size_t>(end) * fp_dtype_bytes(to);
    const fp_pack_job job = {flat, 0, end, 1.0, 2.0, 1, 1, to};
    check(cudaMemset(flat, 0, bytes));
    check(fp_cuda_kernels.pack(&job, &of, nullptr));
    check(cudaMemcpy(host, flat, bytes, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < tensors.n; i++) {
        for (int64_t k = 0; k < tensors.numel[i]; k++, at++) {
            check_equal(fp_load_f64(host, static_cast<size_t>(at), to), 2 * value_of(i), "pack", at);
        }
    }
}

static void
check_norm(bool is_max, double *partials, double *result)
{
    double wanted = 0, found = 0;
    for (uint32_t i = 0; i < tensors.n; i++) {
        const double squares = value_of(i) * value_of(i) * static_cast<double>(tensors.numel[i]);
        wanted = !is_max ? wanted + squares : wanted < value_of(i) ? value_of(i) : wanted;
    }
    int64_t end = 0;
    const fp_table of = table(true, &end);
    const fp_norm_job job = {end, partials, result, is_max, 1};
    for (int turn = 0; turn < 3; turn++) {
        check(fp_cuda_kernels.norm(&job, &of, nullptr));
        check(cudaMemcpy(&found, result, sizeof found, cudaMemcpyDeviceToHost));
        check_equal(found, wanted, is_max ? "largest magnitude" : "sum of squares", turn);
    }
}

static void
check_scale(double *factor)
{
    const double half = 0.5;
    int64_t end = 0;
    const fp_table of = table(true, &end);
    const fp_scale_job job = {end, factor, 1};
    check(cudaMemcpy(factor, &half, sizeof half, cudaMemcpyHostToDevice));
    check(fp_cuda_kernels.scale(&job, &of, nullptr));
    check(cudaMemcpy(host, device, static_cast<size_t>(tensors.bytes), cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < tensors.n; i++) {
        for (int64_t k = 0; k < tensors.numel[i]; k++) {
            const double found = fp_load_f64(host + tensors.place[i], static_cast<size_t>(k), tensors.dtype);
            check_equal(found, value_of(i) / 2, "scale", k);
        }
    }
}

int
main()
{
    void *partials = nullptr, *number = nullptr;
    check(cudaMalloc(reinterpret_cast<void **>(&device), sizeof host));
    check(cudaMalloc(reinterpret_cast<void **>(&flat), sizeof host));
    check(cudaMalloc(&partials, (FP_NORM_BLOCKS + 1) * sizeof(double)));
    check(cudaMalloc(&number, sizeof(double)));
    for (const uint32_t n : counts) {
        for (const fp_dtype from : dtypes) {
            make(n, from);
            for (const fp_dtype to : dtypes) {
                check_pack(to);
            }
            check_norm(false, static_cast<double *>(partials), static_cast<double *>(number));
            check_norm(true, static_cast<double *>(partials), static_cast<double *>(number));
            check_scale(static_cast<double *>(number));
        }
    }
    std::printf("kernels passed\n");
    return 0;
}
