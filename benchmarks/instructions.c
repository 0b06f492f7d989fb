/* instructions.c -- the core's hot calls, a function each, for callgrind to count (benchmarks/bench_instructions.py).
 * Each phase_* function is one row of the table. The data are fixed: two runs count the same. */
#include <stdio.h>
#include <stdlib.h>

#include "core/fp_boxes.h"
#include "core/fp_layout.h"
#include "core/fp_pack.h"
#include "core/fp_simd.h"
#include "core/fp_state.h"

enum { PARAMS = 400, NUMEL = 32, BIG = 16384, BIG_SEGMENTS = 4, WORLD = 8 };

#define PHASE __attribute__((noinline, externally_visible)) void

static int64_t sink; /* keeps results alive */
static int64_t numels[PARAMS];
static fp_layout layout;
static fp_segment small[PARAMS], big[BIG_SEGMENTS], big_low[BIG_SEGMENTS];
static float flat[BIG * BIG_SEGMENTS];
static float values[BIG * BIG_SEGMENTS];
static uint16_t low_values[BIG * BIG_SEGMENTS];

static void
need(fp_status status)
{
    if (status != FP_OK) {
        fprintf(stderr, "instructions: status %d\n", (int)status);
        exit(1);
    }
}

PHASE
phase_layout_of_400(void)
{
    fp_layout made;
    need(fp_layout_init(&made, numels, NULL, PARAMS, 4, WORLD, 4));
    sink += made.padded_numel;
    fp_layout_clear(&made);
}

PHASE
phase_parts_of_one_shard(void)
{
    int64_t begin, end;
    size_t first, last;
    need(fp_layout_shard_range(&layout, 3, &begin, &end));
    fp_layout_params_in(&layout, begin, end, &first, &last);
    for (size_t i = first; i < last; i++) {
        sink += fp_layout_part(&layout, i, begin, end).numel;
    }
}

PHASE
phase_boxes_of_a_shard(void)
{
    const int64_t shape[4] = {64, 32, 3, 3};
    int64_t offsets[28], sizes[28];
    size_t count;
    for (int64_t rank = 0; rank < WORLD; rank++) {
        need(fp_boxes_of_range(shape, 4, 2301 * rank, 2301 * (rank + 1), offsets, sizes, &count));
        sink += (int64_t)count;
    }
}

PHASE
phase_states_of_a_step(void)
{
    static const unsigned events[] = {FP_PASS_BEGIN_FORWARD, FP_PASS_END_FORWARD, FP_PASS_EXPECT_BACKWARD,
                                      FP_PASS_BEGIN_BACKWARD, FP_PASS_FINISH_BACKWARD};
    for (int i = 0; i < 100; i++) {
        unsigned state = FP_PASS_IDLE;
        for (size_t e = 0; e < sizeof(events) / sizeof(events[0]); e++) {
            need(fp_state_next(&fp_pass_moves, state, events[e], &state));
        }
        sink += (int64_t)state;
    }
}

PHASE
phase_pack_400_small(void)
{
    need(fp_pack_raw(small, PARAMS, 4, flat, 0, PARAMS * NUMEL, NULL));
}

static void
add_big(const fp_segment *segments, fp_dtype dtype, int has_scale)
{
    const fp_pack_opts opts = {.scale = 0.5, .has_scale = has_scale, .accumulate = 1};
    need(fp_pack(segments, BIG_SEGMENTS, dtype, flat, FP_F32, 0, BIG * BIG_SEGMENTS, &opts));
}

PHASE
phase_add_fp32(void)
{
    add_big(big, FP_F32, 0);
}

PHASE
phase_add_bf16_to_fp32(void)
{
    add_big(big_low, FP_BF16, 0);
}

PHASE
phase_add_scaled_bf16_to_fp32(void)
{
    add_big(big_low, FP_BF16, 1);
}

PHASE
phase_cast_fp32_to_bf16(void)
{
    need(fp_pack(big, BIG_SEGMENTS, FP_F32, low_values, FP_BF16, 0, BIG * BIG_SEGMENTS, NULL));
}

/* The same kernels on the wider registers, where this processor (as valgrind shows it) has them. */
PHASE
phase_avx2_add_bf16_to_fp32(void)
{
    add_big(big_low, FP_BF16, 0);
}

PHASE
phase_avx2_cast_fp32_to_bf16(void)
{
    need(fp_pack(big, BIG_SEGMENTS, FP_F32, low_values, FP_BF16, 0, BIG * BIG_SEGMENTS, NULL));
}

int
main(void)
{
    for (int i = 0; i < PARAMS; i++) {
        numels[i] = NUMEL + i % 7;
        small[i] = (fp_segment){.data = values + NUMEL * i, .start = NUMEL * i, .numel = NUMEL};
    }
    for (int i = 0; i < BIG_SEGMENTS; i++) {
        big[i] = (fp_segment){.data = values + BIG * i, .start = BIG * i, .numel = BIG};
        big_low[i] = (fp_segment){.data = low_values + BIG * i, .start = BIG * i, .numel = BIG};
    }
    need(fp_layout_init(&layout, numels, NULL, PARAMS, 4, WORLD, 4));
    need(fp_simd_set_level(FP_SIMD_BASELINE));
    phase_layout_of_400();
    phase_parts_of_one_shard();
    phase_boxes_of_a_shard();
    phase_states_of_a_step();
    phase_pack_400_small();
    phase_add_fp32();
    phase_add_bf16_to_fp32();
    phase_add_scaled_bf16_to_fp32();
    phase_cast_fp32_to_bf16();
    if (fp_simd_supported(FP_SIMD_AVX2)) {
        need(fp_simd_set_level(FP_SIMD_AVX2));
        phase_avx2_add_bf16_to_fp32();
        phase_avx2_cast_fp32_to_bf16();
    }
    fp_layout_clear(&layout);
    return sink == 0;
}
