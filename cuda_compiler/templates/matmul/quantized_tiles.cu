// Products of many rows with a weight [N, K] in few bits on tensor cores: the codes become 16-bit integers (or float8 values) in
// registers, exactly, and the scale of a group multiplies the sum of its products. A minimum multiplies the sum of the group's
// terms of x, which is one more product, with ones.
//
// A block makes tile_m rows × tile_n columns from its share of the terms, tile_k of them at a time, `stages` copies on their way; a
// step has 64 bytes of each row of the weight. The `splits` blocks of a cluster share the terms of a tile, and each finishes some of
// its rows from the partial sums in all their shared memories. GPUs without clusters leave the work to the first of them.
//
// Of 32 terms, lane 4g + p takes terms 8p to 8p + 7 of row g, of x as of the weight: the order of terms in a fragment is free.

using Half = X::type;

#include "common/tensor_cores.cuh"
#include "common/code_factors.cuh"
#include "common/cluster.cuh"
#include "matmul/linear_result.cuh"

constexpr int step_bytes = 64;  // of a row of the weight
constexpr int tile_k = in_nibbles ? 2 * step_bytes : step_bytes;
constexpr int x_packs = tile_k / 8;  // of a row
constexpr int blocks_k = tile_k / 32;
constexpr int scaled_blocks = param::groups == 1 ? blocks_k : scaled_terms / 32;  // whose sum has one scale
constexpr int sums_of_step = blocks_k / scaled_blocks;
constexpr int warp_n = tile_n / (THREADS / WARP);
constexpr int m_fragments = tile_m / 16;
constexpr int n_fragments = warp_n / 8;
constexpr int weight_bytes = tile_n * step_bytes;
constexpr int stage_bytes = weight_bytes + tile_m * tile_k * 2;
constexpr int sum_stage = tile_n + 4;  // so that a column's elements lie in different banks
constexpr index_t row_bytes = in_nibbles ? param::k / 2 : param::k;
constexpr unsigned steps = (unsigned(param::k) + tile_k - 1) / tile_k;
constexpr unsigned tiles_m = (unsigned(param::m) + tile_m - 1) / tile_m;

static_assert(group % 32 == 0 && warp_n % 8 == 0, "");

#if __CUDA_ARCH__ >= 900
constexpr int sharers = splits;
#else
constexpr int sharers = 1;
#endif

// Where 16 bytes of a staged row lie, so that the lanes of a warp read from different banks.
__device__ __forceinline__ int staged_codes(int row, int chunk) {
    return row * step_bytes + (chunk ^ (in_nibbles ? row / 2 % 4 : row / 2 % 2 * 2)) * 16;
}
__device__ __forceinline__ int staged_x(int row, int pack) { return row * tile_k * 2 + (pack ^ row % 2 * 4) * 16; }

#kernel quantized_tiles
WAITING_KERNEL(quantized_tiles) {
    extern __shared__ __align__(16) unsigned char memory[];
    const unsigned sharer = blockIdx.z;
    if (sharer >= sharers) {
        return;
    }
    const int first_row = int(blockIdx.x % tiles_m) * tile_m;
    const unsigned first_column = blockIdx.x / tiles_m * tile_n;
    const unsigned first_step = sharer * steps / sharers;
    const unsigned end_step = (sharer + 1) * steps / sharers;
    const int lane = threadIdx.x % WARP;
    const int warp_column = threadIdx.x / WARP * warp_n;  // of the tile; a warp has all rows

    const auto stage = [&](unsigned step) { return memory + (step - first_step) % stages * stage_bytes; };
    const auto copy_codes = [&](unsigned step) {
#pragma unroll
        for (int i = threadIdx.x; i < tile_n * 4; i += THREADS) {
            const index_t row = first_column + i / 4;
            const index_t at = index_t(step) * step_bytes + i % 4 * 16;
            const bool inside = row < param::n && at < row_bytes && step < end_step;
            const unsigned char *from = data + (inside ? row * Data::stride(0) + at : 0);
            copy_words(reinterpret_cast<Half *>(stage(step) + staged_codes(i / 4, i % 4)),
                       reinterpret_cast<const Half *>(from), inside);
        }
    };
    const auto copy_x = [&](unsigned step) {
#pragma unroll
        for (int i = threadIdx.x; i < tile_m * x_packs; i += THREADS) {
            const index_t row = first_row + i / x_packs;
            const index_t at = index_t(step) * tile_k + i % x_packs * 8;
            const bool inside = row < param::m && at < param::k && step < end_step;
            copy_words(reinterpret_cast<Half *>(stage(step) + weight_bytes + staged_x(i / x_packs, i % x_packs)),
                       x + (inside ? row * X::stride(0) + at : 0), inside);
        }
    };
    begin_in_turn();
#pragma unroll
    for (int step = 0; step < stages - 1; step++) {
        copy_codes(first_step + step);
        copy_x(first_step + step);
        end_of_copies();
    }

    float sums[m_fragments][n_fragments][4] = {};
    float x_sums[m_fragments][4] = {};  // of rows of x, for minimums, in all columns alike
    // What is common to the codes of a group: the zeros of row 8n + g of a warp's part of the weight, the scales and minimums of its
    // columns.
    struct Common {
        unsigned zeros[n_fragments];
        Scales::type scales[n_fragments][2];
        Offset::type minimums[has_minimum ? n_fragments : 1][2];

        // `total` and what a sum of codes times x stands for, in one of two columns of a fragment.
        __device__ __forceinline__ float added(float total, int n, int side, float sum, float x_sum) const {
            total = fmaf(sum, to_float(scales[n][side]), total);
            if constexpr (has_minimum) {
                total = fmaf(x_sum, to_float(minimums[n][side]), total);
            }
            return total;
        }
    };
    const auto weight_row = [&](int n, int within) {
        const index_t row = first_column + warp_column + 8 * n + within;
        return row < param::n ? row : param::n - 1;
    };
    const auto load_common = [&](unsigned term) {
        const index_t number = term < param::k ? term / unsigned(group) : 0;
        Common found;
#pragma unroll
        for (int n = 0; n < n_fragments; n++) {
            found.zeros[n] = less_zero_of(offset, weight_row(n, lane / 4) * Offset::stride(0) + number);
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const index_t row = weight_row(n, lane % 4 * 2 + side);
                found.scales[n][side] = scales[row * Scales::stride(0) + number];
                if constexpr (has_minimum) {
                    found.minimums[n][side] = offset[row * Offset::stride(0) + number];
                }
            }
        }
        return found;
    };
    Common next = load_common(first_step * tile_k);
    for (unsigned step = first_step; step < end_step; step++) {
        wait_for_copies<stages - 2>();
        __syncthreads();
        copy_codes(step + stages - 1);
        copy_x(step + stages - 1);
        end_of_copies();
        const unsigned char *codes = stage(step);
        const unsigned char *rows = codes + weight_bytes;
#pragma unroll
        for (int part = 0; part < sums_of_step; part++) {
            const Common common = next;
            if constexpr (param::groups != 1) {
                next = load_common(step * tile_k + (part + 1) * scaled_blocks * 32);
            }
            float partial[m_fragments][n_fragments][4] = {};
            float(&target)[m_fragments][n_fragments][4] = param::groups == 1 ? sums : partial;
            float partial_x[m_fragments][4] = {};
            float(&target_x)[m_fragments][4] = param::groups == 1 ? x_sums : partial_x;
#pragma unroll
            for (int block = part * scaled_blocks; block < (part + 1) * scaled_blocks; block++) {
                unsigned right[n_fragments][4];
#pragma unroll
                for (int n = 0; n < n_fragments; n++) {
                    const int row = warp_column + 8 * n + lane / 4;
                    const int byte = (block * 32 + lane % 4 * 8) / (in_nibbles ? 2 : 1);
                    const Factors made(codes + staged_codes(row, byte / 16) + byte % 16, common.zeros[n]);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        right[n][i] = made.pair[i];
                    }
                }
#pragma unroll
                for (int m = 0; m < m_fragments; m++) {
                    const int row = 16 * m + lane / 4;
                    const auto terms = [&](int row) {
                        const unsigned char *place = rows + staged_x(row, 4 * block + lane % 4);
                        return in_order_of_factors(*reinterpret_cast<const Words *>(place));
                    };
                    const Words top = terms(row);
                    const Words bottom = terms(row + 8);
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
#pragma unroll
                        for (int n = 0; n < n_fragments; n++) {
                            multiply(target[m][n], top.at[i], bottom.at[i], top.at[i + 1], bottom.at[i + 1],
                                     right[n][i], right[n][i + 1]);
                        }
                        if constexpr (has_minimum) {
                            multiply(target_x[m], top.at[i], bottom.at[i], top.at[i + 1], bottom.at[i + 1], one,
                                     one);
                        }
                    }
                }
            }
            if constexpr (param::groups != 1) {
#pragma unroll
                for (int n = 0; n < n_fragments; n++) {
#pragma unroll
                    for (int m = 0; m < m_fragments; m++) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            sums[m][n][i] = common.added(sums[m][n][i], n, i % 2, partial[m][n][i], partial_x[m][i]);
                        }
                    }
                }
            }
        }
    }
    wait_for_copies<0>();
    __syncthreads();

    float *partial = reinterpret_cast<float *>(memory);
#pragma unroll
    for (int n = 0; n < n_fragments; n++) {
#pragma unroll
        for (int m = 0; m < m_fragments; m++) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int row = 16 * m + i / 2 * 8 + lane / 4;
                Pack<float, 2> pair{{sums[m][n][i], sums[m][n][i + 1]}};
                if constexpr (param::groups == 1) {
                    pair.item[0] = next.added(0.0f, n, 0, pair.item[0], x_sums[m][i]);
                    pair.item[1] = next.added(0.0f, n, 1, pair.item[1], x_sums[m][i + 1]);
                }
                store_pack<2>(partial + row * sum_stage + warp_column + 8 * n + lane % 4 * 2, pair);
            }
        }
    }
    if constexpr (sharers > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    constexpr int own_rows = tile_m / sharers;
    for (int i = threadIdx.x; i < own_rows * tile_n; i += THREADS) {
        const int tile_row = int(sharer) * own_rows + i / tile_n;
        const int tile_column = i % tile_n;
        const index_t row = first_row + tile_row;
        const index_t column = first_column + tile_column;
        if (row < param::m && column < param::n) {
            const float *own = partial + tile_row * sum_stage + tile_column;
            float sum = 0.0f;
#pragma unroll
            for (unsigned other = 0; other < sharers; other++) {
                sum += sharers > 1 ? read_from(other, own) : *own;
            }
            finish(sum, 0.0f, Addends(bias, residual, row, column), out, row, column);
        }
    }
    if constexpr (sharers > 1) {
        cluster_barrier();  // none may end, and take its partial sums along, while others read them
    }
}
