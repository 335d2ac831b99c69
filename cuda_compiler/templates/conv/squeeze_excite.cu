// out = x · gate(excite · activate(squeeze · mean(x) + squeeze_bias) + excite_bias), the factors one for each channel of an
// image. x and out are channels-last. The `blocks` blocks of a cluster share an image: each sums its pixels, finds its share
// of the means, of the hidden values and of the factors, which it hands to the others, and multiplies its pixels.

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
static_assert(LINES > 0, "");

WAITING_KERNEL(squeeze_excite) {
    __shared__ float sums[LINES][CHANNELS];
    __shared__ float means[CHANNELS];
    __shared__ float hidden[HIDDEN_PADDED];
    __shared__ float factors[CHANNELS];
    const int own = int(blockIdx.z);
    const int first = PIXELS * own / blocks;
    const int end = PIXELS * (own + 1) / blocks;
    const int line = int(threadIdx.x) / PACKS;
    const int channel = int(threadIdx.x) % PACKS * PACK;
    const index_t image = index_t(blockIdx.x) * (index_t(PIXELS) * CHANNELS);
    for (int i = HIDDEN + int(threadIdx.x); i < HIDDEN_PADDED; i += THREADS) {
        hidden[i] = 0.0f;
    }
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
            sums[line][channel + i] = sum[i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CHANNELS; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int each = 0; each < LINES; each++) {
            sum += sums[each][i];
        }
        sums[0][i] = sum;
    }
    cluster_barrier();
    for (int i = threadIdx.x; i < OWN_CHANNELS; i += THREADS) {
        const int mine = own * OWN_CHANNELS + i;
        if (mine < CHANNELS) {
            float sum = 0.0f;
#pragma unroll
            for (unsigned other = 0; other < blocks; other++) {
                sum += read_from(other, &sums[0][mine]);
            }
#pragma unroll
            for (unsigned other = 0; other < blocks; other++) {
                write_to(other, &means[mine], sum / float(PIXELS));
            }
        }
    }
    cluster_barrier();
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < OWN_HIDDEN; i += THREADS / WARP) {
        const int mine = own * OWN_HIDDEN + i;
        if (mine < HIDDEN) {
            float sum = 0.0f;
            for (int term = lane * PACK; term < CHANNELS; term += WARP * PACK) {
                float weights[PACK];
                load_floats(weights, squeeze + mine * CHANNELS + term);
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    sum = fmaf(weights[j], means[term + j], sum);
                }
            }
            sum = warp_sum(sum);
            if constexpr (Squeeze_bias::present) {
                sum += to_float(squeeze_bias[mine * Squeeze_bias::stride(0)]);
            }
            if (lane < blocks) {
                write_to(lane, &hidden[mine], activate(sum));
            }
        }
    }
    cluster_barrier();
    for (int i = threadIdx.x; i < OWN_CHANNELS; i += THREADS) {
        const int mine = own * OWN_CHANNELS + i;
        if (mine < CHANNELS) {
            float sum = 0.0f;
#pragma unroll 4
            for (int term = 0; term < HIDDEN_PADDED; term += PACK) {
                float weights[PACK];
                load_floats(weights, excite + mine * HIDDEN_PADDED + term);
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    sum = fmaf(weights[j], hidden[term + j], sum);
                }
            }
            if constexpr (Excite_bias::present) {
                sum += to_float(excite_bias[mine * Excite_bias::stride(0)]);
            }
#pragma unroll
            for (unsigned other = 0; other < blocks; other++) {
                write_to(other, &factors[mine], gate(sum));
            }
        }
    }
    cluster_barrier();
    if (line < LINES) {
        float own_factors[PACK];
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            own_factors[i] = factors[channel + i];
        }
#pragma unroll 8
        for (int pixel = first + line; pixel < end; pixel += LINES) {
            const index_t at = image + index_t(pixel) * CHANNELS + channel;
            float values[PACK];
            load_floats(values, x + at);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                values[i] *= own_factors[i];
            }
            store_floats(out + at, values);
        }
    }
}
