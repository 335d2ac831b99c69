// Sums of what the experts of a row compute, each times its weight, and of the residual, by tensor cores. A block makes 16 columns of a
// row's sum; each expert's part of them is that of `splits` warps, which share its terms.

using Half = X::type;

#include "common/tensor_cores.cuh"
#include "common/stream_pack.cuh"

constexpr int held = 8;  // of which one is a row of x
#include "matmul/expert_batch.cuh"

constexpr int warps = THREADS / WARP;
constexpr int choices = warps / splits;
constexpr int shared_by = int(Experts::numel / X::size(0));
constexpr index_t columns = Out::size(1);

WAITING_KERNEL(expert_sum) {
    __shared__ float sums[warps][16];
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, p = threadIdx.x % 4;
    const index_t row = blockIdx.y, number = row * choices + warp / splits;
    const index_t first_column = index_t(blockIdx.x) * 16;
    if constexpr (!ahead) {
        begin_in_turn();
    }
    // Not by the L1 cache, which may still hold what stood there in an earlier step.
    const unsigned expert = unsigned(*static_cast<const volatile Experts::type *>(experts + Experts::offset(number)));
    const Half *from[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const index_t column = first_column + g + 8 * half;
        from[half] = weight + index_t(expert < param::e ? expert : 0) * Weight::stride(0)
            + (column < columns ? column : columns - 1) * Weight::stride(1);
    }
    const int begin = warp % splits * unrolled;
    Batch batch;
    batch.load_weights(from, begin);
    if constexpr (ahead) {
        begin_in_turn();
    }
    const Half *const own[1] = {g == 0 ? x + number / shared_by * X::stride(0) : nullptr};
    float products[1][4] = {};
#pragma unroll 1
    for (int piece = begin; piece < pieces; piece += splits * unrolled) {
        if (piece > begin) {
            batch.load_weights(from, piece);
        }
        batch.load_x(own, piece);
        batch.multiply_into(products);
    }
    if (p == 0) {
        sums[warp][g] = expert < param::e ? products[0][0] : 0.0f;
        sums[warp][g + 8] = expert < param::e ? products[0][2] : 0.0f;
    }
    __syncthreads();
    const index_t column = first_column + threadIdx.x;
    if (threadIdx.x < 16 && column < columns) {
        float total = 0.0f;
#pragma unroll
        for (int choice = 0; choice < choices; choice++) {
            float sum = 0.0f;
#pragma unroll
            for (int part = 0; part < splits; part++) {
                sum += sums[choice * splits + part][threadIdx.x];
            }
            const float share = to_float(weights[row * Weights::stride(0) + choice * Weights::stride(1)]);
            if constexpr (Bias::present) {
                const unsigned chosen = unsigned(experts[Experts::offset(row * choices + choice)]);
                sum += chosen < param::e ? to_float(bias[chosen * Bias::stride(0) + column * Bias::stride(1)]) : 0.0f;
            }
            total = fmaf(share, sum, total);
        }
        if constexpr (Residual::present) {
            total += to_float(residual[row * columns + column]);
        }
        out[row * columns + column] = ::from<Out::type>(total);
    }
}
