// How the warps of a block divide a product of a few rows, and how they finish it. A warp takes `columns` rows of the weight (with a
// gate, also their partners), or, where `splits` > 1, a part of their terms. Expects `rows`.

#include "common/stream_pack.cuh"
#include "matmul/linear_result.cuh"

constexpr int terms = gated ? 2 * columns : columns;
constexpr int warps = THREADS / WARP;
constexpr int teams = warps / splits;
constexpr index_t step = index_t(splits) * WARP * pack;
constexpr index_t steps = param::k / step;

// Adds up what the lanes and the warps have found, and stores the results.
__device__ __forceinline__ void finish_columns(
    const float (&sums)[terms][rows], int warp, int lane, const Bias::type *bias, const Residual::type *residual, Out::type *out
) {
    __shared__ float partial[warps][terms][rows];
#pragma unroll
    for (int term = 0; term < terms; term++) {
#pragma unroll
        for (int row = 0; row < rows; row++) {
            const float sum = warp_sum(sums[term][row]);
            if (lane == 0) {
                partial[warp][term][row] = sum;
            }
        }
    }
    __syncthreads();
    for (int result = threadIdx.x; result < teams * columns * rows; result += THREADS) {
        const int team = result / (columns * rows);
        const int term = result / rows % columns;
        const int row = result % rows;
        const index_t column = (index_t(blockIdx.x) * teams + team) * columns + term;
        if (column < param::n) {
            float sum = 0.0f;
            float up = 0.0f;
            for (int part = 0; part < splits; part++) {
                sum += partial[team * splits + part][term][row];
                if constexpr (gated) {
                    up += partial[team * splits + part][columns + term][row];
                }
            }
            finish(sum, up, Addends(bias, residual, row, column), out, row, column);
        }
    }
}
