// Products of a few rows (up to eight) with a weight [N, K] in few bits, bound by the bandwidth of reading it once; and such a
// weight widened, for products of many rows.

#include "common/stored_codes.cuh"

#kernel quantized_matvec
// A warp takes one row of the weight (with a gate, also its partner), or, where `splits` > 1, a part of its terms.
constexpr int rows = param::m;
constexpr int terms = gated ? 2 : 1;
constexpr int warps = THREADS / WARP;
constexpr int teams = warps / splits;

#include "matmul/linear_result.cuh"

KERNEL(quantized_matvec) {
    __shared__ float partial[warps][terms][rows];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const index_t wanted = index_t(blockIdx.x) * teams + warp / splits;
    const index_t weight_row = wanted < param::n ? wanted : param::n - 1;
    float sums[terms][rows] = {};
#pragma unroll unrolled
    for (index_t at = index_t(warp % splits * WARP + lane) * pack; at < param::k; at += splits * WARP * pack) {
        float codes[terms][pack];
#pragma unroll
        for (int term = 0; term < terms; term++) {
            const index_t weight_at = weight_row + term * param::n;
            if constexpr (in_one_group) {
                to_codes(codes[term], load_codes(data, weight_at, at));
            } else {
                load_elements(codes[term], data, scales, offset, weight_at, at);
            }
        }
#pragma unroll
        for (int row = 0; row < rows; row++) {
            float values[pack];
            constexpr int side_by_side = smaller(smaller(pack, X::vector), 16 / sizeof(X::type));
#pragma unroll
            for (int i = 0; i < pack; i += side_by_side) {
                float few[side_by_side];
                load_floats(few, x + row * X::stride(0) + at + i);
#pragma unroll
                for (int j = 0; j < side_by_side; j++) {
                    values[i + j] = few[j];
                }
            }
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < pack; i++) {
                total += values[i];
            }
#pragma unroll
            for (int term = 0; term < terms; term++) {
                const Group whole(scales, offset, weight_row + term * param::n, at);
                float product = in_one_group ? -whole.zero * total : 0.0f;
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    product = fmaf(values[i], codes[term][i], product);
                }
                sums[term][row] += in_one_group ? fmaf(whole.scale, product, whole.minimum * total) : product;
            }
        }
    }
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
    for (int result = threadIdx.x; result < teams * rows; result += THREADS) {
        const int team = result / rows;
        const int row = result % rows;
        const index_t column = index_t(blockIdx.x) * teams + team;
        if (column < param::n) {
            float sum = 0.0f;
            float up = 0.0f;
            for (int part = 0; part < splits; part++) {
                sum += partial[team * splits + part][0][row];
                if constexpr (gated) {
                    up += partial[team * splits + part][terms - 1][row];
                }
            }
            finish(sum, up, Addends(bias, residual, row, column), out, row, column);
        }
    }
}

#kernel dequantize
KERNEL(dequantize) {
    const index_t at = (index_t(blockIdx.x) * THREADS + threadIdx.x) * pack;
    if (at < Out::numel) {
        float values[pack];
        load_elements(values, data, scales, offset, at / param::k, at % param::k);
        constexpr int side_by_side = smaller(smaller(pack, Out::vector), 16 / sizeof(Out::type));
#pragma unroll
        for (int i = 0; i < pack; i += side_by_side) {
            float few[side_by_side];
#pragma unroll
            for (int j = 0; j < side_by_side; j++) {
                few[j] = values[i + j];
            }
            store_floats(out + at + i, few);
        }
    }
}

#kernel quantized_embedding_kernel
// A thread per pack of an id's row.
KERNEL(quantized_embedding_kernel) {
    constexpr index_t columns = param::k / pack;
    const index_t number = index_t(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= Ids::numel * columns) {
        return;
    }
    const index_t column = number % columns * pack;
    const index_t id = number / columns;
    const index_t row = unsigned(ids[Ids::offset(id)]);
    Out::type *to = out + leading_offset<Out, Out::rank - 1>(id) + column * Out::stride(Out::rank - 1);
    float values[pack];
    if (param::checked || row < param::rows) {
        load_elements(values, data, scales, offset, row, column);
    }
#pragma unroll
    for (int i = 0; i < pack; i++) {
        const bool found = param::checked || row < param::rows;
        to[i * Out::stride(Out::rank - 1)] = found ? from<Out::type>(values[i]) : missing<Out::type>();
    }
}
