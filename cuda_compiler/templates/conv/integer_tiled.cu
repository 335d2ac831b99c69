// Convolutions of images in bytes on tensor cores; `tiles.cuh` says how they are cut into tiles. The sums are those of x as
// it is stored; what x's zero point adds to each is subtracted at the end, with the sum of the channel's weights. A result
// is finished in registers, in a copy of the tile in shared memory that may hold the residual before. `factors` are the
// scale of x, that of the residual and the inverse of the result's, so that layers of one shape share a kernel.
//
// `integer_tiled` multiplies by warps; `integer_wgmma` by warpgroups, on GPUs of compute capability 9.0 only.
using Sum = int;
constexpr bool PADS = param::padding(0) | param::padding(1) | param::padding(2) | param::padding(3);
constexpr unsigned PADDING_WORD = PADS ? (unsigned(param::zero_point) & 0xffu) * 0x01010101u : 0u;
constexpr int UNIT_BYTES = unit_bytes;

#include "conv/tiles.cuh"
#include "common/copies.cuh"
#include "conv/finish_integer.cuh"

static_assert(sizeof(X::type) == 1 && sizeof(Weight::type) == 1, "");

constexpr bool SIGNED = X::type(-1) < X::type(0);

#kernel integer_tiled
#define TILED integer_tiled

__device__ __forceinline__ void add_product(int &sum, X::type left, Weight::type right) { sum += int(left) * int(right); }

// sums[16 × 8] += a[16 × 32] · b[8 × 32], in the fragments of mma.m16n8k32.
__device__ __forceinline__ void multiply(
    int (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1
) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#endif
}

#include "conv/warp_products.cuh"

#kernel integer_wgmma
#define TILED integer_wgmma
#include "common/warpgroup_bytes.cuh"
#include "conv/warpgroup_products.cuh"

#kernel integer_tiled integer_wgmma
#include "conv/tile_sums.cuh"
#include "conv/shared_sums.cuh"

constexpr int RESULT_BYTES = sizeof(Out::type);
constexpr int RESULT_ROW = tile_n * RESULT_BYTES + 16;  // in bytes, so that a column's elements lie in different banks
constexpr int OWN_ROWS = tile_m / SHARERS;
constexpr int VECTOR_BYTES = vector * RESULT_BYTES;
// Whether the residual is fetched to where the results will be, while the products go on.
constexpr bool FETCHES = Residual::present && RESULT_BYTES == 1 && sizeof(Residual::type) == 1;

// Where the elements of output pixel `number` of all images begin.
template <typename View>
__device__ __forceinline__ index_t pixel_place(unsigned number, unsigned channel) {
    constexpr bool rows_follow = View::stride(2) == unsigned(Out::size(3)) * View::stride(3);
    constexpr bool images_follow = View::stride(0) == PIXELS * View::stride(3);
    if constexpr (rows_follow && (images_follow || Out::size(0) == 1)) {
        return index_t(number) * View::stride(3) + channel * View::stride(1);
    } else {
        return place<View>(number / PIXELS, channel, number % PIXELS);
    }
}

// Two values of adjacent channels, the last two where the channel is beyond them.
template <typename T, typename Stored>
__device__ __forceinline__ void load_pair(T (&values)[2], const Stored *data, unsigned channel) {
    if constexpr (CHANNELS % 2 == 0) {
        const Pack<Stored, 2> pair = load_pack<2>(data + (CHANNELS % tile_n == 0 ? channel : min(channel, CHANNELS - 2)));
        values[0] = pair.item[0];
        values[1] = pair.item[1];
    } else {
        values[0] = data[min(channel, CHANNELS - 1)];
        values[1] = data[min(channel + 1, CHANNELS - 1)];
    }
}

// What the sums of two adjacent channels become results with.
struct Channels {
    float scale[2];
    float bias[2];
    int excess[2];
};

__device__ __forceinline__ Channels channels_at(
    unsigned channel, const Scales::type *scales, const Weight_sums::type *weight_sums, const Bias::type *bias,
    const float (&own)[3]
) {
    Channels found = {{}, {NO_BIAS, NO_BIAS}, {}};
    load_pair(found.scale, scales, channel);
    found.scale[0] = __fmul_rn(found.scale[0], own[0]);
    found.scale[1] = __fmul_rn(found.scale[1], own[0]);
    if constexpr (Bias::present) {
        load_pair(found.bias, bias, channel);
    }
    if constexpr (Weight_sums::present) {
        load_pair(found.excess, weight_sums, channel);
        found.excess[0] *= param::zero_point;
        found.excess[1] *= param::zero_point;
    }
    return found;
}

// Puts the results of two adjacent channels of a pixel in their places, where their residuals may be until then.
__device__ __forceinline__ void finish_pair(
    unsigned char *results, const int (&sums)[2], const Channels &at, const Residual::type *residual,
    const float (&own)[3], const Tile &tile, int row, int column
) {
    unsigned char *target = results + row * RESULT_ROW + column * RESULT_BYTES;
    float values[2];
    Pack<Residual::type, 2> fetched;
    if constexpr (FETCHES) {
        fetched = load_pack<2>(reinterpret_cast<const Residual::type *>(target));
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float y = scaled(float(sums[i] - at.excess[i]), at.scale[i], at.bias[i]);
        if constexpr (FETCHES) {
            y = __fadd_rn(y, residual_value(fetched.item[i], own[1]));
        } else if constexpr (Residual::present) {
            const unsigned number = min(tile.first_window + row, ROWS - 1);
            const unsigned channel = min(tile.first_channel + column + i, CHANNELS - 1);
            y = __fadd_rn(y, residual_value(residual[pixel_place<Residual>(number, channel)], own[1]));
        }
        values[i] = y;
    }
    store_pack<2>(reinterpret_cast<Out::type *>(target), finished(values[0], values[1], own[2]));
}

// Calls a function with the row, the column and the pixel's number of each `vector` of results that this block finishes.
template <typename Function>
__device__ __forceinline__ void for_own_vectors(const Tile &tile, const Function &function) {
    constexpr int row_vectors = tile_n / vector;
    for (int i = threadIdx.x; i < OWN_ROWS * row_vectors; i += THREADS) {
        const int row = int(tile.sharer) * OWN_ROWS + i / row_vectors;
        const int column = i % row_vectors * vector;
        if (tile.first_window + row < ROWS && tile.first_channel + column < CHANNELS) {
            function(row, column, tile.first_window + row);
        }
    }
}

WAITING_KERNEL(TILED) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *results = memory + ring_bytes;
    const Tile tile = own_tile();
    if (tile.sharer >= SHARERS) {
        return;
    }
    if constexpr (!constant_weight) {
        wait_for_inputs();
    }
    int sums[M_FRAGMENTS][N_FRAGMENTS][4];
    sum_products(sums, memory, x, weight, tile, [&] {
        if constexpr (FETCHES) {
            for_own_vectors(tile, [&](int row, int column, unsigned number) {
                const Residual::type *from = residual + pixel_place<Residual>(number, tile.first_channel + column);
                Residual::type *target = reinterpret_cast<Residual::type *>(results + row * RESULT_ROW + column);
                if constexpr (VECTOR_BYTES >= 4) {
                    copy_words<VECTOR_BYTES>(target, from, true);
                } else {
                    store_pack<vector>(target, load_pack<vector>(from));
                }
            });
        }
    });

    const float own[3] = {factors[0], factors[1], factors[2]};
    if constexpr (SHARERS > 1) {
        int *partial = reinterpret_cast<int *>(memory);
        keep_sums(partial, sums);
        for (int i = threadIdx.x; i < OWN_ROWS * (tile_n / 2); i += THREADS) {
            const int row = int(tile.sharer) * OWN_ROWS + i / (tile_n / 2);
            const int column = i % (tile_n / 2) * 2;
            const Channels at = channels_at(tile.first_channel + column, scales, weight_sums, bias, own);
            int whole[2];
            whole_sums(whole, partial + row * SUM_STAGE + column);
            finish_pair(results, whole, at, residual, own, tile, row, column);
        }
    } else {
        const int lane = threadIdx.x % WARP;
        const int own_row = threadIdx.x / WARP % warps_m * warp_m + lane / 4;
        const int own_column = threadIdx.x / WARP / warps_m * warp_n + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; n++) {
            const int column = own_column + 8 * n;
            const Channels at = channels_at(tile.first_channel + column, scales, weight_sums, bias, own);
#pragma unroll
            for (int m = 0; m < M_FRAGMENTS; m++) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const int pair[2] = {sums[m][n][i], sums[m][n][i + 1]};
                    finish_pair(results, pair, at, residual, own, tile, own_row + 16 * m + i / 2 * 8, column);
                }
            }
        }
    }
    __syncthreads();
    for_own_vectors(tile, [&](int row, int column, unsigned number) {
        const Out::type *own = reinterpret_cast<const Out::type *>(results + row * RESULT_ROW) + column;
        store_pack<vector>(out + pixel_place<Out>(number, tile.first_channel + column), load_pack<vector>(own));
    });
    part_from_cluster();
}
