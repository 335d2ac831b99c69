// Products of some dozens of rows with a weight [N, K] in 16 bits by a warpgroup: all rows of x, as the left side, with a block's
// columns of the weight. Both lie in shared memory.
//
// W4. Rows of the left side beyond those of x are whatever lies behind it, and copies may be changing it. Their sums are not stored.

using Half = X::type;

#include "matmul/linear_wgmma_layout.cuh"

constexpr int product_threads = warpgroup_threads;
constexpr int beyond = larger(warpgroup_rows - held_rows - columns, 0);  // rows that products read in vain

static_assert(columns % 8 == 0 && held_rows <= warpgroup_rows, "");

struct alignas(1024) Stage {
    Half x[slabs][held_rows][slab_width];
    Half weight[slabs][columns][slab_width];
};

#include "matmul/linear_wgmma_ring.cuh"

// Copies all of the block's steps.
__device__ __forceinline__ void copy_weight(
    Memory &memory, const Weight::type *weight, int thread, int first_step, int steps
) {
    const Copier<columns> copier(thread, [&](int row) { return weight_row(row) * Weight::stride(0); });
    copier.copy_all(memory, steps, [&](Stage &stage, int step) {
        copier.copy(stage.weight, weight, first_step + step);
    });
}

// sums[64 × 8 · count] += x · weightᵀ, from the fragment number `first` on, in as few products as there are sizes for.
template <int first = 0, int count>
__device__ __forceinline__ void multiply_columns(
    float (&sums)[count][4], unsigned long long left, unsigned long long right
) {
    constexpr int rest = count - first;
    if constexpr (rest > 0) {
        constexpr int most = rest >= 12 ? rest / 4 * 4 : rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
        constexpr int taken = smaller(most, 20);
        multiply_shared(*reinterpret_cast<float (*)[taken][4]>(&sums[first]), left, further(right, first * 1024), true);
        multiply_columns<first + taken>(sums, left, right);
    }
}

// The sums of the block's terms, by the warpgroup.
__device__ __forceinline__ void sum_up(float (&sums)[columns / 8][4], Memory &memory, int steps) {
    Turn turn;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const Stage &stage = memory.ring[turn.stage];
        memory.filled[turn.stage].wait(turn.parity);
        show_to_products();
        pin(sums);
        begin_products();
#pragma unroll
        for (int slab = 0; slab < slabs; slab++) {
            const unsigned long long left = matrix_at(shared_address(stage.x[slab]), 0);
            const unsigned long long right = matrix_at(shared_address(stage.weight[slab]), 0);
#pragma unroll
            for (int part = 0; part < slab_width / 16; part++) {
                multiply_columns(sums, further(left, 32 * part), further(right, 32 * part));
            }
        }
        end_of_products();
        wait_for_products<0>();
        pin(sums);
        if (threadIdx.x % WARP == 0) {
            memory.free[turn.stage].arrive();  // W2
        }
        turn.advance();
    }
}

// Puts the sums where the ring was, which nobody needs any more, but for those of rows that there are not (W4).
__device__ __forceinline__ void store_sums(float *target, const float (&sums)[columns / 8][4]) {
    const int lane = int(threadIdx.x) % WARP;
    const int first = int(threadIdx.x) / WARP * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (first + 8 * half < int(param::m)) {
            float *found = target + (first + 8 * half) * sums_stride + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < columns / 8; i++) {
                store_pack<2>(found + 8 * i, Pack<float, 2>{{sums[i][2 * half], sums[i][2 * half + 1]}});
            }
        }
    }
}

__device__ __forceinline__ void multiply_and_store(
    float *target, Memory &memory, const Weight::type *, int, int steps
) {
    float sums[columns / 8][4] = {};
    sum_up(sums, memory, steps);
    sync_some<1, product_threads>();
    store_sums(target, sums);
}

#define WEIGHT weight

#kernel linear_wgmma
#include "matmul/linear_wgmma_kernel.cuh"
