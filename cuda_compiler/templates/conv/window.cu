// Convolutions of few channels, or in groups of few, over 16-bit channels-last images, on tensor cores.
//
// A block makes some channels of tiles of `down` × `across` pixels, one tile after the other: those of `packed` groups, or one of
// the `shares` of a group's. It copies their factors to shared memory once, and the window of a tile's pixels while it makes the tile
// before. The operands of products come from there, so that an element of an image is copied once for all taps, and nothing is
// multiplied by the zeros between groups: terms of a group are ordered by tap, then by channel, as in the weight, and each tap
// shifts the pixels. Columns of a product that no channel of the group needs are dropped.
#include "conv/places.cuh"
#include "conv/finish.cuh"

using Half = X::type;
#include "common/matrices.cuh"
#include "common/tensor_cores.cuh"

constexpr int INNER = int(Weight::size(1));  // input channels of a group
constexpr int OUTER = int(Out::size(1)) / int(param::groups) / shares;  // output channels of a share of a group
constexpr int WINDOW_COLUMNS = int(Weight::size(3));
constexpr int TERMS = int(Weight::size(2)) * WINDOW_COLUMNS * INNER;
constexpr int STEPS = (TERMS + 15) / 16;  // of 16 terms
constexpr int HEIGHT = (down - 1) * int(param::stride(0)) + (int(Weight::size(2)) - 1) * int(param::dilation(0)) + 1;
constexpr int WIDTH = (across - 1) * int(param::stride(1)) + (WINDOW_COLUMNS - 1) * int(param::dilation(1)) + 1;
constexpr int UNITS = packed * INNER / PACK;  // of 16 bytes, of a pixel
// Rows in shared memory, in words of two elements: an odd number of units apart, so that those of eight neighbours are in
// different banks.
constexpr int PIXEL_WORDS = 4 * (UNITS | 1);
constexpr int WINDOW_WORDS = HEIGHT * WIDTH * PIXEL_WORDS;
constexpr int FACTOR_WORDS = 8 * STEPS + 4;
constexpr int FACTOR_BYTES = TERMS % 8 == 0 ? 16 : TERMS % 4 == 0 ? 8 : 4;  // of a copy
constexpr int FRAGMENTS_M = (down * across + 15) / 16;
constexpr int FRAGMENTS_N = (OUTER + 7) / 8;
constexpr int TOGETHER = FRAGMENTS_N > 8 ? 1 : 2;  // fragments of pixels that a warp makes at a time
constexpr int PARTS = (FRAGMENTS_M + TOGETHER - 1) / TOGETHER;
constexpr int TILE_ROWS = (int(Out::size(2)) + down - 1) / down;
constexpr int TILE_COLUMNS = (int(Out::size(3)) + across - 1) / across;
constexpr int TILES = int(Out::size(0)) * TILE_ROWS * TILE_COLUMNS;
constexpr bool IN_UNITS = INNER % 8 == 0;  // eight terms side by side are of one tap
constexpr int UNROLLED = STEPS <= 40 ? STEPS : 4;
constexpr int SPAN = 2 * joined;  // channels side by side that a lane has of `joined` fragments

static_assert(sizeof(X::type) == 2 && INNER % 2 == 0 && OUTER % 2 == 0 && packed * INNER % PACK == 0, "");
static_assert((joined == 1 || OUTER % (8 * joined) == 0) && (packed == 1 || shares == 1), "");

__device__ __forceinline__ const unsigned *words_at(const Half *elements) {
    return reinterpret_cast<const unsigned *>(elements);
}

// Where a term lies, in words from a pixel's first one.
__device__ __forceinline__ int place_of_term(int term) {
    const int tap = term / INNER;
    const int down_by = tap / WINDOW_COLUMNS * int(param::dilation(0));
    const int shift = down_by * WIDTH + tap % WINDOW_COLUMNS * int(param::dilation(1));
    return shift * PIXEL_WORDS + term % INNER / 2;
}

// Where the window of a pixel of the tile begins; that of the first one for those beyond the last.
__device__ __forceinline__ int place_of_pixel(int pixel) {
    const int own = pixel < down * across ? pixel : 0;
    return (own / across * int(param::stride(0)) * WIDTH + own % across * int(param::stride(1))) * PIXEL_WORDS;
}

// The row of a channel's factors among those of its group: a lane has two columns of each fragment, which become SPAN channels
// side by side.
__device__ __forceinline__ int row_of(int channel) {
    const int within = channel % (8 * joined);
    return channel - within + within % SPAN / 2 * 8 + within / SPAN * 2 + within % 2;
}

struct Tile {
    unsigned image;
    int first_row;
    int first_column;

    __device__ __forceinline__ explicit Tile(unsigned number)
        : image(number / unsigned(TILE_ROWS * TILE_COLUMNS)),
          first_row(int(number % unsigned(TILE_ROWS * TILE_COLUMNS)) / TILE_COLUMNS * down),
          first_column(int(number % unsigned(TILE_ROWS * TILE_COLUMNS)) % TILE_COLUMNS * across) {}
};

__device__ __forceinline__ void copy_window(unsigned *window, const X::type *x, const Tile &tile, int first_input) {
    const int top = tile.first_row * int(param::stride(0)) - int(param::padding(0));
    const int left = tile.first_column * int(param::stride(1)) - int(param::padding(2));
    const X::type *plane = x + tile.image * X::stride(0) + first_input;
    for (int i = threadIdx.x; i < HEIGHT * WIDTH * UNITS; i += THREADS) {
        const int pixel = i / UNITS;
        const int row = top + pixel / WIDTH;
        const int column = left + pixel % WIDTH;
        const bool inside = unsigned(row) < X::size(2) && unsigned(column) < X::size(3);
        const index_t source = inside ? row * X::stride(2) + column * X::stride(3) + i % UNITS * PACK : 0;
        copy_words(window + pixel * PIXEL_WORDS + i % UNITS * 4, words_at(plane + source), inside);
    }
}

// Terms of TOGETHER fragments of pixels of a group.
struct Pixels {
    unsigned addresses[TOGETHER];  // of the row that this lane points at
    const unsigned *rows[TOGETHER][2];  // that this lane has elements of
    unsigned zeros;

    __device__ __forceinline__ Pixels(const unsigned *window, const unsigned *factors, int first_fragment, int group)
        : zeros(shared_address(factors + FACTOR_WORDS - 8)) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int m = 0; m < TOGETHER; m++) {
            const int first = (first_fragment + m) * 16;
            addresses[m] = shared_address(window + place_of_pixel(first + lane % 16) + group * (INNER / 2));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                rows[m][half] = window + place_of_pixel(first + half * 8 + lane / 4) + group * (INNER / 2);
            }
        }
    }

    __device__ __forceinline__ void load(unsigned (&a)[TOGETHER][4], int step) const {
        const int lane = threadIdx.x % WARP;
        if constexpr (IN_UNITS) {
            const int term = step * 16 + lane / 16 * 8;
            const unsigned ahead = 4 * place_of_term(term);
#pragma unroll
            for (int m = 0; m < TOGETHER; m++) {
                // The last unit of a row of factors is one of zeros where terms end in the middle of a step.
                load_matrices<false>(a[m], TERMS % 16 == 0 || term < TERMS ? addresses[m] + ahead : zeros);
            }
        } else {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int term = step * 16 + side * 8 + lane % 4 * 2;
                const int ahead = place_of_term(term);
#pragma unroll
                for (int m = 0; m < TOGETHER; m++) {
                    a[m][2 * side] = term < TERMS ? rows[m][0][ahead] : 0u;
                    a[m][2 * side + 1] = term < TERMS ? rows[m][1][ahead] : 0u;
                }
            }
        }
    }
};

// 16 terms of the factors of a group.
__device__ __forceinline__ void load_factors(unsigned (&b)[FRAGMENTS_N][2], const unsigned *factors, int step) {
    const int lane = threadIdx.x % WARP;
    if constexpr (FRAGMENTS_N % 2 == 0) {
#pragma unroll
        for (int n = 0; n < FRAGMENTS_N; n += 2) {
            const int own = 8 * n + lane / 16 * 8 + lane % 8;
            const int row = OUTER % 16 == 0 || own < OUTER ? own : 0;
            unsigned pair[4];
            load_matrices<false>(pair, shared_address(factors + row * FACTOR_WORDS + step * 8 + lane / 8 % 2 * 4));
            b[n][0] = pair[0];
            b[n][1] = pair[1];
            b[n + 1][0] = pair[2];
            b[n + 1][1] = pair[3];
        }
    } else {
#pragma unroll
        for (int n = 0; n < FRAGMENTS_N; n++) {
            const int own = 8 * n + lane / 4;
            const unsigned *row = factors + (own < OUTER ? own : 0) * FACTOR_WORDS + step * 8 + lane % 4;
            b[n][0] = row[0];
            b[n][1] = row[4];
        }
    }
}

WAITING_KERNEL(conv_window) {
    extern __shared__ __align__(16) unsigned words[];
    unsigned *factors = words + windows * WINDOW_WORDS;
    if constexpr (!constant_weight) {
        wait_for_inputs();
    }
    const int first_share = int(blockIdx.y) * packed;  // of all shares of all groups
    constexpr int pieces = (16 * STEPS * 2 + FACTOR_BYTES - 1) / FACTOR_BYTES;  // copies of a row of factors
    for (int i = threadIdx.x; i < packed * OUTER * pieces; i += THREADS) {
        const int term = i % pieces * (FACTOR_BYTES / 2);
        const bool inside = term < TERMS;
        const index_t source = inside ? index_t(first_share * OUTER + i / pieces) * TERMS + term : 0;
        const int row = i / pieces / OUTER * OUTER + row_of(i / pieces % OUTER);
        copy_words<FACTOR_BYTES>(factors + row * FACTOR_WORDS + term / 2, words_at(weight + source), inside);
    }
    const int first_input = first_share / shares * INNER;
    begin_in_turn();
    unsigned *window = words;
    unsigned number = blockIdx.x;
    copy_window(window, x, Tile(number), first_input);
    end_of_copies();
    for (; number < TILES; number += gridDim.x) {
        unsigned *other = windows == 1 || window != words ? words : words + WINDOW_WORDS;
        if constexpr (windows == 2) {
            if (number + gridDim.x < TILES) {
                copy_window(other, x, Tile(number + gridDim.x), first_input);
            }
            end_of_copies();
        }
        wait_for_copies<windows - 1>();
        __syncthreads();

        const Tile tile(number);
        const int lane = threadIdx.x % WARP;
        for (int part = threadIdx.x / WARP; part < packed * PARTS; part += THREADS / WARP) {
            const int group = part / PARTS;
            const int first_fragment = part % PARTS * TOGETHER;
            const unsigned *own_factors = factors + group * OUTER * FACTOR_WORDS;
            const Pixels pixels(window, factors, first_fragment, group);
            float sums[TOGETHER][FRAGMENTS_N][4] = {};
#pragma unroll UNROLLED
            for (int step = 0; step < STEPS; step++) {
                unsigned a[TOGETHER][4];
                unsigned b[FRAGMENTS_N][2];
                pixels.load(a, step);
                load_factors(b, own_factors, step);
#pragma unroll
                for (int n = 0; n < FRAGMENTS_N; n++) {
#pragma unroll
                    for (int m = 0; m < TOGETHER; m++) {
                        multiply(sums[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[n][0], b[n][1]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < TOGETHER; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int pixel = (first_fragment + m) * 16 + half * 8 + lane / 4;
                    const int row = tile.first_row + pixel / across;
                    const int column = tile.first_column + pixel % across;
                    const bool exists = pixel < down * across && row < int(Out::size(2)) && column < int(Out::size(3));
#pragma unroll
                    for (int first = 0; first < FRAGMENTS_N; first += joined) {
                        const int own = 8 * first + lane % 4 * SPAN;
                        if (exists && own < OUTER) {
                            float values[SPAN];
#pragma unroll
                            for (int i = 0; i < SPAN; i++) {
                                values[i] = sums[m][first + i / 2][2 * half + i % 2];
                            }
                            const unsigned channel = unsigned((first_share + group) * OUTER + own);
                            const unsigned place = unsigned(row) * unsigned(Out::size(3)) + unsigned(column);
                            finish(values, bias, residual, out, tile.image, channel, place);
                        }
                    }
                }
            }
        }
        __syncthreads();
        if constexpr (windows == 1) {
            if (number + gridDim.x < TILES) {
                copy_window(window, x, Tile(number + gridDim.x), first_input);
            }
            end_of_copies();
        }
        window = other;
    }
}
