// Products of a few rows (up to eight) with a matrix, bound by the bandwidth of reading that matrix once. Every thread
// has several 16-byte loads of it on their way at a time.

constexpr int rows = param::m;
constexpr index_t depth = param::k;

#kernel matvec
// The weight is [N, K] with unit stride along K.
#include "matmul/matvec_warps.cuh"

struct Sums {
    float of[terms][rows];

    // The products of `count` packs of each weight row, a step apart.
    template <int count>
    __device__ __forceinline__ void add(
        const X::type *x, const Weight::type *const (&starts)[terms], index_t first
    ) {
        Pack<Weight::type, pack> read[count][terms];
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int term = 0; term < terms; term++) {
                read[i][term] = stream_pack<pack>(starts[term] + first + i * step);
            }
        }
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int row = 0; row < rows; row++) {
                float values[pack];
                load_floats(values, x + row * X::stride(0) + (first + i * step));
#pragma unroll
                for (int term = 0; term < terms; term++) {
#pragma unroll
                    for (int j = 0; j < pack; j++) {
                        of[term][row] = fmaf(values[j], to_float(read[i][term].item[j]), of[term][row]);
                    }
                }
            }
        }
    }
};

KERNEL(matvec) {
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int split = warp % splits;
    const index_t first_column = (index_t(blockIdx.x) * teams + warp / splits) * columns;
    const Weight::type *starts[terms];
#pragma unroll
    for (int i = 0; i < columns; i++) {
        const index_t column = first_column + i < param::n ? first_column + i : param::n - 1;
        starts[i] = weight + column * Weight::stride(0);
        if constexpr (gated) {
            starts[columns + i] = starts[i] + param::n * Weight::stride(0);
        }
    }
    Sums sums{};
    index_t i = index_t(split * WARP + lane) * pack;
#pragma unroll 1
    for (index_t turn = 0; turn < steps / unrolled; turn++) {
        sums.add<unrolled>(x, starts, i);
        i += unrolled * step;
    }
    if constexpr (steps % unrolled != 0) {
        sums.add<steps % unrolled>(x, starts, i);
        i += steps % unrolled * step;
    }
    if (i + pack <= depth) {
        sums.add<1>(x, starts, i);
    }
    if constexpr (depth % pack != 0) {
        const index_t k = depth / pack * pack + lane;
        if (split == 0 && k < depth) {
#pragma unroll
            for (int term = 0; term < terms; term++) {
#pragma unroll
                for (int row = 0; row < rows; row++) {
                    const float value = to_float(x[row * X::stride(0) + k]);
                    sums.of[term][row] = fmaf(value, to_float(starts[term][k]), sums.of[term][row]);
                }
            }
        }
    }
    finish_columns(sums.of, warp, lane, bias, residual, out);
}

#kernel matvec_notrans
#include "common/stream_pack.cuh"
#include "matmul/linear_result.cuh"

// The weight is [K, N] with unit stride along N: `column_lanes` threads side by side read `pack` columns each, the
// others follow other terms.
constexpr int term_lanes = THREADS / column_lanes;
constexpr int width = column_lanes * pack;  // columns of a block

KERNEL(matvec_notrans) {
    __shared__ float partial[THREADS / WARP][rows][width];
    const int column_lane = threadIdx.x % column_lanes;
    const index_t column = (index_t(blockIdx.x) * column_lanes + column_lane) * pack;
    float sums[rows][pack] = {};
    if (column < param::n) {
#pragma unroll 4
        for (index_t k = threadIdx.x / column_lanes; k < depth; k += term_lanes) {
            const Pack<Weight::type, pack> read = stream_pack<pack>(weight + k * Weight::stride(0) + column);
#pragma unroll
            for (int row = 0; row < rows; row++) {
                const float value = to_float(x[row * X::stride(0) + k * X::stride(1)]);
#pragma unroll
                for (int j = 0; j < pack; j++) {
                    sums[row][j] = fmaf(value, to_float(read.item[j]), sums[row][j]);
                }
            }
        }
    }
#pragma unroll
    for (int row = 0; row < rows; row++) {
#pragma unroll
        for (int j = 0; j < pack; j++) {
#pragma unroll
            for (int lanes = column_lanes; lanes < WARP; lanes *= 2) {
                sums[row][j] += __shfl_xor_sync(0xffffffffu, sums[row][j], lanes);
            }
            if (threadIdx.x % WARP < column_lanes) {
                partial[threadIdx.x / WARP][row][column_lane * pack + j] = sums[row][j];
            }
        }
    }
    __syncthreads();
    for (int result = threadIdx.x; result < rows * width; result += THREADS) {
        const int row = result / width;
        const index_t place = index_t(blockIdx.x) * width + result % width;
        if (place < param::n) {
            float sum = 0.0f;
            for (int warp = 0; warp < THREADS / WARP; warp++) {
                sum += partial[warp][row][result % width];
            }
            finish(sum, 0.0f, Addends(bias, residual, row, place), out, row, place);
        }
    }
}
