// softmax(scale · q·kᵀ) · v for tokens of many sequences, whose keys and values lie in blocks of one pool: the kernel
// `lower_paged_attention` of the op table describes.

#kernel paged_once paged_shared paged_split paged_plain
#include "attention/paged.cuh"

#kernel paged_once paged_shared paged_plain
__device__ __forceinline__ index_t out_row(const Problem &problem, int row) {
    return (problem.token + row / sharing) * Out::stride(0)
        + (problem.head_group * sharing + row % sharing) * Out::stride(1);
}
#where has_sinks

__device__ __forceinline__ float sink_weight(const Sinks::type *sinks, const Problem &problem, int row, float largest) {
    return sink_weight(sinks, problem.head_group * sharing + row % sharing, largest);
}
#end

#kernel paged_once paged_shared paged_split
#include "attention/attention_fragments.cuh"
#include "attention/paged_scores.cuh"

// A tile's keys where a tile lies within one block of the pool.
struct TileRows {
    const Problem &problem;
    int row;  // of the pool, of key 0 of the tile's block

#where window
    __device__ __forceinline__ bool has(int key) const { return problem.sees(key); }
#elsewhere
    __device__ __forceinline__ bool has(int key) const { return problem.has(key); }
#end

    __device__ __forceinline__ const K::type *k_row(int key) const {
        return problem.k + (row + key % block_size) * K::stride(0);
    }

    __device__ __forceinline__ const V::type *v_row(int key) const {
        return problem.v + (row + key % block_size) * V::stride(0);
    }
};

#where window
// A tile's keys where a tile lies in several blocks of the pool.
struct SeenRows {
    const Problem &problem;

    __device__ __forceinline__ bool has(int key) const { return problem.sees(key); }
    __device__ __forceinline__ const K::type *k_row(int key) const { return problem.k_row(key); }
    __device__ __forceinline__ const V::type *v_row(int key) const { return problem.v_row(key); }
};

#end
constexpr bool whole_tiles = block_size % block_keys == 0;

__device__ __forceinline__ void copy_tile(KeyTile &tile, const Problem &problem, int first, int block_row) {
    if constexpr (whole_tiles) {
#where window
        if (KeyTile::filled && problem.sees(first) && problem.has(first + block_keys - 1)) {
#elsewhere
        if (KeyTile::filled && problem.has(first + block_keys - 1)) {
#end
            const int row = block_row + first % block_size;
            tile.copy_all<K::stride(0), V::stride(0)>(problem.k + row * K::stride(0), problem.v + row * V::stride(0));
            return;
        }
        tile.copy(TileRows{problem, block_row}, first);
    } else {
#where window
        tile.copy(SeenRows{problem}, first);
#elsewhere
        tile.copy(problem, first);
#end
    }
}

// Whether the kernel before may be writing to the 16 rows of the pool from `row` on, a multiple of 16; known to all lanes.
__device__ __forceinline__ bool is_being_written(const Written::type *written, int row) {
    bool found = false;
    for (int i = threadIdx.x % WARP; i < int(Written::size(0)); i += WARP) {
        found |= to_int(written[i * Written::stride(0)]) / block_keys == row / block_keys;
    }
    return __any_sync(0xffffffffu, found);
}

// Block `split` of `splits` attends to its part of the keys: each of its teams to every (splits · teams)-th tile of 16. While a
// tile is multiplied, the next `stages` - 1 are copied, and the block of the pool of the one behind them is looked up.
//
// Where the rows are known that the kernel before writes, the first tiles without any are copied while it still runs.
template <int warps, int stages, typename Finish>
__device__ __forceinline__ void attend_blocks(
    const Problem &problem, const Written::type *written, int split, int splits, SplitMemory<stages> (&memory)[warps],
    Finish finish
) {
    const int warp = threadIdx.x / WARP;
    constexpr int teams = warps / team;
    const int step = splits * teams * block_keys;
    KeyTile(&tiles)[stages] = memory[warp].tiles;
    int key = (split * teams + warp / team) * block_keys;
    int first_rows[stages];  // of the pool's blocks with the first tiles
    bool is_copied[stages] = {};
#pragma unroll
    for (int stage = 0; stage < stages; stage++) {
        first_rows[stage] = problem.block_row(key + stage * step);
    }
    if constexpr (Written::present) {
#pragma unroll
        for (int stage = 0; stage < stages - 1; stage++) {
            const int tile_key = key + stage * step;
            is_copied[stage] = whole_tiles && problem.has(tile_key)
                && !is_being_written(written, first_rows[stage] + tile_key % block_size);
            if (is_copied[stage]) {
                copy_tile(tiles[stage], problem, tile_key, first_rows[stage]);
            }
        }
        begin_in_turn();
    }
#pragma unroll
    for (int stage = 0; stage < stages - 1; stage++) {
        if (!is_copied[stage] && problem.has(key + stage * step)) {
            copy_tile(tiles[stage], problem, key + stage * step, first_rows[stage]);
        }
        end_of_copies();
    }
    int block_row = first_rows[stages - 1];
    State state(problem, 0, memory);
    int turn = 0;
    for (; problem.has(key); key += step) {
        const int ahead = key + (stages - 1) * step;
        if (problem.has(ahead)) {
            copy_tile(tiles[turn == 0 ? stages - 1 : turn - 1], problem, ahead, block_row);
        }
        end_of_copies();
        block_row = problem.block_row(ahead + step);
        wait_for_copies<stages - 1>();
        __syncwarp();
        KeyWords key_words;
        tiles[turn].read(key_words);
        const Weights weights = weigh_keys(state, problem, 0, key, key_words);
        ValueWords values;
        tiles[turn].read(values);
        state.add(weights, values);
        __syncwarp();
        turn = turn == stages - 1 ? 0 : turn + 1;
    }
    combine_warps(problem, 0, state, memory, finish);
}

extern __shared__ __align__(16) unsigned char shared_memory[];

#kernel paged_once paged_shared
// For tiles of more rows than a warp takes: all warps attend to the same keys, each with 16 rows of its own, and copy as many
// tiles of keys at a time as they are. Block `split` of `splits` attends to every `splits`-th of these.
template <int warps, int stages, typename Finish>
__device__ __forceinline__ void attend_together(
    const Problem &problem, int split, int splits, SplitMemory<stages> (&memory)[warps], Finish finish
) {
    static_assert(stages == 2 && team == 1, "");
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int first_row = warp * block_rows;
    const int step = splits * warps * block_keys;
    const int begin = split * warps * block_keys;
    int own = begin + warp * block_keys;  // the first key of the next tile that this warp copies
    auto copy = [&](int stage) {
        if (problem.has(own)) {
            copy_tile(memory[warp].tiles[stage], problem, own, problem.block_row(own));
        }
        end_of_copies();
        own += step;
    };
    copy(0);
    State state(problem, first_row, memory);
    const int row_end = smaller(first_row + block_rows, problem.count * sharing);
    const int reach = row_end > first_row ? problem.reach(row_end - 1) : 0;  // of this warp's rows
    int stage = 0;
    for (int first = begin; problem.has(first); first += step) {
        copy(1 - stage);
        wait_for_copies<1>();
        __syncthreads();
#pragma unroll 1
        for (int tile = 0; tile < warps; tile++) {
            const int key = first + tile * block_keys;
            if (key >= reach) {
                break;
            }
            KeyWords key_words;
            memory[tile].tiles[stage].read(key_words);
            const Weights weights = weigh_keys(state, problem, first_row, key, key_words);
            ValueWords values;
            memory[tile].tiles[stage].read(values);
            state.add(weights, values);
        }
        __syncthreads();  // the stage may be copied to again
        stage = 1 - stage;
    }
    wait_for_copies<0>();
    __syncthreads();
    Found &found = memory[warp].found;
    state.leave(found);
    __syncwarp();
    constexpr int pieces = value_width / 4;
    for (int i = lane; i < held_rows * pieces; i += WARP) {
        float sums[4];
        load_floats(sums, found.place(i / pieces, i % pieces));
        const int row = i / pieces;
        finish(problem, first_row + row, i % pieces * 4, found.largest[row], found.total[row], sums);
    }
}

// The way that suits the tile's rows.
template <int warps, int stages, typename Finish>
__device__ __forceinline__ void attend_tile(
    const Problem &problem, const Written::type *written, int split, int splits, SplitMemory<stages> (&memory)[warps],
    Finish finish
) {
    if constexpr (rows > block_rows) {
        if (problem.count * sharing > block_rows) {
            attend_together(problem, split, splits, memory, finish);
            return;
        }
    }
    attend_blocks(problem, written, split, splits, memory, finish);
}

#kernel paged_once
struct Finish {
    Out::type *out;
#where has_sinks
    const Sinks::type *sinks;
#end

    __device__ __forceinline__ void operator()(
#where has_sinks
        const Problem &problem, int row, int dim, float largest, float of_keys, const float (&sums)[4]
#elsewhere
        const Problem &problem, int row, int dim, float, float total, const float (&sums)[4]
#end
    ) const {
        if (problem.reach(row) > 0) {
#where has_sinks
            const float total = of_keys + sink_weight(sinks, problem, row, largest);
#end
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[out_row(problem, row) + (dim + i) * Out::stride(2)] = from<Out::type>(sums[i] / total);
            }
        }
    }
};

KERNEL(paged_once) {
    const Problem problem(q, k, v, tables, sequences, positions, blockIdx.y, blockIdx.x);
    if (problem.count == 0) {
        return;
    }
    auto &memory = *reinterpret_cast<SplitMemory<stages>(*)[THREADS / WARP]>(shared_memory);
#where has_sinks
    attend_tile(problem, written, 0, 1, memory, Finish{out, sinks});
#elsewhere
    attend_tile(problem, written, 0, 1, memory, Finish{out});
#end
}

#kernel paged_shared
#include "common/cluster.cuh"

// The blocks of a cluster share the keys of a tile, and then its result: each finishes a part of it from what all have found.

constexpr int part_rows = rows > block_rows ? THREADS / WARP * block_rows : held_rows;

struct alignas(16) Part {
    float largest[part_rows];
    float total[part_rows];
    alignas(16) float sums[part_rows][value_width];
};

struct Finish {
    Part &part;

    __device__ __forceinline__ void operator()(
        const Problem &, int row, int dim, float largest, float total, const float (&found)[4]
    ) const {
        store_floats(&part.sums[row][dim], found);
        if (dim == 0) {
            part.largest[row] = largest;
            part.total[row] = total;
        }
    }
};

#where has_sinks
__device__ __forceinline__ void share_tile(
    const Problem &problem, const Written::type *written, const Sinks::type *sinks, Out::type *out
) {
#elsewhere
__device__ __forceinline__ void share_tile(const Problem &problem, const Written::type *written, Out::type *out) {
#end
    auto &memory = *reinterpret_cast<SplitMemory<stages>(*)[THREADS / WARP]>(shared_memory);
    Part &part = *reinterpret_cast<Part *>(shared_memory + sizeof(memory));
    attend_tile(problem, written, blockIdx.z, splits, memory, Finish{part});
    cluster_barrier();
    constexpr int pieces = value_width / 4;
    const int items = rows > block_rows ? problem.count * sharing * pieces : held_rows * pieces;
    const int share = (items + splits - 1) / splits;
    const int first = int(blockIdx.z) * share;
    for (int i = first + threadIdx.x; i < smaller(first + share, items); i += THREADS) {
        const int row = i / pieces;
        const int dim = i % pieces * 4;
        float largest[splits];
        float greatest = -FLOAT_MAX;
#pragma unroll
        for (int other = 0; other < splits; other++) {
            largest[other] = read_from(other, &part.largest[row]);
            greatest = fmaxf(greatest, largest[other]);
        }
        float total = 0.0f;
        float sums[4] = {};
#pragma unroll
        for (int other = 0; other < splits; other++) {
            const float weight = expf(largest[other] - greatest);
            float found[4];
            read_four_from(found, other, &part.sums[row][dim]);
            total = fmaf(weight, read_from(other, &part.total[row]), total);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sums[j] = fmaf(weight, found[j], sums[j]);
            }
        }
        if (problem.reach(row) > 0) {
#where has_sinks
            total += sink_weight(sinks, problem, row, greatest);
#end
#pragma unroll
            for (int j = 0; j < 4; j++) {
                out[out_row(problem, row) + (dim + j) * Out::stride(2)] = from<Out::type>(sums[j] / total);
            }
        }
    }
    cluster_barrier();  // none may end, and take along what it found, or replace it, while others read it
}

// Where `written` is present, the kernel before may still be running at first; tables, sequences and positions are older.
WAITING_KERNEL(paged_shared) {
    static_assert(!Written::present || rows <= block_rows, "");
    if constexpr (!Written::present) {
        begin_in_turn();
    }
    if (rows <= block_rows) {
        const Problem problem(q, k, v, tables, sequences, positions, blockIdx.y, blockIdx.x);
        if (problem.count > 0) {  // for all blocks of the cluster; those of token 0 always wait
#where has_sinks
            share_tile(problem, written, sinks, out);
#elsewhere
            share_tile(problem, written, out);
#end
        }
        return;
    }
    // There are far fewer tiles than tokens, and a cluster for each token would take long to come and go.
    const Tiles tiles(sequences, positions);
    int token = tiles.token(blockIdx.y);
    for (int number = blockIdx.y; token < tokens; token = tiles.token(number)) {
#where has_sinks
        share_tile(Problem(q, k, v, tables, sequences, positions, token, blockIdx.x), written, sinks, out);
#elsewhere
        share_tile(Problem(q, k, v, tables, sequences, positions, token, blockIdx.x), written, out);
#end
        number += gridDim.y;
    }
}

#kernel paged_split
// Leaves what it found in sums[token, group of heads, head in it, split, dimension]; stats has the maximum and the total.
struct Finish {
    float *sums;
    float *stats;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float largest, float total, const float (&found)[4]
    ) const {
        if (problem.reach(row) > 0) {
            const int token = problem.token + row / sharing;
            const index_t part
                = ((index_t(token) * head_groups + problem.head_group) * sharing + row % sharing) * splits + blockIdx.x;
            if (total != 0.0f) {
                store_floats(sums + part * value_width + dim, found);
            }
            if (dim == 0) {
                store_floats(stats + 2 * part, {largest, total});
            }
        }
    }
};

KERNEL(paged_split) {
    const Problem problem(q, k, v, tables, sequences, positions, blockIdx.z, blockIdx.y);
    if (problem.count > 0) {
        auto &memory = *reinterpret_cast<SplitMemory<stages>(*)[THREADS / WARP]>(shared_memory);
        attend_blocks(problem, written, blockIdx.x, splits, memory, Finish{sums, stats});
    }
}

#kernel paged_plain
// Any dtypes, widths and strides, in float arithmetic: a block per token, head and slice of the result; each warp follows keys
// of its own.
#include "attention/plain.cuh"

KERNEL(paged_plain) {
    const int head = blockIdx.x / slices % int(Q::size(1));
    const int token = blockIdx.x / slices / int(Q::size(1));
    const Problem problem(q, k, v, tables, sequences, positions, token, head);
    const int row = 0;
#where window
    const int first_seen = problem.first_seen(row);
    auto bias = [=](int key) { return key >= first_seen ? 0.0f : -INFINITY_F; };
#elsewhere
    auto bias = [](int) { return 0.0f; };
#end
    auto store = [&](int dim, float value) {
        out[out_row(problem, row) + dim * Out::stride(2)] = from<Out::type>(value);
    };
#where has_sinks
    auto beside = [&](float largest) { return sink_weight(sinks, problem, row, largest); };
    attend_plainly<Q::stride(2), K::stride(2), V::stride(2)>(problem, row, problem.reach(row), bias, store, beside);
#elsewhere
    attend_plainly<Q::stride(2), K::stride(2), V::stride(2)>(problem, row, problem.reach(row), bias, store);
#end
}
