// Batched products of 16-bit matrices by tensor cores: out[…, m, n] = scale · Σ left[…, m, k] · right[…, n, k]. The operands
// may have any strides: where they have rows or terms side by side, `left_pack` and `right_pack` of them are copied at a time.

using Half = Left::type;

#include "common/tensor_cores.cuh"
#include "common/matrices.cuh"

constexpr int rank = Out::rank;
constexpr index_t rows = Out::size(rank - 2);
constexpr index_t columns = Out::size(rank - 1);
constexpr index_t terms = Left::size(rank - 1);
constexpr int warps_n = THREADS / WARP / warps_m;
constexpr int row_tiles = tile_m / warps_m / 16;  // of a warp
constexpr int column_tiles = tile_n / warps_n / 16;  // of a warp

// A tile [lines, depth] of an operand, the dimension inside that is side by side in memory.
template <typename V, int lines, int pack>
struct Tile {
    static constexpr bool along_terms = V::stride(rank - 1) == 1;
    static constexpr int outer = along_terms ? lines : depth;
    static constexpr int inner = along_terms ? depth : lines;

    alignas(16) Half at[outer][inner + spare];

    __device__ __forceinline__ void copy(const Half *matrix, index_t first_line, index_t first_term) {
#pragma unroll (pack == 1 ? outer * inner / THREADS : 4)  // so that loads that wait do so together
        for (int i = threadIdx.x; i < outer * inner / pack; i += THREADS) {
            const int x = i % (inner / pack) * pack;
            const int y = i / (inner / pack);
            const index_t line = first_line + (along_terms ? y : x);
            const index_t term = first_term + (along_terms ? x : y);
            const bool inside = line < V::size(rank - 2) && term < terms;
            const Half *source = matrix + (inside ? line * V::stride(rank - 2) + term * V::stride(rank - 1) : 0);
            if constexpr (pack == 1) {
                at[y][x] = inside ? *source : from<Half>(0.0f);
            } else {
                copy_words<2 * pack>(&at[y][x], source, inside);
            }
        }
    }

    // The fragments of 16 lines and 16 terms, in the order of the left or the right operand of a product.
    template <bool is_left>
    __device__ __forceinline__ void load(unsigned (&fragments)[4], int line, int term) const {
        const int lane = threadIdx.x % WARP;
        const int second = lane / 8 % 2 * 8;
        const int third = lane / 16 * 8;
        line += (is_left ? second : third) + (along_terms ? lane % 8 : 0);
        term += (is_left ? third : second) + (along_terms ? 0 : lane % 8);
        load_matrices<!along_terms>(fragments, shared_address(along_terms ? &at[line][term] : &at[term][line]));
    }
};

struct Stage {
    Tile<Left, tile_m, left_pack> left;
    Tile<Right, tile_n, right_pack> right;
};

extern __shared__ __align__(16) unsigned char shared_memory[];

KERNEL(batched_halves) {
    Stage *memory = reinterpret_cast<Stage *>(shared_memory);
    constexpr index_t across = (columns + tile_n - 1) / tile_n;
    constexpr index_t down = (rows + tile_m - 1) / tile_m;
    constexpr int steps = (terms + depth - 1) / depth;
    const index_t batch = blockIdx.x / (across * down);
    const index_t first_row = blockIdx.x / across % down * tile_m;
    const index_t first_column = blockIdx.x % across * tile_n;
    left += leading_offset<Left, rank - 2>(batch);
    right += leading_offset<Right, rank - 2>(batch);
    const int warp = threadIdx.x / WARP;
    const int own_row = warp / warps_n * row_tiles * 16;
    const int own_column = warp % warps_n * column_tiles * 16;
    float sums[row_tiles][2 * column_tiles][4] = {};
    const auto copy = [&](int step) {
        if (step < steps) {
            memory[step % stages].left.copy(left, first_row, index_t(step) * depth);
            memory[step % stages].right.copy(right, first_column, index_t(step) * depth);
        }
        end_of_copies();
    };
#pragma unroll
    for (int step = 0; step < stages - 1; step++) {
        copy(step);
    }
    for (int step = 0; step < steps; step++) {
        wait_for_copies<stages - 2>();
        __syncthreads();  // what came last is there for all, and all have used what the next copies replace
        copy(step + stages - 1);
        const Stage &stage = memory[step % stages];
#pragma unroll
        for (int term = 0; term < depth; term += 16) {
            unsigned a[row_tiles][4];
#pragma unroll
            for (int tile = 0; tile < row_tiles; tile++) {
                stage.left.template load<true>(a[tile], own_row + 16 * tile, term);
            }
#pragma unroll
            for (int pair = 0; pair < column_tiles; pair++) {
                unsigned b[4];
                stage.right.template load<false>(b, own_column + 16 * pair, term);
#pragma unroll
                for (int tile = 0; tile < row_tiles; tile++) {
                    const unsigned(&own)[4] = a[tile];
                    multiply(sums[tile][2 * pair], own[0], own[1], own[2], own[3], b[0], b[1]);
                    multiply(sums[tile][2 * pair + 1], own[0], own[1], own[2], own[3], b[2], b[3]);
                }
            }
        }
    }
    out += leading_offset<Out, rank - 2>(batch);
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int tile = 0; tile < row_tiles; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const index_t row = first_row + own_row + 16 * tile + 8 * half + lane / 4;
#pragma unroll
            for (int group = 0; group < 2 * column_tiles; group++) {
                const index_t column = first_column + own_column + 8 * group + lane % 4 * 2;
                const float *own = &sums[tile][group][2 * half];
                if (row >= rows || column >= columns) {
                    continue;
                }
                Out::type *target = out + row * Out::stride(rank - 2) + column * Out::stride(rank - 1);
                if constexpr (in_pairs) {
                    store_floats(target, {param::scale * own[0], param::scale * own[1]});
                } else {
                    target[0] = from<Out::type>(param::scale * own[0]);
                    if (column + 1 < columns) {
                        target[Out::stride(rank - 1)] = from<Out::type>(param::scale * own[1]);
                    }
                }
            }
        }
    }
}
