// out = x · gate(excite · activate(squeeze · mean(x) + squeeze_bias) + excite_bias), the factors one for each channel of an
// image. x and out are channels-last. The `blocks` blocks of a cluster share an image: each sums its pixels, finds the means
// from everybody's sums, computes its share of the hidden values and of the factors, which it hands to the others, and
// multiplies its pixels.

#include "common/cluster.cuh"

constexpr int PACK = 8;
constexpr int CHANNELS = int(X::size(1));
constexpr int PIXELS = int(X::size(2) * X::size(3));
constexpr int HIDDEN = int(Squeeze::size(0));
constexpr int HIDDEN_PADDED = int(Excite::size(1));
constexpr int PACKS = CHANNELS / PACK;
constexpr int LINES = THREADS / PACKS;  // pixels that a block has at a time
constexpr int OWN_CHANNELS = (CHANNELS + blocks - 1) / blocks;
constexpr int OWN_HIDDEN = (HIDDEN + blocks - 1) / blocks;
constexpr int TOGETHER = 4;  // pixels that a thread multiplies at a time
static_assert(LINES > 0 && WARP % blocks == 0 && sizeof(X::type) == sizeof(Out::type), "");

// Brings the rows of a matrix that a block will multiply with nearer.
template <typename T>
__device__ __forceinline__ void prefetch_rows(const T *matrix, int first, int rows, int end, int width) {
    constexpr int LINE = 128 / sizeof(T);
    const int count = min(rows, end - first) * width;
    for (int at = int(threadIdx.x) * LINE; at < count; at += THREADS * LINE) {
        asm volatile("prefetch.global.L2 [%0];" :: "l"(matrix + first * width + at));
    }
}

// The sum over `lanes` lanes side by side of the products of a row with a vector in shared memory.
template <int lanes, int width, typename T>
__device__ __forceinline__ float row_product(const T *row, const float *vector) {
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < width; first += lanes * PACK) {
        const int term = first + int(threadIdx.x) % lanes * PACK;
        if (term < width) {
            float weights[PACK];
            load_floats(weights, row + term);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                sum = fmaf(weights[j], vector[term + j], sum);
            }
        }
    }
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    return sum;
}

WAITING_KERNEL(squeeze_excite) {
    extern __shared__ __align__(16) float memory[];
    float *const sums = memory;  // [LINES][CHANNELS]
    float *const means = sums + LINES * CHANNELS;
    float *const factors = means + CHANNELS;
    float *const hidden = factors + CHANNELS;
    const int own = int(blockIdx.z);
    const int first = PIXELS * own / blocks;
    const int end = PIXELS * (own + 1) / blocks;
    const int line = int(threadIdx.x) / PACKS;
    const int channel = int(threadIdx.x) % PACKS * PACK;
    const index_t image = index_t(blockIdx.x) * (index_t(PIXELS) * CHANNELS);
    for (int i = HIDDEN + int(threadIdx.x); i < HIDDEN_PADDED; i += THREADS) {
        hidden[i] = 0.0f;
    }
    prefetch_rows(squeeze, own * OWN_HIDDEN, OWN_HIDDEN, HIDDEN, CHANNELS);
    prefetch_rows(excite, own * OWN_CHANNELS, OWN_CHANNELS, CHANNELS, HIDDEN_PADDED);
    begin_in_turn();
    if (line < LINES) {
        float sum[PACK] = {};
#pragma unroll 8
        for (int pixel = first + line; pixel < end; pixel += LINES) {
            float values[PACK];
            load_floats(values, x + image + index_t(pixel) * CHANNELS + channel);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sum[i] += values[i];
            }
        }
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            sums[line * CHANNELS + channel + i] = sum[i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CHANNELS; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int each = 0; each < LINES; each++) {
            sum += sums[each * CHANNELS + i];
        }
        sums[i] = sum;
    }
    cluster_barrier();
    for (int i = int(threadIdx.x) * 4; i < CHANNELS; i += THREADS * 4) {
        float parts[blocks][4];
#pragma unroll
        for (unsigned other = 0; other < blocks; other++) {
            read_four_from(parts[other], other, &sums[i]);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float sum = 0.0f;
#pragma unroll
            for (unsigned other = 0; other < blocks; other++) {
                sum += parts[other][k];
            }
            means[i + k] = sum / float(PIXELS);
        }
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP;
#pragma unroll 2
    for (int i = threadIdx.x / WARP; i < OWN_HIDDEN; i += THREADS / WARP) {
        const int mine = own * OWN_HIDDEN + i;
        if (mine < HIDDEN) {
            float sum = row_product<WARP, CHANNELS>(squeeze + mine * CHANNELS, means);
            if constexpr (Squeeze_bias::present) {
                sum += to_float(squeeze_bias[mine * Squeeze_bias::stride(0)]);
            }
            if (lane < blocks) {
                write_to(lane, &hidden[mine], activate(sum));
            }
        }
    }
    cluster_barrier();
    // As many lanes have a row as there are blocks, and each hands the factor to one of them. All lanes of a warp stay together.
    constexpr int ROWS = WARP / blocks;
#pragma unroll 2
    for (int i = int(threadIdx.x) / blocks; i < (OWN_CHANNELS + ROWS - 1) / ROWS * ROWS; i += THREADS / blocks) {
        const int mine = own * OWN_CHANNELS + i;
        const bool exists = i < OWN_CHANNELS && mine < CHANNELS;
        float sum = row_product<blocks, HIDDEN_PADDED>(excite + (exists ? mine : 0) * HIDDEN_PADDED, hidden);
        if (exists) {
            if constexpr (Excite_bias::present) {
                sum += to_float(excite_bias[mine * Excite_bias::stride(0)]);
            }
            write_to(threadIdx.x % blocks, &factors[mine], gate(sum));
        }
    }
    cluster_barrier();
    if (line < LINES) {
        float own_factors[PACK];
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            own_factors[i] = factors[channel + i];
        }
        // The pixels that were read last, which the caches still hold, come first; those of a turn are loaded together.
        const int steps = (end - first - line + LINES - 1) / LINES;
        for (int last = first + line + (steps - 1) * LINES; last >= first; last -= TOGETHER * LINES) {
            Pack<X::type, PACK> loaded[TOGETHER];
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                if (last - k * LINES >= first) {
                    loaded[k] = load_pack<PACK>(x + image + index_t(last - k * LINES) * CHANNELS + channel);
                }
            }
            // Each pack is replaced by its result, so that no store stands before a load.
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                if (last - k * LINES >= first) {
                    float values[PACK];
                    to_floats(values, loaded[k]);
#pragma unroll
                    for (int i = 0; i < PACK; i++) {
                        values[i] *= own_factors[i];
                    }
#where epilogue
                    EPILOGUE.apply(values, blockIdx.x, unsigned(channel), unsigned(last - k * LINES));
#end
                    from_floats(reinterpret_cast<Pack<Out::type, PACK> &>(loaded[k]), values);
                }
            }
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                if (last - k * LINES >= first) {
                    store_pack(
                        out + image + index_t(last - k * LINES) * CHANNELS + channel,
                        reinterpret_cast<const Pack<Out::type, PACK> &>(loaded[k])
                    );
                }
            }
        }
    }
}
