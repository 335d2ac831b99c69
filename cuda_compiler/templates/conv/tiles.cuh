// How convolutions over channels-last images are cut into tiles: as a matrix product of patches[windows, DEPTH] and
// weight[channels, DEPTH], for each group of channels, whose terms are ordered by tap, then by input channel, side by side in
// both. A window makes one output pixel, or in a transposed convolution spread_down × spread_right of them (`spread.cuh`).
//
// A block makes tile_m windows × tile_n channels from its share of the terms, 128 bytes of a row at a time, `stages` copies
// on their way. The `splits` blocks of a cluster share the terms of a tile, and each of them finishes some of its rows from
// the partial sums in all their shared memories. GPUs without clusters leave the work to the first of them.
//
// Expects `Sum`, the type of sums, `UNIT_BYTES`, how many bytes of a row a thread copies at a time, and `PADDING_WORD`, four
// bytes of what lies outside of an image.
#include "conv/places.cuh"

constexpr unsigned WINDOWS = unsigned(window_rows * window_columns);  // of an image
constexpr unsigned ROWS = unsigned(Out::size(0)) * WINDOWS;
constexpr unsigned CHANNELS = unsigned(Out::size(1)) * unsigned(spread_down * spread_right);
constexpr unsigned TILES_M = (ROWS + tile_m - 1) / tile_m;
constexpr unsigned GROUP_CHANNELS = CHANNELS / param::groups;
constexpr unsigned GROUP_TILES = (GROUP_CHANNELS + tile_n - 1) / tile_n;  // a tile's channels are of one group
constexpr unsigned TILES_N = GROUP_TILES * param::groups;
constexpr unsigned BAND = 16;  // tiles of windows whose tiles run at about the same time, so that they share the cache
constexpr int ROW_BYTES = 128;  // of a staged row
constexpr unsigned UNIT = UNIT_BYTES / sizeof(Weight::type);
constexpr unsigned CHANNEL_UNITS = unsigned(Weight::size(1)) / UNIT;
constexpr unsigned TAPS = unsigned(Weight::size(2) * Weight::size(3));
constexpr unsigned DEPTH = CHANNEL_UNITS * TAPS;  // in units
constexpr unsigned ROW_UNITS = ROW_BYTES / UNIT_BYTES;
constexpr unsigned STEPS = (DEPTH + ROW_UNITS - 1) / ROW_UNITS;
constexpr int PASS = THREADS / ROW_UNITS;  // rows of a tile that the threads copy at a time, a unit each
// Of the four parts of 32 bytes of a staged row, as many as hold terms.
constexpr int PARTS = STEPS == 1 ? (DEPTH * UNIT_BYTES + 31) / 32 : 4;
constexpr int warp_m = tile_m / warps_m;
constexpr int warp_n = tile_n / warps_n;
constexpr int M_FRAGMENTS = warp_m / 16;
constexpr int N_FRAGMENTS = warp_n / 8;
constexpr int SUM_STAGE = tile_n + 4;  // so that a column's elements lie in different banks
constexpr int STAGE_BYTES = (tile_m + tile_n) * ROW_BYTES;

static_assert(warps_m * warps_n * WARP == THREADS && tile_m % PASS == 0 && tile_n % PASS == 0, "");
static_assert(warp_m % 16 == 0 && warp_n % 16 == 0 && Weight::size(1) % UNIT == 0, "");

// A signed offset into x.
template <int bytes>
struct Signed { using type = int; };
template <>
struct Signed<8> { using type = long long; };
using Offset = Signed<sizeof(index_t)>::type;

// Clusters are of compute capability 9.0 and up.
#if __CUDA_ARCH__ >= 900
constexpr int SHARERS = splits;
#else
constexpr int SHARERS = 1;
#endif

// Where a byte of a staged row lies: the 16-byte pieces of a row are exchanged so that those of one column are in different
// banks. That is also how warpgroups read matrices.
__device__ __forceinline__ int staged(int row, int byte) {
    return row * ROW_BYTES + ((byte / 16) ^ row & 7) * 16 + byte % 16;
}

// What a block makes.
struct Tile {
    unsigned sharer;
    unsigned first_window;
    unsigned first_channel;
    unsigned end_channel;  // of its group
    unsigned first_input;  // channel of x
    unsigned first_step;
    unsigned end_step;
};

__device__ __forceinline__ Tile own_tile() {
    const unsigned band = blockIdx.x / (BAND * TILES_N);
    const unsigned in_band = blockIdx.x % (BAND * TILES_N);
    const unsigned band_tiles = min(BAND, TILES_M - band * BAND);
    const unsigned group = in_band / band_tiles / GROUP_TILES;
    return {
        blockIdx.z, (band * BAND + in_band % band_tiles) * tile_m,
        group * GROUP_CHANNELS + in_band / band_tiles % GROUP_TILES * tile_n, (group + 1) * GROUP_CHANNELS,
        group * unsigned(Weight::size(1)), blockIdx.z * STEPS / SHARERS, (blockIdx.z + 1) * STEPS / SHARERS
    };
}
