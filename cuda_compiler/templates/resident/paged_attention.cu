// Phase of a resident kernel for attention of a few tokens whose keys and values lie in blocks of a pool: rotary embedding of
// queries and keys, update of the pool, attention over splits of each token's keys, and combination of the splits, all as in
// `attention.cu`. What it means: `rms_norm`, `rotate`, `update_pool` and `attend_pool` in `resident/twins.py`.
//
// Each token is a problem of its own, with the `sharing` heads that have one KV head. Several tokens may be of one sequence:
// the later ones attend to the new keys of the earlier ones.
//
// Invariants: those of `attention.cu`, with this one instead of I20
// I24. A row of the pool is replaced by one block for each KV head: that with the row's token and its first split of the keys.
//      Every block has the new rows of its KV head in shared memory, and takes them from there instead of from its tiles
//      (`insert_new_rows`). So it does not matter whether these had the old or the new ones.

// The queries as a block keeps them in shared memory, one token's.
struct Q {
    using type = Unrotated::type;
    static constexpr int row = int(Unrotated::size(2)) + 32;  // so that rows begin in different banks
    __device__ static constexpr index_t size(int dim) { return Unrotated::size(dim); }
    __device__ static constexpr index_t stride(int dim) { return dim == 0 ? 0 : dim == 1 ? row : 1; }
};

constexpr int tile_tokens = 1;

#include "attention/paged.cuh"
#include "attention/attention_fragments.cuh"
#include "attention/paged_scores.cuh"

static_assert(block_size % block_keys == 0, "a tile's keys lie side by side");

constexpr int angle_rows = tokens;
constexpr int cache_rows = K::size(0);
constexpr int problems = tokens * head_groups;
constexpr int items = problems * splits;

// A part of the work: one split of a token's keys for the heads that share them.
struct Item {
    static constexpr index_t batch = 0;
    static constexpr int first_row = 0;
    int split;
    int head_group;
    int token;

    __device__ __forceinline__ Item(int number)
        : split(number % splits), head_group(number / splits % head_groups), token(number / (splits * head_groups)) {}

    __device__ __forceinline__ bool takes(int row) const { return row >= 0; }

    __device__ __forceinline__ bool stores(int new_token) const {
        return new_token == token && split == 0 && head_group % groups_per_kv_head == 0;
    }

    __device__ __forceinline__ int angle(int) const { return token; }

    __device__ __forceinline__ index_t query_place(int row) const {
        return token * Unrotated::stride(0) + (head_group * sharing + row) * Unrotated::stride(1);
    }

    // Of a token's new row, or of a row of the pool.
    template <typename Rows>
    __device__ __forceinline__ index_t new_place(int row) const {
        return row * Rows::stride(0) + head_group / groups_per_kv_head * Rows::stride(1);
    }

    template <typename Pool>
    __device__ __forceinline__ index_t cache_place(int row) const { return new_place<Pool>(row); }

    // The first key of a team's first tile.
    __device__ __forceinline__ int first_key(int number) const { return (number * splits + split) * block_keys; }
};

constexpr int step_keys = splits * (warps / team) * block_keys;  // from a team's tile to its next one

__device__ __forceinline__ int number_of(const Problem &problem) { return problem.token * head_groups + problem.head_group; }

__device__ __forceinline__ index_t result_place(int number, int row) {
    return number / head_groups * Out::stride(0) + (number % head_groups * sharing + row) * Out::stride(1);
}
#where has_sinks

__device__ __forceinline__ int head_of(int number, int row) { return number % head_groups * sharing + row; }
#end

#include "resident/new_rows.cuh"
#include "resident/partials.cuh"

struct Prefetched {
    SmallOperands small;
    int first_rows[teams][2];  // of the pool, where the first two tiles of a team of computing warps begin
};
static_assert(sizeof(Prefetched) <= PREFETCHED_BYTES, "the memory of what is prefetched is the largest phase's");

// The row of the pool where a tile begins; any where there is no such tile.
__device__ __forceinline__ int tile_row(const Problem &problem, int key) {
    return problem.block_row(key) + key % block_size;
}

// Prefetches a tile's rows into the L2 cache, by one warp.
template <typename Pool>
__device__ __forceinline__ void prefetch_rows(const Half *data, int row) {
    constexpr int lines = (int(Pool::size(2) * sizeof(Half)) + 127) / 128;
    data += row * Pool::stride(0);
#pragma unroll
    for (int i = 0; i < block_keys * lines; i += WARP) {
        const int line = i + threadIdx.x % WARP;
        if (line < block_keys * lines) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(data + line / lines * Pool::stride(0) + line % lines * 64));
        }
    }
}

__device__ __forceinline__ void prefetch_tile(const Problem &problem, int row) {
    prefetch_rows<K>(problem.k, row);
    prefetch_rows<V>(problem.v, row);
}

// Finds the first tiles of each team of computing warps and prefetches them into the L2 cache; the step itself can still change rows of
// them (I6). By one warp.
__device__ __forceinline__ void prefetch_item(
    Prefetched &prefetched, const Item &item, const K::type *k, const V::type *v, const Tables::type *tables,
    const Sequences::type *sequences, const Positions::type *positions, const Cos::type *cos, const Sin::type *sin,
    const Query_gain::type *query_gain, const Key_gain::type *key_gain, const Index::type *index
) {
    const Problem problem(nullptr, k, v, tables, sequences, positions, item.token, item.head_group);
    const int lane = threadIdx.x % WARP;
    static_assert(2 * teams <= WARP, "a lane looks up a tile");
    const int key = item.first_key(lane / 2) + lane % 2 * step_keys;
    const int row = tile_row(problem, key);
    if (lane < 2 * teams) {
        prefetched.first_rows[lane / 2][lane % 2] = row;
    }
#pragma unroll 1
    for (int tile = 0; tile < 2 * teams; tile++) {
        const int begin = __shfl_sync(0xffffffffu, row, tile);
        if (problem.has(__shfl_sync(0xffffffffu, key, tile))) {
            prefetch_tile(problem, begin);
        }
    }
    store_small_operands<Cos, Index>(prefetched.small, item, cos, sin, query_gain, key_gain, index, lane, WARP);
}

// The keys or values of a tile; zeros stand for keys that the token does not attend to.
#where window
template <typename Fragment>
__device__ __forceinline__ void load(
    Fragment &fragment, const Problem &problem, int first, const Half *data, index_t stride, int row_width
) {
    fragment.each([&](Words &words, int key, int piece) {
        words = load_words(data + key * stride + piece * 8, problem.sees(first + key) && piece * 8 < row_width);
    });
}

__device__ __forceinline__ void load(KeyWords &key_words, const Problem &problem, int key, int row) {
    load(key_words, problem, key, problem.k + row * K::stride(0), K::stride(0), width);
}

__device__ __forceinline__ void load(ValueWords &values, const Problem &problem, int key, int row) {
    load(values, problem, key, problem.v + row * V::stride(0), V::stride(0), value_width);
}
#elsewhere
template <typename Fragment>
__device__ __forceinline__ void load(Fragment &fragment, const Half *data, index_t stride, int count, int row_width) {
    fragment.each([&](Words &words, int key, int piece) {
        words = load_words(data + key * stride + piece * 8, key < count && piece * 8 < row_width);
    });
}

__device__ __forceinline__ void load(KeyWords &key_words, const Problem &problem, int key, int row) {
    load(key_words, problem.k + row * K::stride(0), K::stride(0), problem.keys - key, width);
}

__device__ __forceinline__ void load(ValueWords &values, const Problem &problem, int key, int row) {
    load(values, problem.v + row * V::stride(0), V::stride(0), problem.keys - key, value_width);
}
#end

// Replaces the new rows of a tile, the last of those that are the same one (I24).
__device__ __forceinline__ void insert_new_rows(
    KeyWords &key_words, ValueWords &values, const Scratch &scratch, const SmallOperands &small, int row
) {
    static_assert(tokens <= WARP, "a lane looks at a token");
    const int lane = threadIdx.x % WARP;
    const int place = small.token_rows[lane < tokens ? lane : 0] - row;
    unsigned found = __ballot_sync(0xffffffffu, lane < tokens && place >= 0 && place < block_keys);
    for (; found != 0; found &= found - 1) {
        const int token = __ffs(found) - 1;
        insert_new_row(key_words, values, scratch, token, __shfl_sync(0xffffffffu, place, token));
    }
}

PREFETCH {
    if (blockIdx.x < items) {
        Prefetched &prefetched = *reinterpret_cast<Prefetched *>(queue.current_memory());
        prefetch_item(
            prefetched, Item(blockIdx.x), k, v, tables, sequences, positions, cos, sin, query_gain, key_gain, index
        );
    }
}

PHASE(attend_pool) {
    queue.wait();
    Prefetched &prefetched = *reinterpret_cast<Prefetched *>(queue.current_memory());
    Scratch &scratch = *reinterpret_cast<Scratch *>(shared);  // I12
    const int warp = threadIdx.x / WARP;
    grid.wait<from_mailbox>();  // I11, I17
    bool idle = true;
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(number);
        Problem problem(nullptr, k, v, tables, sequences, positions, item.token, item.head_group);
        const SendPartials send{grid, partials, item.split};
        if (number >= gridDim.x) {  // what was prefetched is for the block's first item
            sync_block();  // I22
            if (warp == 0) {
                prefetch_item(
                    prefetched, item, k, v, tables, sequences, positions, cos, sin, query_gain, key_gain, index
                );
            }
            sync_block();
        }
        if (!problem.has(item.first_key(0))) {  // nor is there a row to store: the first split has keys
            if (threadIdx.x < rows) {
                send(problem, threadIdx.x, 0, -FLOAT_MAX, 0.0f, {});
            }
            continue;
        }
        idle = false;
        const int used = smaller((problem.keys - item.first_key(0) - 1) / (splits * block_keys) + 1, teams);
        // All loads from memory start together.
        int key = item.first_key(warp / team);
        int row = prefetched.first_rows[warp / team][0];
        int next_row = prefetched.first_rows[warp / team][1];
        KeyWords key_words = {};  // not left open, or they would keep their registers from step to step
        ValueWords values = {};
        if (problem.has(key)) {
            load(key_words, problem, key, row);
            load(values, problem, key, row);
        }
        // Before the update of the pool (I8, I21).
        stage_rows<Index>(
            grid, prefetched.small, scratch, item, unrotated, key_source, value_source, k, v, message
        );
        problem.q = &scratch.q[0][0];
        State state(problem, 0, scratch.memory);
        for (; problem.has(key); key += step_keys) {
            insert_new_rows(key_words, values, scratch, prefetched.small, row);
            const int following = tile_row(problem, key + 2 * step_keys);
            const Weights weights = weigh_keys(state, problem, 0, key, key_words);
            const bool more = problem.has(key + step_keys);
            if (more) {
                load(key_words, problem, key + step_keys, next_row);
            }
            state.add(weights, values);
            if (more) {
                load(values, problem, key + step_keys, next_row);
                if (problem.has(key + 2 * step_keys)) {
                    prefetch_tile(problem, following);
                }
            }
            row = next_row;
            next_row = following;
        }
        combine_warps(problem, 0, state, scratch.memory, send, used);
    }
    if (idle) {
        // Polling (I8) slows down the blocks that still have keys to attend to.
        __nanosleep(backoff_ns);
    }
#where has_sinks
    combine_partials(grid, partials, sinks, out);
#elsewhere
    combine_partials(grid, partials, out);
#end
}
