// Depthwise convolutions over channels-last images: each output channel from the input channel of its number; the weight
// [C, 1, kh, kw] has its channels side by side as well. A block has `packs` packs of `pack` channels, whose factors it keeps in
// shared memory, and THREADS / packs tiles of `down` × `across` pixels; a thread makes a pack of channels of a tile.
//
// Sums of bytes are exact in floats too.
#include "conv/places.cuh"

#kernel conv_depthwise
#include "conv/finish.cuh"

#define DEPTHWISE conv_depthwise
#define FINISH(values, image, channel, pixel) finish(values, bias, residual, out, image, channel, pixel)
constexpr float MIDDLE = 0.0f;

#kernel integer_depthwise
#include "conv/finish_integer.cuh"

template <int count>
__device__ __forceinline__ void finish(
    float (&sums)[count], const Scales::type *scales, const Bias::type *bias, const Residual::type *residual,
    Out::type *out, unsigned image, unsigned channel, unsigned pixel
) {
    Pack<Out::type, count> result;
    Pack<Residual::type, count> addends;
    if constexpr (Residual::present) {
        addends = load_pack<count>(residual + place<Residual>(image, channel, pixel));
    }
#pragma unroll
    for (int i = 0; i < count; i++) {
        const float scale = __fmul_rn(scales[channel + i], param::x_scale);
        float y = scaled(sums[i], scale, Bias::present ? to_float(bias[channel + i]) : NO_BIAS);
        if constexpr (Residual::present) {
            y = __fadd_rn(y, residual_value(addends.item[i], param::residual_scale));
        }
        result.item[i] = finished(y, 1.0f / param::out_scale);
    }
    store_pack<count>(out + place<Out>(image, channel, pixel), result);
}

#define DEPTHWISE integer_depthwise
#define FINISH(values, image, channel, pixel) finish(values, scales, bias, residual, out, image, channel, pixel)
constexpr float MIDDLE = float(param::zero_point);

#kernel conv_depthwise integer_depthwise
constexpr int CHANNELS = int(Out::size(1));
constexpr int TILE_ROWS = (int(Out::size(2)) + down - 1) / down;
constexpr int TILE_COLUMNS = (int(Out::size(3)) + across - 1) / across;
constexpr int WINDOW_ROWS = int(Weight::size(2));
constexpr int WINDOW_COLUMNS = int(Weight::size(3));
constexpr int TAPS = WINDOW_ROWS * WINDOW_COLUMNS;
constexpr int STEP_DOWN = int(param::stride(0));
constexpr int STEP_ACROSS = int(param::stride(1));
constexpr int REACH_DOWN = int(param::dilation(0));
constexpr int REACH_ACROSS = int(param::dilation(1));
constexpr int HEIGHT = (down - 1) * STEP_DOWN + (WINDOW_ROWS - 1) * REACH_DOWN + 1;  // of a tile's window
constexpr int WIDTH = (across - 1) * STEP_ACROSS + (WINDOW_COLUMNS - 1) * REACH_ACROSS + 1;

#where loops
// The channels of a row of a tile's window, zero in the padding around the image.
__device__ __forceinline__ void load_line(
    Pack<X::type, pack> (&line)[WIDTH], const X::type *plane, int row, int left
) {
    const bool has_row = unsigned(row) < X::size(2);
    plane += (has_row ? row : 0) * X::stride(2);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        line[j] = {};
        if (has_row && unsigned(left + j) < X::size(3)) {
            line[j] = load_pack<pack>(plane + (left + j) * X::stride(3));
        }
    }
}

#end
WAITING_KERNEL(DEPTHWISE) {
    __shared__ __align__(16) float factors[TAPS][pack * packs];
    if constexpr (!constant_weight) {
        wait_for_inputs();
    }
    const int first_channel = int(blockIdx.y) * (pack * packs);
    for (int i = threadIdx.x; i < TAPS * packs; i += THREADS) {
        const int tap = i / packs;
        const int own = i % packs * pack;
        float values[pack] = {};
        if (first_channel + own < CHANNELS) {
            load_floats(
                values, weight + tap / WINDOW_COLUMNS * Weight::stride(2) + tap % WINDOW_COLUMNS * Weight::stride(3) +
                    first_channel + own
            );
        }
        store_floats(&factors[tap][own], values);
    }
    __syncthreads();
    const int own = int(threadIdx.x) % packs * pack;
    const int channel = first_channel + own;
    const unsigned tile = blockIdx.x * unsigned(THREADS / packs) + threadIdx.x / packs;
    const unsigned image = tile / unsigned(TILE_ROWS * TILE_COLUMNS);
    if (image >= Out::size(0) || channel >= CHANNELS) {
        return;
    }
    const int first_row = int(tile / unsigned(TILE_COLUMNS) % unsigned(TILE_ROWS)) * down;
    const int first_column = int(tile % unsigned(TILE_COLUMNS)) * across;
    const int top = first_row * STEP_DOWN - param::padding(0);
    const int left = first_column * STEP_ACROSS - param::padding(2);
    const X::type *plane = x + image * X::stride(0) + channel;
    begin_in_turn();
    float sums[down][across][pack] = {};
#where loops
    // A row is loaded while the one before is multiplied.
    Pack<X::type, pack> ahead[WIDTH];
    load_line(ahead, plane, top, left);
#pragma unroll 1
    for (int i = 0; i < HEIGHT; i++) {
        float values[WIDTH][pack];
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            to_floats(values[j], ahead[j]);
        }
        if (i + 1 < HEIGHT) {
            load_line(ahead, plane, top + i + 1, left);
        }
#elsewhere
#pragma unroll
    for (int i = 0; i < HEIGHT; i++) {
        const int row = top + i;
        const bool has_row = unsigned(row) < X::size(2);
        const X::type *line = plane + (has_row ? row : 0) * X::stride(2);
        float values[WIDTH][pack];
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
#pragma unroll
            for (int c = 0; c < pack; c++) {
                values[j][c] = 0.0f;
            }
            if (has_row && unsigned(left + j) < X::size(3)) {
                load_floats(values[j], line + (left + j) * X::stride(3));
                if constexpr (MIDDLE != 0.0f) {
#pragma unroll
                    for (int c = 0; c < pack; c++) {
                        values[j][c] -= MIDDLE;
                    }
                }
            }
        }
#end
#pragma unroll
        for (int a = 0; a < down; a++) {
            const int below = i - a * STEP_DOWN;
            if (below < 0 || below % REACH_DOWN != 0 || below / REACH_DOWN >= WINDOW_ROWS) {
                continue;
            }
#pragma unroll
            for (int k = 0; k < WINDOW_COLUMNS; k++) {
                float factor[pack];
                load_floats(factor, &factors[below / REACH_DOWN * WINDOW_COLUMNS + k][own]);
#pragma unroll
                for (int b = 0; b < across; b++) {
#pragma unroll
                    for (int c = 0; c < pack; c++) {
                        sums[a][b][c] = fmaf(factor[c], values[b * STEP_ACROSS + k * REACH_ACROSS][c], sums[a][b][c]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int a = 0; a < down; a++) {
#pragma unroll
        for (int b = 0; b < across; b++) {
            if (first_row + a < int(Out::size(2)) && first_column + b < int(Out::size(3))) {
                const unsigned pixel = unsigned(first_row + a) * unsigned(Out::size(3)) + unsigned(first_column + b);
                FINISH(sums[a][b], image, channel, pixel);
            }
        }
    }
}
