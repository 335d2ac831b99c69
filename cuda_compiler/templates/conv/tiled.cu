// Convolutions of 16-bit images on tensor cores; `tiles.cuh` says how they are cut into tiles.
//
// `conv_tiled` multiplies by warps; `conv_wgmma` by warpgroups, on GPUs of compute capability 9.0 only.

static_assert(sizeof(X::type) == 2, "");

using Half = X::type;
using Sum = float;
constexpr int UNIT_BYTES = 16;
constexpr unsigned PADDING_WORD = 0;

#include "conv/tiles.cuh"
#include "conv/finish.cuh"
#include "common/tensor_cores.cuh"

__device__ __forceinline__ void add_product(float &sum, Half left, Half right) {
    sum = fmaf(to_float(left), to_float(right), sum);
}

#kernel conv_tiled
#define TILED conv_tiled
#include "conv/warp_products.cuh"

#kernel conv_wgmma
#define TILED conv_wgmma
#include "common/warpgroup.cuh"
#include "conv/warpgroup_products.cuh"

#kernel conv_tiled conv_wgmma
#include "conv/tile_sums.cuh"
#include "conv/shared_sums.cuh"
#include "conv/spread.cuh"

// Channels that a thread finishes at a time, and threads that finish one row: a warp where rows of the result are not aligned, so that
// what a row needs is computed once for several channels, which neighbouring lanes write side by side.
constexpr int FINISHED = aligned ? PACK : 1;
constexpr int ROW_THREADS = aligned ? tile_n / PACK : smaller(WARP, tile_n);

WAITING_KERNEL(TILED) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Tile tile = own_tile();
    if (tile.sharer >= SHARERS) {
        return;
    }
    if constexpr (!constant_weight) {
        wait_for_inputs();
    }
    float sums[M_FRAGMENTS][N_FRAGMENTS][4];
    sum_products(sums, memory, x, weight, tile, [] {});

    float *partial = reinterpret_cast<float *>(memory);
    keep_sums(partial, sums);
    constexpr int own_rows = tile_m / SHARERS;
    for (int i = threadIdx.x; i < own_rows * ROW_THREADS; i += THREADS) {
        const int tile_row = int(tile.sharer) * own_rows + i / ROW_THREADS;
        const unsigned number = tile.first_window + tile_row;
#pragma unroll
        for (int tile_column = i % ROW_THREADS * FINISHED; tile_column < tile_n; tile_column += ROW_THREADS * FINISHED) {
            const unsigned channel = tile.first_channel + tile_column;
            if (number >= ROWS || channel >= tile.end_channel) {
                break;
            }
            const Target target = target_of(number % WINDOWS, channel);
            if (!target.exists) {
                continue;
            }
            float values[FINISHED];
            whole_sums(values, partial + tile_row * SUM_STAGE + tile_column);
            finish(values, bias, residual, out, number / WINDOWS, target.channel, target.pixel);
        }
    }
    part_from_cluster();
}
