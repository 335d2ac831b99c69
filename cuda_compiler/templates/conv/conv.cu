// Convolutions with their epilogue. Batch normalization is folded into weight and bias by the compiler. x, out and
// residual are [N, C, H, W] with any strides; what wants the channels side by side (channels-last) says so.

#kernel direct_conv2d_kernel conv2d_kernel conv_tiled conv_depthwise
// Where an element of output pixel number `pixel` of an image lies.
template <typename View>
__device__ __forceinline__ index_t place(unsigned image, unsigned channel, unsigned pixel) {
    constexpr unsigned columns = unsigned(Out::size(3));
    return image * View::stride(0) + channel * View::stride(1) + pixel / columns * View::stride(2) +
        pixel % columns * View::stride(3);
}

constexpr unsigned PIXELS = unsigned(Out::size(2) * Out::size(3));

// Where an output pixel's window begins in the input, possibly in the padding.
__device__ __forceinline__ int first_row(unsigned pixel) {
    return int(pixel / unsigned(Out::size(3)) * param::stride(0)) - param::padding(0);
}

__device__ __forceinline__ int first_column(unsigned pixel) {
    return int(pixel % unsigned(Out::size(3)) * param::stride(1)) - param::padding(2);
}

#kernel conv_tiled conv_depthwise
// `PACK` channels side by side are what one 16-byte access of 16-bit elements moves.
constexpr int PACK = 8;

template <int count, typename T>
__device__ __forceinline__ void add(float (&values)[PACK], int first, const T *data) {
    float addends[count];
    load_floats(addends, data);
#pragma unroll
    for (int i = 0; i < count; i++) {
        values[first + i] += addends[i];
    }
}

// act(values + bias + residual) in float, rounded once; `aligned` says that all of them move in whole packs.
__device__ __forceinline__ void finish(
    float (&values)[PACK], const Bias::type *bias, const Residual::type *residual, Out::type *out, unsigned image,
    unsigned channel, unsigned pixel
) {
    constexpr int width = aligned ? PACK : 1;
#pragma unroll
    for (int first = 0; first < PACK; first += width) {
        if (!aligned && channel + first >= Out::size(1)) {
            break;
        }
        if constexpr (Bias::present) {
            add<width>(values, first, bias + (channel + first) * Bias::stride(0));
        }
        if constexpr (Residual::present) {
            add<width>(values, first, residual + place<Residual>(image, channel + first, pixel));
        }
        float results[width];
#pragma unroll
        for (int i = 0; i < width; i++) {
            results[i] = activate(values[first + i]);
        }
        store_floats(out + place<Out>(image, channel + first, pixel), results);
    }
}

#kernel conv_tiled
// Channels-last, as a matrix product of patches[pixels, DEPTH] and weight[channels, DEPTH] on tensor cores; the terms are
// ordered by tap, then by input channel, PACK of them side by side in both.
//
// A block makes tile_m pixels × tile_n channels from its share of the terms, tile_k of them at a time, `stages` copies on
// their way. The `splits` blocks of a cluster share the terms of a tile, and each of them finishes some of its rows from
// the partial sums in all their shared memories. GPUs without clusters leave the work to the first of them.
static_assert(sizeof(X::type) == 2 && Weight::size(1) % PACK == 0, "");

using Half = X::type;

constexpr unsigned ROWS = unsigned(Out::size(0)) * PIXELS;
constexpr unsigned CHANNELS = unsigned(Out::size(1));
constexpr unsigned TILES_N = (CHANNELS + tile_n - 1) / tile_n;
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
__device__ __forceinline__ int staged(int row, int pack) { return row * tile_k + (pack ^ row & 7) * PACK; }

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

// Clusters are of compute capability 9.0 and up.
#if __CUDA_ARCH__ >= 900
constexpr int SHARERS = splits;
#else
constexpr int SHARERS = 1;
#endif

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Adds PACK floats of a block of this cluster, which lie where `own` is in this block's shared memory.
__device__ __forceinline__ void add_partial(float (&values)[PACK], const float *own, unsigned sharer) {
#if __CUDA_ARCH__ >= 900
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address) : "r"(shared_address(own)), "r"(sharer));
#pragma unroll
    for (int i = 0; i < PACK; i += 4) {
        float part[4];
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3]) : "r"(address + 4 * i) : "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) {
            values[i + j] += part[j];
        }
    }
#endif
}

WAITING_KERNEL(conv_tiled) {
    extern __shared__ __align__(128) unsigned char memory[];
    const unsigned sharer = blockIdx.z;
    if (sharer >= SHARERS) {
        return;
    }
    if constexpr (!constant_weight) {
        wait_for_inputs();
    }
    const unsigned first_pixel = blockIdx.x / TILES_N * tile_m;
    const unsigned first_channel = blockIdx.x % TILES_N * tile_n;
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
    for (int step = 0; step < stages - 1; step++) {
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
    for (int step = 0; step < stages - 1; step++) {
        copy_patches(first_step + step);
        end_of_copies();
    }

    float sums[M_FRAGMENTS][N_FRAGMENTS][4] = {};
    for (unsigned step = first_step; step < end_step; step++) {
        wait_for_copies<stages - 2>();
        __syncthreads();
        copy_factors(step + stages - 1);
        copy_patches(step + stages - 1);
        end_of_copies();
        multiply_stage(sums, stage(step), stage(step) + tile_m * tile_k);
    }
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
    for (int i = threadIdx.x; i < own_rows * (tile_n / PACK); i += THREADS) {
        const int tile_row = int(sharer) * own_rows + i / (tile_n / PACK);
        const int tile_column = i % (tile_n / PACK) * PACK;
        const unsigned number = first_pixel + tile_row;
        const unsigned channel = first_channel + tile_column;
        if (number >= ROWS || channel >= CHANNELS) {
            continue;
        }
        const float *own = partial + tile_row * SUM_STAGE + tile_column;
        float values[PACK];
        if constexpr (SHARERS > 1) {
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                values[j] = 0.0f;
            }
#pragma unroll
            for (unsigned other = 0; other < SHARERS; other++) {
                add_partial(values, own, other);
            }
        } else {
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                values[j] = own[j];
            }
        }
        finish(values, bias, residual, out, number / PIXELS, channel, number % PIXELS);
    }
    if constexpr (SHARERS > 1) {
        cluster_barrier();  // none may end, and take its partial sums along, while others read them
    }
}

#kernel conv_depthwise
// Channels-last, each output channel from the input channel of its number; the weight [C, 1, kh, kw] has its channels side
// by side as well. A thread makes `across` pixels of a row, PACK channels of each.
constexpr unsigned CHANNEL_PACKS = unsigned(Out::size(1)) / PACK;
constexpr unsigned SPANS = (unsigned(Out::size(3)) + across - 1) / across;
constexpr int TAPS = int(Weight::size(3));
constexpr int WIDTH = (across - 1) * int(param::stride(1)) + (TAPS - 1) * int(param::dilation(1)) + 1;

WAITING_KERNEL(conv_depthwise) {
    const index_t thread = blockIdx.x * index_t(THREADS) + threadIdx.x;
    const unsigned channel = unsigned(thread % CHANNEL_PACKS) * PACK;
    const unsigned span = unsigned(thread / CHANNEL_PACKS % SPANS);
    const index_t line = thread / CHANNEL_PACKS / SPANS;
    const unsigned image = unsigned(line / Out::size(2));
    if (image >= Out::size(0)) {
        return;
    }
    const unsigned first_pixel = unsigned(line % Out::size(2) * Out::size(3)) + span * across;
    const int top = first_row(first_pixel);
    const int left = first_column(first_pixel);
    const X::type *plane = x + image * X::stride(0) + channel;
    begin_in_turn();
    float sums[across][PACK] = {};
#pragma unroll
    for (int ky = 0; ky < int(Weight::size(2)); ky++) {
        const unsigned row = unsigned(top + ky * int(param::dilation(0)));
        if (row >= X::size(2)) {
            continue;
        }
        float factors[TAPS][PACK];
#pragma unroll
        for (int kx = 0; kx < TAPS; kx++) {
            load_floats(factors[kx], weight + channel + ky * Weight::stride(2) + kx * Weight::stride(3));
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const unsigned column = unsigned(left + j);
            if (column >= X::size(3)) {
                continue;
            }
            float values[PACK];
            load_floats(values, plane + row * X::stride(2) + column * X::stride(3));
#pragma unroll
            for (int pixel = 0; pixel < across; pixel++) {
                const int ahead = j - pixel * int(param::stride(1));
                if (ahead >= 0 && ahead % int(param::dilation(1)) == 0 && ahead / int(param::dilation(1)) < TAPS) {
#pragma unroll
                    for (int i = 0; i < PACK; i++) {
                        sums[pixel][i] = fmaf(factors[ahead / int(param::dilation(1))][i], values[i], sums[pixel][i]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int pixel = 0; pixel < across; pixel++) {
        if (span * across + pixel < Out::size(3)) {
            finish(sums[pixel], bias, residual, out, image, channel, first_pixel + pixel);
        }
    }
}

#kernel to_channels_last
// Squares of fold × fold pixels become the channels of one: channel (a * fold + b) * C + c of pixel (i, j) is channel c of
// pixel (i * fold + a - top, j * fold + b - left), or 0 where that is no channel or outside. x has any strides; out has its
// channels side by side, and a thread makes PACK of them.
constexpr int PACK = 8;
constexpr unsigned CHANNELS = unsigned(X::size(1));

WAITING_KERNEL(to_channels_last) {
    const index_t thread = blockIdx.x * index_t(THREADS) + threadIdx.x;
    constexpr index_t pixels = Out::size(2) * Out::size(3);
    const unsigned first_channel = unsigned(thread / pixels % (Out::size(1) / PACK)) * PACK;
    const index_t image = thread / pixels / (Out::size(1) / PACK);
    if (image >= Out::size(0)) {
        return;
    }
    begin_in_turn();
    const unsigned row = unsigned(thread % pixels / Out::size(3));
    const unsigned column = unsigned(thread % Out::size(3));
    Pack<Out::type, PACK> pixel;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        const unsigned part = (first_channel + i) / CHANNELS;
        const unsigned from_row = row * fold + part / fold - top;  // before the first one it is a large number
        const unsigned from_column = column * fold + part % fold - left;
        const bool exists = part < fold * fold && from_row < X::size(2) && from_column < X::size(3);
        const index_t source = image * X::stride(0) + (first_channel + i) % CHANNELS * X::stride(1) +
            from_row * X::stride(2) + from_column * X::stride(3);
        pixel.item[i] = exists ? convert<Out::type>(x[source]) : from<Out::type>(0.0f);
    }
    store_pack<PACK>(
        out + image * Out::stride(0) + first_channel + row * Out::stride(2) + column * Out::stride(3), pixel
    );
}

#kernel direct_conv2d_kernel conv2d_kernel
// act(value + bias + residual) in float, rounded once.
__device__ __forceinline__ float finish(
    float value, const Bias::type *bias, const Residual::type *residual, index_t channel, index_t residual_place
) {
    if constexpr (Bias::present) {
        value += to_float(bias[channel * Bias::stride(0)]);
    }
    if constexpr (Residual::present) {
        value += to_float(residual[residual_place]);
    }
    return activate(value);
}

// An element of an input plane, zero in the padding around it; negative places are large unsigned ones.
__device__ __forceinline__ float input_at(const X::type *plane, int row, int column) {
    if (unsigned(row) >= X::size(2) || unsigned(column) >= X::size(3)) {
        return 0.0f;
    }
    return to_float(plane[unsigned(row) * X::stride(2) + unsigned(column) * X::stride(3)]);
}

constexpr unsigned GROUP_CHANNELS = unsigned(Out::size(1)) / param::groups;
constexpr unsigned WINDOW = unsigned(Weight::size(2) * Weight::size(3));
constexpr unsigned DEPTH = unsigned(Weight::size(1)) * WINDOW;

__device__ __forceinline__ float factor_at(const Weight::type *factors, unsigned channel, unsigned tap) {
    return to_float(factors[channel * Weight::stride(1) + tap / unsigned(Weight::size(3)) * Weight::stride(2) +
        tap % unsigned(Weight::size(3)) * Weight::stride(3)]);
}

#kernel direct_conv2d_kernel
// A thread per output element: for groups so narrow that a matrix product would multiply zeros, depthwise ones above
// all.
KERNEL(direct_conv2d_kernel) {
    const unsigned pixel = blockIdx.x * THREADS + threadIdx.x;
    if (pixel >= PIXELS) {
        return;
    }
    const unsigned channel = blockIdx.y;
    const int row = first_row(pixel);
    const int column = first_column(pixel);
    const Weight::type *factors = weight + channel * Weight::stride(0);
    const X::type *plane =
        x + blockIdx.z * X::stride(0) + channel / GROUP_CHANNELS * unsigned(Weight::size(1)) * X::stride(1);
    float sum = 0.0f;
    for (unsigned c = 0; c < Weight::size(1); c++) {
#pragma unroll
        for (int ky = 0; ky < int(Weight::size(2)); ky++) {
#pragma unroll
            for (int kx = 0; kx < int(Weight::size(3)); kx++) {
                const float value =
                    input_at(plane, row + ky * int(param::dilation(0)), column + kx * int(param::dilation(1)));
                sum = fmaf(factor_at(factors, c, ky * unsigned(Weight::size(3)) + kx), value, sum);
            }
        }
        plane += X::stride(1);
    }
    const index_t residual_place = place<Residual>(blockIdx.z, channel, pixel);
    out[place<Out>(blockIdx.z, channel, pixel)] =
        from<Out::type>(finish(sum, bias, residual, channel, residual_place));
}

#kernel conv2d_kernel
// A group's convolution as a matrix product, weight[channels, DEPTH] · patches[DEPTH, pixels]: a block of THREADS makes
// BLOCK × BLOCK outputs, BLOCK_K terms at a time; a thread makes 4 × 4 of them.
constexpr unsigned BLOCK = 64;
constexpr unsigned BLOCK_K = 16;
constexpr unsigned CHANNEL_BLOCKS = (GROUP_CHANNELS + BLOCK - 1) / BLOCK;

KERNEL(conv2d_kernel) {
    // A row is staged 4 floats longer than it is, so that a column's elements lie in different banks.
    __shared__ float factors[BLOCK_K][BLOCK + 4];
    __shared__ float patches[BLOCK_K][BLOCK + 4];
    const unsigned group = blockIdx.y / CHANNEL_BLOCKS;
    const unsigned first_channel = blockIdx.y % CHANNEL_BLOCKS * BLOCK;
    const unsigned first_pixel = blockIdx.x * BLOCK;
    const X::type *image = x + blockIdx.z * X::stride(0) + group * unsigned(Weight::size(1)) * X::stride(1);

    const unsigned staged_pixel = threadIdx.x % BLOCK;
    const unsigned source_pixel = min(first_pixel + staged_pixel, PIXELS - 1);
    const int row = first_row(source_pixel);
    const int column = first_column(source_pixel);
    const unsigned own_channel = threadIdx.x / 16 * 4;
    const unsigned own_pixel = threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (unsigned k = 0; k < DEPTH; k += BLOCK_K) {
        for (unsigned i = threadIdx.x; i < BLOCK * BLOCK_K; i += THREADS) {
            const unsigned channel = first_channel + i / BLOCK_K;
            const unsigned term = k + i % BLOCK_K;
            float value = 0.0f;
            if (channel < GROUP_CHANNELS && term < DEPTH) {
                value = factor_at(
                    weight + (group * GROUP_CHANNELS + channel) * Weight::stride(0), term / WINDOW, term % WINDOW
                );
            }
            factors[i % BLOCK_K][i / BLOCK_K] = value;
        }
        for (unsigned i = threadIdx.x / BLOCK; i < BLOCK_K; i += THREADS / BLOCK) {
            const unsigned term = k + i;
            float value = 0.0f;
            if (term < DEPTH) {
                const unsigned tap = term % WINDOW;
                const int ky = int(tap / unsigned(Weight::size(3)) * param::dilation(0));
                const int kx = int(tap % unsigned(Weight::size(3)) * param::dilation(1));
                value = input_at(image + term / WINDOW * X::stride(1), row + ky, column + kx);
            }
            patches[i][staged_pixel] = value;
        }
        __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < BLOCK_K; i++) {
            float left[4];
            float right[4];
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                left[j] = factors[i][own_channel + j];
                right[j] = patches[i][own_pixel + j];
            }
#pragma unroll
            for (unsigned a = 0; a < 4; a++) {
#pragma unroll
                for (unsigned b = 0; b < 4; b++) {
                    sums[a][b] = fmaf(left[a], right[b], sums[a][b]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (unsigned a = 0; a < 4; a++) {
#pragma unroll
        for (unsigned b = 0; b < 4; b++) {
            const unsigned channel = first_channel + own_channel + a;
            const unsigned pixel = first_pixel + own_pixel + b;
            if (channel < GROUP_CHANNELS && pixel < PIXELS) {
                const unsigned whole_channel = group * GROUP_CHANNELS + channel;
                const index_t residual_place = place<Residual>(blockIdx.z, whole_channel, pixel);
                out[place<Out>(blockIdx.z, whole_channel, pixel)] =
                    from<Out::type>(finish(sums[a][b], bias, residual, whole_channel, residual_place));
            }
        }
    }
}

#kernel conv_transpose2d_kernel
// One output element: the sum over the input pixels whose window it lies in. weight is [I, O/groups, kh, kw].
KERNEL(conv_transpose2d_kernel) {
    const index_t element = blockIdx.x * index_t(THREADS) + threadIdx.x;
    if (element >= Out::numel) {
        return;
    }
    constexpr unsigned group_outputs = unsigned(Weight::size(1));
    constexpr unsigned group_inputs = unsigned(X::size(1)) / param::groups;
    const unsigned out_column = unsigned(element % Out::size(3));
    const unsigned out_row = unsigned(element / Out::size(3) % Out::size(2));
    const unsigned plane = unsigned(element / Out::size(3) / Out::size(2));
    const unsigned channel = plane % unsigned(Out::size(1));
    const unsigned group = channel / group_outputs;
    const X::type *image = x + plane / unsigned(Out::size(1)) * X::stride(0) + group * group_inputs * X::stride(1);
    const Weight::type *corner =
        weight + group * group_inputs * Weight::stride(0) + channel % group_outputs * Weight::stride(1);
    float sum = 0.0f;
    if constexpr (Bias::present) {
        sum = to_float(bias[channel * Bias::stride(0)]);
    }
    for (unsigned ky = 0; ky < Weight::size(2); ky++) {
        // Before the first row it is a large number, as is its quotient.
        const unsigned scaled_row = out_row + unsigned(param::padding(0)) - ky * param::dilation(0);
        const unsigned row = scaled_row / param::stride(0);
        for (unsigned kx = 0; kx < Weight::size(3); kx++) {
            const unsigned scaled_column = out_column + unsigned(param::padding(1)) - kx * param::dilation(1);
            const unsigned column = scaled_column / param::stride(1);
            const bool meets = row * param::stride(0) == scaled_row && column * param::stride(1) == scaled_column;
            if (meets && row < X::size(2) && column < X::size(3)) {
                const X::type *value = image + row * X::stride(2) + column * X::stride(3);
                const Weight::type *factor = corner + ky * Weight::stride(2) + kx * Weight::stride(3);
                for (unsigned c = 0; c < group_inputs; c++) {
                    sum = fmaf(to_float(value[c * X::stride(1)]), to_float(factor[c * Weight::stride(0)]), sum);
                }
            }
        }
    }
    out[Out::offset(element)] = from<Out::type>(sum);
}
