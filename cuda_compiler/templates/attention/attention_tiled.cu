// Attention of many queries: a block has `tile_rows` rows, 16 or 32 for each warp, and all multiply them by the same keys
// and values, which are copied to shared memory `tile_keys` at a time while those before are at work. The weights are
// rounded to 16 bits for their product with the values, as PyTorch's own kernels do.

#include "attention/attention_tiles.cuh"
#include "common/matrices.cuh"

constexpr int warps = THREADS / WARP;
constexpr int row_tiles = tile_rows / (warps * block_rows);  // of 16 rows, for each warp
constexpr int steps = (width + 15) / 16;
constexpr bool shares_queries = row_tiles > 1 || width > 128;  // registers do not suffice for them

// Rows are an odd multiple of 16 bytes apart, so that those of a matrix lie in different banks.
struct alignas(16) Stage {
    Half k[tile_keys][steps * 16 + 8];
    Half v[tile_keys][value_tiles * 8 + 8];
};

struct alignas(16) Memory {
    Stage stages[2];
    Half q[shares_queries ? tile_rows : 1][steps * 16 + 8];
};

extern __shared__ __align__(16) unsigned char shared_memory[];

template <int pieces, int stride>
__device__ __forceinline__ void copy_tile(
    Half (&target)[tile_keys][stride], const Half *source, index_t source_stride, int first_key, int row_width
) {
#pragma unroll
    for (int i = 0; i < tile_keys * pieces; i += THREADS) {
        const int key = (i + int(threadIdx.x)) / pieces;
        const int dim = (i + int(threadIdx.x)) % pieces * 8;
        if (tile_keys * pieces % THREADS != 0 && key >= tile_keys) {
            break;
        }
        const bool inside = first_key + key < keys && dim < row_width;
        copy_words(&target[key][dim], source + (inside ? (first_key + key) * source_stride + dim : 0), inside);
    }
}

__device__ __forceinline__ void copy_stage(Stage &stage, const Problem &problem, int tile) {
    copy_tile<steps * 2>(stage.k, problem.k, K::stride(2), tile * tile_keys, width);
    copy_tile<value_tiles>(stage.v, problem.v, V::stride(2), tile * tile_keys, value_width);
}

// The queries of a warp as fragments: in registers, or in shared memory for the sake of registers.
struct Queries {
    unsigned held[shares_queries ? 1 : steps][4];
    unsigned address;

    __device__ __forceinline__ void start(const Problem &problem, int block_row, Memory &memory) {
        const int lane = threadIdx.x % WARP;
        const int warp_row = int(threadIdx.x) / WARP * row_tiles * block_rows;
        if constexpr (shares_queries) {
            for (int i = threadIdx.x; i < tile_rows * steps * 2; i += THREADS) {
                const int row = i / (steps * 2);
                const int dim = i % (steps * 2) * 8;
                const bool inside = block_row + row < rows && dim < width;
                copy_words(&memory.q[row][dim], inside ? problem.q_row(block_row + row) + dim : problem.q, inside);
            }
            address = shared_address(&memory.q[warp_row + lane % 16][lane / 16 * 8]);
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = block_row + warp_row + 8 * half + lane / 4;
                const Half *data = problem.q_row(row < rows ? row : 0) + lane % 4 * 2;
#pragma unroll
                for (int step = 0; step < steps; step++) {
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        const int dim = 16 * step + 8 * side;
                        const bool inside = row < rows && dim < width;
                        held[step][2 * side + half] = inside ? *reinterpret_cast<const unsigned *>(data + dim) : 0;
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void load(unsigned (&left)[4], int tile, int step) const {
        if constexpr (shares_queries) {
            load_matrices<false>(left, address + unsigned(sizeof(Memory::q[0]) * block_rows * tile + 32 * step));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                left[i] = held[step][i];
            }
        }
    }
};

// scores[16 × tile_keys] = q · kᵀ for each 16 rows.
__device__ __forceinline__ void score(
    float (&scores)[row_tiles][key_groups][4], const Queries &queries_at, const Stage &stage
) {
    const int lane = threadIdx.x % WARP;
    const unsigned k = shared_address(&stage.k[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
#pragma unroll
    for (int step = 0; step < steps; step++) {
        unsigned left[row_tiles][4];
#pragma unroll
        for (int tile = 0; tile < row_tiles; tile++) {
            queries_at.load(left[tile], tile, step);
        }
#pragma unroll
        for (int pair = 0; pair < tile_keys / 16; pair++) {
            unsigned right[4];
            load_matrices<false>(right, k + unsigned(sizeof(stage.k[0]) * 16 * pair + 32 * step));
#pragma unroll
            for (int tile = 0; tile < row_tiles; tile++) {
                const unsigned(&q)[4] = left[tile];
                multiply(scores[tile][2 * pair], q[0], q[1], q[2], q[3], right[0], right[1]);
                multiply(scores[tile][2 * pair + 1], q[0], q[1], q[2], q[3], right[2], right[3]);
            }
        }
    }
}

// The sums of each 16 rows += weights · v
__device__ __forceinline__ void sum_up(
    Rows (&rows_at)[row_tiles], const float (&weights)[row_tiles][key_groups][4], const Stage &stage
) {
    const int lane = threadIdx.x % WARP;
    const unsigned v = shared_address(&stage.v[lane % 16][lane / 16 * 8]);
#pragma unroll
    for (int step = 0; step < tile_keys / 16; step++) {
        unsigned left[row_tiles][4];
#pragma unroll
        for (int tile = 0; tile < row_tiles; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&pair)[4] = weights[tile][2 * step + i / 2];
                left[tile][i] = packed(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int pair = 0; pair < value_tiles / 2; pair++) {
            unsigned right[4];
            load_matrices<true>(right, v + unsigned(sizeof(stage.v[0]) * 16 * step + 32 * pair));
#pragma unroll
            for (int tile = 0; tile < row_tiles; tile++) {
                const unsigned(&p)[4] = left[tile];
                multiply(rows_at[tile].sums[2 * pair], p[0], p[1], p[2], p[3], right[0], right[1]);
                multiply(rows_at[tile].sums[2 * pair + 1], p[0], p[1], p[2], p[3], right[2], right[3]);
            }
        }
    }
}

KERNEL(attention_tiled) {
    Memory &memory = *reinterpret_cast<Memory *>(shared_memory);
    const int row_block = row_block_of(blockIdx.x);
    const Problem problem(q, k, v, mask, problem_of(blockIdx.x) / kv_heads, problem_of(blockIdx.x) % kv_heads);
    const int block_row = row_block * tile_rows;
    const int first_row = block_row + int(threadIdx.x) / WARP * row_tiles * block_rows;
    const Tiles tiles(verdicts, problem, row_block);
    int tile = tiles.next(0);
    if (tile < tiles.count) {
        copy_stage(memory.stages[0], problem, tile);
    }
    Queries queries_at;
    queries_at.start(problem, block_row, memory);
    end_of_copies();
    Rows rows_at[row_tiles];
    int turn = 0;
    while (tile < tiles.count) {
        const int next = tiles.next(tile + 1);
        const bool is_biased = tiles.is_biased(tile);
        wait_for_copies<0>();
        __syncthreads();
        if (next < tiles.count) {
            copy_stage(memory.stages[1 - turn], problem, next);
        }
        end_of_copies();
        const Stage &stage = memory.stages[turn];
        float weights[row_tiles][key_groups][4] = {};
        score(weights, queries_at, stage);
#pragma unroll
        for (int part = 0; part < row_tiles; part++) {
            rows_at[part].weigh(
                weights[part], problem, first_row + part * block_rows, tile * tile_keys, is_biased
            );
            rows_at[part].shrink_sums();
        }
        sum_up(rows_at, weights, stage);
        tile = next;
        turn = 1 - turn;
    }
#pragma unroll
    for (int part = 0; part < row_tiles; part++) {
#where has_sinks
        rows_at[part].finish(problem, first_row + part * block_rows, sinks, out);
#elsewhere
        rows_at[part].finish(problem, first_row + part * block_rows, out);
#end
    }
}
