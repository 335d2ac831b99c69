// Convolutions over channels-last images as a matrix product of patches[pixels, DEPTH] and weight[channels, DEPTH] on tensor
// cores; the terms are
// ordered by tap, then by input channel, PACK of them side by side in both.
//
// A block makes tile_m pixels × tile_n channels from its share of the terms, tile_k of them at a time, `stages` copies on
// their way. The `splits` blocks of a cluster share the terms of a tile, and each of them finishes some of its rows from
// the partial sums in all their shared memories. GPUs without clusters leave the work to the first of them.
//
// `conv_tiled` multiplies by warps; `conv_wgmma` by warpgroups, while the copies of later steps go on, on GPUs of compute
// capability 9.0 only.
#include "conv/places.cuh"
#include "conv/finish.cuh"

static_assert(sizeof(X::type) == 2 && Weight::size(1) % PACK == 0, "");

using Half = X::type;

constexpr unsigned ROWS = unsigned(Out::size(0)) * PIXELS;
constexpr unsigned CHANNELS = unsigned(Out::size(1));
constexpr unsigned TILES_M = (ROWS + tile_m - 1) / tile_m;
constexpr unsigned TILES_N = (CHANNELS + tile_n - 1) / tile_n;
constexpr unsigned BAND = 16;  // tiles of pixels whose tiles run at about the same time, so that they share the cache
constexpr unsigned CHANNEL_PACKS = unsigned(Weight::size(1)) / PACK;
constexpr unsigned TAPS = unsigned(Weight::size(2) * Weight::size(3));
constexpr unsigned DEPTH = CHANNEL_PACKS * TAPS;  // in packs
constexpr unsigned ROW_PACKS = tile_k / PACK;
constexpr unsigned STEPS = (DEPTH + ROW_PACKS - 1) / ROW_PACKS;
constexpr int PASS = THREADS / ROW_PACKS;  // rows of a tile that the threads copy at a time, a pack each
constexpr int warp_m = tile_m / warps_m;
constexpr int warp_n = tile_n / warps_n;
constexpr int M_FRAGMENTS = warp_m / 16;
constexpr int N_FRAGMENTS = warp_n / 8;
constexpr int SUM_STAGE = tile_n + 4;  // so that a column's elements lie in different banks
constexpr int STAGE_BYTES = (tile_m + tile_n) * tile_k * 2;

static_assert(warps_m * warps_n * WARP == THREADS && tile_m % PASS == 0 && tile_n % PASS == 0, "");
static_assert(warp_m % 16 == 0 && warp_n % 16 == 0 && ROW_PACKS == 8, "");

// A signed offset into x.
template <int bytes>
struct Signed { using type = int; };
template <>
struct Signed<8> { using type = long long; };
using Offset = Signed<sizeof(index_t)>::type;

#include "common/tensor_cores.cuh"

// Where a pack of a staged row lies: the 8 packs of a row are exchanged so that those of one column are in different banks.
// That is also how warpgroups read matrices.
__device__ __forceinline__ int staged(int row, int pack) { return row * tile_k + (pack ^ row & 7) * PACK; }

#kernel conv_tiled
#define TILED conv_tiled

// The four 8 × 8 matrices of fragments whose row and pack this lane points at.
__device__ __forceinline__ void load_fragments(unsigned (&words)[4], const Half *lane_row) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(lane_row)) : "memory");
#endif
}

// Adds the products of one staged step to a warp's fragments of the tile; lane 4g + p holds columns 2p and 2p + 1 of rows
// g and g + 8 of each.
__device__ __forceinline__ void multiply_stage(
    float (&sums)[M_FRAGMENTS][N_FRAGMENTS][4], const Half *patches, const Half *factors
) {
    const int lane = threadIdx.x % WARP;
    const int first_m = threadIdx.x / WARP % warps_m * warp_m;
    const int first_n = threadIdx.x / WARP / warps_m * warp_n;
#if __CUDA_ARCH__ >= 800
#pragma unroll
    for (int k = 0; k < tile_k / PACK; k += 2) {
        unsigned a[M_FRAGMENTS][4];
        unsigned b[N_FRAGMENTS / 2][4];
#pragma unroll
        for (int m = 0; m < M_FRAGMENTS; m++) {
            load_fragments(a[m], patches + staged(first_m + 16 * m + lane % 16, k + lane / 16));
        }
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS / 2; n++) {
            load_fragments(b[n], factors + staged(first_n + 16 * n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2));
        }
#pragma unroll
        for (int m = 0; m < M_FRAGMENTS; m++) {
#pragma unroll
            for (int n = 0; n < N_FRAGMENTS; n++) {
                const unsigned(&rows)[4] = a[m];
                multiply(
                    sums[m][n], rows[0], rows[1], rows[2], rows[3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]
                );
            }
        }
    }
#else
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; m++) {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = first_m + 16 * m + lane / 4 + i / 2 * 8;
                const int column = first_n + 8 * n + lane % 4 * 2 + i % 2;
// Not all of tile_k: a compiler needs seconds for that.
#pragma unroll PACK
                for (int k = 0; k < tile_k; k++) {
                    const float left = to_float(patches[staged(row, k / PACK) + k % PACK]);
                    const float right = to_float(factors[staged(column, k / PACK) + k % PACK]);
                    sums[m][n][i] = fmaf(left, right, sums[m][n][i]);
                }
            }
        }
    }
#endif
}

constexpr int AHEAD = stages - 1;

__device__ __forceinline__ void settle() {}
__device__ __forceinline__ void finish_products(float (&)[M_FRAGMENTS][N_FRAGMENTS][4]) {}

#kernel conv_wgmma
#define TILED conv_wgmma
#include "common/warpgroup.cuh"

// Products that are on their way read the two stages before the one that is copied to.
constexpr int AHEAD = stages - 2;
static_assert(warp_m == 16 && warps_m % 4 == 0 && warp_n == 8 * N_FRAGMENTS && AHEAD > 0, "");

// Before the barrier ahead of a step: what this thread copied can be read by products, and those of the step before the
// last one are done.
__device__ __forceinline__ void settle() {
    show_to_products();
    wait_for_products<1>();
}

// Starts the products of one staged step; warp number w of a warpgroup has rows 16w to 16w + 15 of its 64.
__device__ __forceinline__ void multiply_stage(
    float (&sums)[M_FRAGMENTS][N_FRAGMENTS][4], const Half *patches, const Half *factors
) {
    const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / warpgroup_threads, 0);
    const Half *left = patches + warpgroup % (warps_m / 4) * warpgroup_rows * tile_k;
    const Half *right = factors + warpgroup / (warps_m / 4) * warp_n * tile_k;
    const unsigned long long a = matrix_at(shared_address(left), 0);
    const unsigned long long b = matrix_at(shared_address(right), 0);
    pin(sums[0]);
    begin_products();
#pragma unroll
    for (int k = 0; k < tile_k / 16; k++) {
        multiply_shared(sums[0], further(a, 32 * k), further(b, 32 * k), true);
    }
    end_of_products();
}

__device__ __forceinline__ void finish_products(float (&sums)[M_FRAGMENTS][N_FRAGMENTS][4]) {
    wait_for_products<0>();
    pin(sums[0]);
}

#kernel conv_tiled conv_wgmma
// Clusters are of compute capability 9.0 and up.
#if __CUDA_ARCH__ >= 900
constexpr int SHARERS = splits;
#else
constexpr int SHARERS = 1;
#endif

#include "conv/cluster.cuh"

// Channels that a thread finishes at a time; one where rows of the result are not aligned.
constexpr int UNIT = aligned ? PACK : 1;

// Adds floats of a block of this cluster, which lie where `own` is in this block's shared memory.
__device__ __forceinline__ void add_partial(float (&values)[UNIT], const float *own, unsigned sharer) {
#if __CUDA_ARCH__ >= 900
    const unsigned address = address_in(sharer, own);
    constexpr int width = smaller(UNIT, 4);
#pragma unroll
    for (int i = 0; i < UNIT; i += width) {
        float part[width];
        if constexpr (width == 4) {
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3]) : "r"(address + 4 * i)
                         : "memory");
        } else {
            asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part[0]) : "r"(address + 4 * i) : "memory");
        }
#pragma unroll
        for (int j = 0; j < width; j++) {
            values[i + j] += part[j];
        }
    }
#endif
}

WAITING_KERNEL(TILED) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned sharer = blockIdx.z;
    if (sharer >= SHARERS) {
        return;
    }
    if constexpr (!constant_weight) {
        wait_for_inputs();
    }
    const unsigned band = blockIdx.x / (BAND * TILES_N);
    const unsigned in_band = blockIdx.x % (BAND * TILES_N);
    const unsigned band_tiles = min(BAND, TILES_M - band * BAND);
    const unsigned first_pixel = (band * BAND + in_band % band_tiles) * tile_m;
    const unsigned first_channel = in_band / band_tiles * tile_n;
    const unsigned first_step = sharer * STEPS / SHARERS;
    const unsigned end_step = (sharer + 1) * STEPS / SHARERS;
    const int row = threadIdx.x / ROW_PACKS;
    const int pack = threadIdx.x % ROW_PACKS;

    const auto stage = [&](unsigned step) {
        return reinterpret_cast<Half *>(memory + (step - first_step) % stages * STAGE_BYTES);
    };
    const auto copy_factors = [&](unsigned step) {
        const unsigned term = step * ROW_PACKS + pack;
        Half *target = stage(step) + tile_m * tile_k;
#pragma unroll
        for (int pass = 0; pass < tile_n / PASS; pass++) {
            const unsigned channel = first_channel + row + pass * PASS;
            const bool inside = channel < CHANNELS && term < DEPTH && step < end_step;
            const index_t from = index_t(channel) * (DEPTH * PACK) + term * PACK;
            copy_words(target + staged(row + pass * PASS, pack), weight + (inside ? from : 0), inside);
        }
    };
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
        copy_factors(first_step + step);
    }

    int rows[tile_m / PASS];
    int columns[tile_m / PASS];
    Offset corners[tile_m / PASS];
#pragma unroll
    for (int pass = 0; pass < tile_m / PASS; pass++) {
        const unsigned number = first_pixel + row + pass * PASS;
        const unsigned pixel = number % PIXELS;
        rows[pass] = first_row(pixel);
        columns[pass] = first_column(pixel);
        corners[pass] = Offset(number / PIXELS * X::stride(0)) + rows[pass] * Offset(X::stride(2)) +
            columns[pass] * Offset(X::stride(3));
        if (number >= ROWS) {
            rows[pass] = -(1 << 30);  // far outside of the image
        }
    }
    const auto copy_patches = [&](unsigned step) {
        const unsigned term = step * ROW_PACKS + pack;
        const unsigned tap = term / CHANNEL_PACKS;
        const int down = int(tap / unsigned(Weight::size(3)) * param::dilation(0));
        const int right = int(tap % unsigned(Weight::size(3)) * param::dilation(1));
        const Offset ahead = down * Offset(X::stride(2)) + right * Offset(X::stride(3)) + term % CHANNEL_PACKS * PACK;
        Half *target = stage(step);
#pragma unroll
        for (int pass = 0; pass < tile_m / PASS; pass++) {
            const bool inside = unsigned(rows[pass] + down) < X::size(2) &&
                unsigned(columns[pass] + right) < X::size(3) && term < DEPTH && step < end_step;
            copy_words(target + staged(row + pass * PASS, pack), x + (inside ? corners[pass] + ahead : 0), inside);
        }
    };
    begin_in_turn();
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
        copy_patches(first_step + step);
        end_of_copies();
    }

    float sums[M_FRAGMENTS][N_FRAGMENTS][4] = {};
    for (unsigned step = first_step; step < end_step; step++) {
        wait_for_copies<AHEAD - 1>();
        settle();
        __syncthreads();
        if constexpr (AHEAD < stages - 1) {
            multiply_stage(sums, stage(step), stage(step) + tile_m * tile_k);
        }
        copy_factors(step + AHEAD);
        copy_patches(step + AHEAD);
        end_of_copies();
        if constexpr (AHEAD == stages - 1) {
            multiply_stage(sums, stage(step), stage(step) + tile_m * tile_k);
        }
    }
    finish_products(sums);
    wait_for_copies<0>();
    __syncthreads();

    float *partial = reinterpret_cast<float *>(memory);
    const int lane = threadIdx.x % WARP;
    const int own_row = threadIdx.x / WARP % warps_m * warp_m + lane / 4;
    const int own_column = threadIdx.x / WARP / warps_m * warp_n + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; m++) {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int at = (own_row + 16 * m + i / 2 * 8) * SUM_STAGE + own_column + 8 * n;
                store_pack<2>(partial + at, Pack<float, 2>{{sums[m][n][i], sums[m][n][i + 1]}});
            }
        }
    }
    if constexpr (SHARERS > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    constexpr int own_rows = tile_m / SHARERS;
    for (int i = threadIdx.x; i < own_rows * (tile_n / UNIT); i += THREADS) {
        const int tile_row = int(sharer) * own_rows + i / (tile_n / UNIT);
        const int tile_column = i % (tile_n / UNIT) * UNIT;
        const unsigned number = first_pixel + tile_row;
        const unsigned channel = first_channel + tile_column;
        if (number >= ROWS || channel >= CHANNELS) {
            continue;
        }
        const float *own = partial + tile_row * SUM_STAGE + tile_column;
        float values[UNIT];
        if constexpr (SHARERS > 1) {
#pragma unroll
            for (int j = 0; j < UNIT; j++) {
                values[j] = 0.0f;
            }
#pragma unroll
            for (unsigned other = 0; other < SHARERS; other++) {
                add_partial(values, own, other);
            }
        } else {
#pragma unroll
            for (int j = 0; j < UNIT; j++) {
                values[j] = own[j];
            }
        }
        finish(values, bias, residual, out, number / PIXELS, channel, number % PIXELS);
    }
    if constexpr (SHARERS > 1) {
        cluster_barrier();  // none may end, and take its partial sums along, while others read them
    }
}
