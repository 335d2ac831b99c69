// Convolutions in narrow groups of 16-bit channels-last images, on tensor cores.
//
// A block makes `down` × `across` pixels of the channels of `packed` groups. It copies the window of those pixels and the
// factors to shared memory once, and takes the operands of its products from there, so that nothing is multiplied by the zeros
// between groups: terms of a group are ordered by tap, then by channel, as in the weight, and each tap shifts the pixels.
// Columns of a product that no channel of the group needs are dropped.
#include "conv/places.cuh"
#include "conv/finish.cuh"

using Half = X::type;
#include "common/tensor_cores.cuh"

constexpr int INNER = int(Weight::size(1));  // input channels of a group
constexpr int OUTER = int(Out::size(1)) / int(param::groups);  // its output channels
constexpr int WINDOW_COLUMNS = int(Weight::size(3));
constexpr int TERMS = int(Weight::size(2)) * WINDOW_COLUMNS * INNER;
constexpr int STEPS = (TERMS + 15) / 16;  // of 16 terms
constexpr int HEIGHT = (down - 1) * int(param::stride(0)) + (int(Weight::size(2)) - 1) * int(param::dilation(0)) + 1;
constexpr int WIDTH = (across - 1) * int(param::stride(1)) + (WINDOW_COLUMNS - 1) * int(param::dilation(1)) + 1;
constexpr int UNITS = packed * INNER / PACK;  // of 16 bytes, of a pixel
// Rows in shared memory, in words of two elements: an odd number of units apart, so that those of eight neighbours are in
// different banks.
constexpr int PIXEL_WORDS = 4 * (UNITS | 1);
constexpr int FACTOR_WORDS = 8 * STEPS + 4;
constexpr int FACTOR_BYTES = TERMS % 8 == 0 ? 16 : TERMS % 4 == 0 ? 8 : 4;  // of a copy
constexpr int FRAGMENTS_M = (down * across + 15) / 16;
constexpr int FRAGMENTS_N = (OUTER + 7) / 8;
constexpr int TOGETHER = FRAGMENTS_N > 4 ? 1 : 2;  // fragments of pixels that a warp makes at a time
constexpr int SHARES = (FRAGMENTS_M + TOGETHER - 1) / TOGETHER;
constexpr int TILE_ROWS = (int(Out::size(2)) + down - 1) / down;
constexpr int TILE_COLUMNS = (int(Out::size(3)) + across - 1) / across;
constexpr int UNROLLED = STEPS <= 20 ? STEPS : 2;

static_assert(sizeof(X::type) == 2 && INNER % 2 == 0 && OUTER % 2 == 0 && packed * INNER % PACK == 0, "");

__device__ __forceinline__ const unsigned *words_at(const Half *elements) {
    return reinterpret_cast<const unsigned *>(elements);
}

// Where the terms 2 * pair and 2 * pair + 1 lie, in words from a pixel's first one; -1 where there are none.
__device__ __forceinline__ int place_of_terms(int pair) {
    const int tap = 2 * pair / INNER;
    const int down_by = tap / WINDOW_COLUMNS * int(param::dilation(0));
    const int shift = down_by * WIDTH + tap % WINDOW_COLUMNS * int(param::dilation(1));
    return 2 * pair < TERMS ? shift * PIXEL_WORDS + (2 * pair % INNER) / 2 : -1;
}

// Where the window of a pixel of the tile begins; that of the first one for those beyond the last.
__device__ __forceinline__ int place_of_pixel(int pixel) {
    const int own = pixel < down * across ? pixel : 0;
    return (own / across * int(param::stride(0)) * WIDTH + own % across * int(param::stride(1))) * PIXEL_WORDS;
}

WAITING_KERNEL(conv_grouped) {
    extern __shared__ __align__(16) unsigned words[];
    unsigned *factors = words + HEIGHT * WIDTH * PIXEL_WORDS;
    if constexpr (!constant_weight) {
        wait_for_inputs();
    }
    const int first_group = int(blockIdx.y) * packed;
    constexpr int pieces = (16 * STEPS * 2 + FACTOR_BYTES - 1) / FACTOR_BYTES;  // copies of a row of factors
    for (int i = threadIdx.x; i < packed * OUTER * pieces; i += THREADS) {
        const int term = i % pieces * (FACTOR_BYTES / 2);
        const bool inside = term < TERMS;
        const index_t source = inside ? index_t(first_group * OUTER + i / pieces) * TERMS + term : 0;
        copy_words<FACTOR_BYTES>(factors + i / pieces * FACTOR_WORDS + term / 2, words_at(weight + source), inside);
    }
    const int tile = int(blockIdx.x % unsigned(TILE_ROWS * TILE_COLUMNS));
    const unsigned image = blockIdx.x / unsigned(TILE_ROWS * TILE_COLUMNS);
    const int first_row = tile / TILE_COLUMNS * down;
    const int first_column = tile % TILE_COLUMNS * across;
    const int top = first_row * int(param::stride(0)) - int(param::padding(0));
    const int left = first_column * int(param::stride(1)) - int(param::padding(2));
    const X::type *plane = x + image * X::stride(0) + first_group * INNER;
    begin_in_turn();
    for (int i = threadIdx.x; i < HEIGHT * WIDTH * UNITS; i += THREADS) {
        const int pixel = i / UNITS;
        const int row = top + pixel / WIDTH;
        const int column = left + pixel % WIDTH;
        const bool inside = unsigned(row) < X::size(2) && unsigned(column) < X::size(3);
        const index_t source = inside ? row * X::stride(2) + column * X::stride(3) + i % UNITS * PACK : 0;
        copy_words(words + pixel * PIXEL_WORDS + i % UNITS * 4, words_at(plane + source), inside);
    }
    end_of_copies();
    wait_for_copies<0>();
    __syncthreads();

    const int lane = threadIdx.x % WARP;
    for (int share = threadIdx.x / WARP; share < packed * SHARES; share += THREADS / WARP) {
        const int group = share / SHARES;
        const int first_fragment = share % SHARES * TOGETHER;
        const unsigned *pixels[TOGETHER][2];
#pragma unroll
        for (int m = 0; m < TOGETHER; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int pixel = (first_fragment + m) * 16 + half * 8 + lane / 4;
                pixels[m][half] = words + place_of_pixel(pixel) + group * (INNER / 2);
            }
        }
        float sums[TOGETHER][FRAGMENTS_N][4] = {};
#pragma unroll UNROLLED
        for (int step = 0; step < STEPS; step++) {
            const int low = place_of_terms(step * 8 + lane % 4);
            const int high = place_of_terms(step * 8 + lane % 4 + 4);
            unsigned a[TOGETHER][4];
#pragma unroll
            for (int m = 0; m < TOGETHER; m++) {
                a[m][0] = low < 0 ? 0u : pixels[m][0][low];
                a[m][1] = low < 0 ? 0u : pixels[m][1][low];
                a[m][2] = high < 0 ? 0u : pixels[m][0][high];
                a[m][3] = high < 0 ? 0u : pixels[m][1][high];
            }
#pragma unroll
            for (int n = 0; n < FRAGMENTS_N; n++) {
                const int own = 8 * n + lane / 4;
                const unsigned *row =
                    factors + (group * OUTER + (own < OUTER ? own : 0)) * FACTOR_WORDS + step * 8 + lane % 4;
#pragma unroll
                for (int m = 0; m < TOGETHER; m++) {
                    multiply(sums[m][n], a[m][0], a[m][1], a[m][2], a[m][3], row[0], row[4]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < TOGETHER; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int pixel = (first_fragment + m) * 16 + half * 8 + lane / 4;
                const int row = first_row + pixel / across;
                const int column = first_column + pixel % across;
                const bool exists = pixel < down * across && row < int(Out::size(2)) && column < int(Out::size(3));
#pragma unroll
                for (int n = 0; n < FRAGMENTS_N; n++) {
                    const int own = 8 * n + lane % 4 * 2;
                    if (exists && own < OUTER) {
                        float values[2] = {sums[m][n][2 * half], sums[m][n][2 * half + 1]};
                        const unsigned channel = unsigned((first_group + group) * OUTER + own);
                        const unsigned place = unsigned(row) * unsigned(Out::size(3)) + unsigned(column);
                        finish(values, bias, residual, out, image, channel, place);
                    }
                }
            }
        }
    }
}
