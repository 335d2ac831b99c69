// Phase of a resident kernel for attention of few queries: rotary embedding of queries and keys, update of the KV cache,
// attention over splits of the keys, and combination of the splits' tagged partial sums, which is divided among all blocks.
// With `normed`, each head of queries and new keys is RMS-normalized first. With `from_mailbox`, queries and new rows are read
// from the mailbox, and with `to_mailbox` the result goes to the next one as well as to memory. What it means: `rms_norm`,
// `rotate`, `update_cache` and `attend_keys` in `resident/twins.py`.
//
// Invariants, besides those of `ring.cuh` (I1 to I5), `prefetch.cuh` (I6, I7) and `grid.cuh` (I8 to I17)
// I20. A row of the cache is replaced by the blocks whose split has its key, one for each KV head and 16 rows of queries, all
//      with the same values. Nobody else reads its new value in this step, and they do so from shared memory
//      (`insert_new_row`). So it does not matter whether their tile had the old or the new row.
// I21. A phase with `from_mailbox` reads only the mailbox and what no step of the kernel writes before it. What it writes (its
//      result, rows of its caches and, by I17, tagged sums), the step before does not use (`connect_mailboxes`).
// I22. What was prefetched may be written by the computing warps, too, after all of them are done with it (I7).

// The queries as a block keeps them in shared memory: a KV head's rows one after another.
struct Q {
    using type = Unrotated::type;
    static constexpr int row = int(Unrotated::size(3)) + 32;  // so that rows begin in different banks
    __device__ static constexpr index_t size(int dim) { return Unrotated::size(dim); }
    __device__ static constexpr index_t stride(int dim) {
        return dim == 0 ? 0 : dim == 1 ? row : dim == 2 ? row * (Unrotated::size(1) / K::size(1)) : 1;
    }
};

#include "attention/attention_split.cuh"

constexpr int tokens = Index::present ? int(Key_source::size(2)) : 0;  // whose keys and values are new
constexpr int angle_rows = queries;
constexpr int cache_rows = keys;
constexpr int problems = int(K::size(0)) * kv_heads;

// A part of the work: one split of the keys for up to 16 rows of a KV head.
struct Item {
    int split;
    int first_row;
    int kv_head;
    index_t batch;

    __device__ __forceinline__ Item(int number)
        : split(number % splits), first_row(number / splits % row_blocks * block_rows),
          kv_head(number / (splits * row_blocks) % kv_heads), batch(number / (splits * row_blocks * kv_heads)) {}

    __device__ __forceinline__ bool takes(int key) const {
        return key >= 0 && key / block_keys % splits == split;
    }

    __device__ __forceinline__ bool stores(int) const { return true; }
    __device__ __forceinline__ int angle(int row) const { return row / sharing; }

    __device__ __forceinline__ index_t query_place(int row) const {
        return batch * Unrotated::stride(0) + (kv_head * sharing + row % sharing) * Unrotated::stride(1)
            + row / sharing * Unrotated::stride(2);
    }

    template <typename Source>
    __device__ __forceinline__ index_t new_place(int token) const {
        return batch * Source::stride(0) + kv_head * Source::stride(1) + token * Source::stride(2);
    }

    template <typename Cache>
    __device__ __forceinline__ index_t cache_place(int key) const { return new_place<Cache>(key); }
};

constexpr int items = problems * row_blocks * splits;

__device__ __forceinline__ int number_of(const Problem &problem) {
    return int(problem.batch * kv_heads + problem.kv_head);
}

__device__ __forceinline__ int head_of(int number, int row) { return number % kv_heads * sharing + row % sharing; }

__device__ __forceinline__ index_t result_place(int number, int row) {
    return number / kv_heads * Out::stride(0) + head_of(number, row) * Out::stride(1)
        + row / sharing * Out::stride(2);
}
#where has_sinks

#include "attention/sinks.cuh"
#end

#include "resident/new_rows.cuh"
#include "resident/partials.cuh"

// The first two tiles of keys that a team of computing warps attends to, and the state of `Turns` after these. The tiles are in the L2
// cache, or on their way there.
struct FirstTiles {
    int key;  // the first tile's first key
    int next;  // the second tile's
    int turn;
    unsigned found;
    bool looked;
    bool lowest_counts;
};

struct Prefetched {
    SmallOperands small;
    FirstTiles first_tiles[teams];
};
static_assert(sizeof(Prefetched) <= PREFETCHED_BYTES, "the memory of what is prefetched is the largest phase's");

// The number of a block's first teams after which no team has keys that are attended to.
__device__ __forceinline__ int teams_with_keys(const Prefetched &prefetched) {
    int count = 0;
#pragma unroll
    for (int number = 0; number < teams; number++) {
        count = prefetched.first_tiles[number].key < keys ? number + 1 : count;
    }
    return count;
}

__device__ __forceinline__ bool has_new_keys(const Prefetched &prefetched, const Item &item) {
    bool found = false;
    for (int token = 0; token < tokens; token++) {
        found |= item.takes(prefetched.small.token_rows[token]);
    }
    return found;
}

// Prefetches the rows of a tile into the L2 cache, by one warp.
template <typename X>
__device__ __forceinline__ void prefetch_rows(const Half *data, int first) {
    constexpr unsigned row_bytes = X::size(3) * sizeof(Half);
    constexpr bool contiguous = X::stride(2) == X::size(3);
    const unsigned count = smaller(block_keys, keys - first);
    const unsigned rows = contiguous ? 1 : count;
    const unsigned bytes = contiguous ? count * row_bytes : row_bytes;
    const char *start = reinterpret_cast<const char *>(data + size_t(first) * X::stride(2));
    const int lane = threadIdx.x % WARP;
    for (unsigned row = 0; row < rows; row++, start += X::stride(2) * sizeof(Half)) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(start), "r"(bytes) : "memory");
        }
#else
        for (unsigned at = lane * 128; at < bytes; at += WARP * 128) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(start + at));
        }
#endif
    }
}

__device__ __forceinline__ void prefetch_tile(const Problem &problem, int first) {
    if (first < keys) {
        prefetch_rows<K>(problem.k, first);
        prefetch_rows<V>(problem.v, first);
    }
}

// Without shared memory, because every piece is read by one lane only.
template <typename Fragment>
__device__ __forceinline__ void load(Fragment &fragment, const Half *data, size_t stride, int first, int row_width) {
    data += first * stride;
    fragment.each([&](Words &words, int key, int piece) {
        const bool inside = (keys % block_keys == 0 || first + key < keys) && piece * 8 < row_width;
        words = load_words(data + key * stride + piece * 8, inside);
    });
}

__device__ __forceinline__ void load(KeyWords &key_words, const Problem &problem, int first) {
    load(key_words, problem.k, K::stride(2), first, width);
}

__device__ __forceinline__ void load(ValueWords &values, const Problem &problem, int first) {
    load(values, problem.v, V::stride(2), first, value_width);
}

// Finds the first tiles of each team of computing warps by the mask and prefetches them into the L2 cache; the step itself can still change
// a new row of them (I6). By warp `part` of `parts`.
__device__ __forceinline__ void prefetch_item(
    Prefetched &prefetched, const Item &item, const K::type *k, const V::type *v, const Mask::type *mask, const Cos::type *cos,
    const Sin::type *sin, const Query_gain::type *query_gain, const Key_gain::type *key_gain, const Index::type *index, int part,
    int parts
) {
    const Problem problem(nullptr, k, v, mask, item.batch, item.kv_head);
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int number = part; number < teams; number += parts) {
        Turns turns(problem, item.first_row, number * splits + item.split, splits * teams);
        const int key = turns.next();
        const int next = turns.next();
        prefetch_tile(problem, key);
        prefetch_tile(problem, next);
        if (lane == 0) {
            prefetched.first_tiles[number] = FirstTiles{key, next, turns.turn, turns.found, turns.looked, turns.lowest_counts};
        }
    }
    store_small_operands<Cos, Index>(
        prefetched.small, item, cos, sin, query_gain, key_gain, index, part * WARP + lane, parts * WARP
    );
}

// Replaces the new rows of a tile (I20).
__device__ __forceinline__ void insert_new_rows(
    KeyWords &key_words, ValueWords &values, const Prefetched &prefetched, const Scratch &scratch, int first
) {
#pragma unroll 1
    for (int token = 0; token < tokens; token++) {
        const int place = prefetched.small.token_rows[token] - first;
        if (place >= 0 && place < block_keys) {
            insert_new_row(key_words, values, scratch, token, place);
        }
    }
}

PREFETCH {
    if (blockIdx.x < items) {
        Prefetched &prefetched = *reinterpret_cast<Prefetched *>(queue.current_memory());
        prefetch_item(prefetched, Item(blockIdx.x), k, v, mask, cos, sin, query_gain, key_gain, index, 0, 1);
    }
}

PHASE(attend_keys) {
    queue.wait();
    Prefetched &prefetched = *reinterpret_cast<Prefetched *>(queue.current_memory());
    Scratch &scratch = *reinterpret_cast<Scratch *>(shared);  // I12
    const int warp = threadIdx.x / WARP;
    grid.wait<from_mailbox>();  // I11, I17
    bool idle = true;
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(number);
        Problem problem(nullptr, k, v, mask, item.batch, item.kv_head);
        const SendPartials send{grid, partials, item.split};
        if (number >= gridDim.x) {  // what was prefetched is for the block's first item
            sync_block();  // I22
            prefetch_item(prefetched, item, k, v, mask, cos, sin, query_gain, key_gain, index, warp, warps);
            sync_block();
        }
        const int used = teams_with_keys(prefetched);
        if (used == 0 && !has_new_keys(prefetched, item)) {
            const int row = item.first_row + threadIdx.x;
            if (threadIdx.x < held_rows && row < rows) {
                send(problem, row, 0, -FLOAT_MAX, 0.0f, {});
            }
            continue;
        }
        idle = false;
        // All loads from memory start together.
        const FirstTiles &first_tiles = prefetched.first_tiles[warp / team];
        int key = first_tiles.key;
        int next = first_tiles.next;
        KeyWords key_words = {};  // not left open, or they would keep their registers from step to step
        ValueWords values = {};
        float bias[2][2 * halves];
        if (key < keys) {
            load(key_words, problem, key);
            fragment_biases(problem, item.first_row, key, bias);
            load(values, problem, key);
        }
        // Before the update of the caches (I8, I21).
        stage_rows<Index>(
            grid, prefetched.small, scratch, item, unrotated, key_source, value_source, k, v, message
        );
        insert_new_rows(key_words, values, prefetched, scratch, key);
        Turns turns(problem, item.first_row, warp / team * splits + item.split, splits * teams);
        turns.turn = first_tiles.turn;
        turns.found = first_tiles.found;
        turns.looked = first_tiles.looked;
        turns.lowest_counts = first_tiles.lowest_counts;
        problem.q = &scratch.q[0][0] - item.first_row * Q::row;
        State state(problem, item.first_row, scratch.memory);
        while (key < keys) {
            const Weights weights = state.weigh(key_words, bias);
            if (next < keys) {
                load(key_words, problem, next);
                fragment_biases(problem, item.first_row, next, bias);
            }
            state.add(weights, values);
            key = next;
            if (next < keys) {
                load(values, problem, next);
                next = turns.next();
                prefetch_tile(problem, next);
            }
        }
        combine_warps(problem, item.first_row, state, scratch.memory, send, used);
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
