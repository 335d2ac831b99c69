// Phase of a resident kernel for attention of few queries: rotary embedding of queries and keys, update of the KV cache,
// attention over splits of the keys, and combination of the splits' tagged partial sums, which is divided among all blocks.
// With `normed`, each head of queries and new keys is RMS-normalized first. With `from_mailbox`, queries and new rows are read
// from the mailbox, and with `to_mailbox` the result goes to the next one as well as to memory. What it means: `rms_norm`,
// `rotate`, `update_cache` and `attend_keys` in `resident/twins.py`.
//
// Invariants, besides those of `ring.cuh` (I1 to I5), `prefetch.cuh` (I6, I7) and `grid.cuh` (I8 to I17)
// I20. A row of the cache is replaced by the blocks whose split has its key, one for each KV head and 16 rows of queries, all
//      with the same values. Nobody else reads its new value in this step, and they do so from shared memory
//      (`insert_new_rows`). So it does not matter whether their tile had the old or the new row.
// I21. Before the barrier a phase with `from_mailbox` reads only the mailbox and what no step of the kernel writes before it; it
//      writes only tagged sums (I17) and rows of its caches, of which the step before uses none (`connect_mailboxes`).
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

// The first two tiles of keys that a computing warp attends to, and the state of `Turns` after these. The tiles are in the L2
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
    alignas(16) Cos::type cosines[Cos::present ? queries : 1][width];
    alignas(16) Sin::type sines[Cos::present ? queries : 1][width];
    alignas(16) float gains[2][normed ? width : 2];  // of queries and of keys, with what is added to them
    int token_keys[larger(tokens, 1)];  // -1 for an index out of range
    FirstTiles first_tiles[warps];
};
static_assert(sizeof(Prefetched) <= PREFETCHED_BYTES, "the memory of what is prefetched is the largest phase's");

struct Scratch {
    alignas(16) Half q[held_rows][Q::row];
    alignas(16) Half new_keys[larger(tokens, 1)][width];
    alignas(16) Half new_values[larger(tokens, 1)][value_width];
    struct {
        Found found;
    } memory[warps];
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES - PREFETCH_QUEUE_BYTES, "the scratch memory is the largest phase's");

// A part of the work: one split of the keys for up to 16 rows of a KV head.
struct Item {
    int split;
    int first_row;
    int kv_head;
    index_t batch;

    __device__ __forceinline__ Item(int number)
        : split(number % splits), first_row(number / splits % row_blocks * block_rows),
          kv_head(number / (splits * row_blocks) % kv_heads), batch(number / (splits * row_blocks * kv_heads)) {}

    __device__ __forceinline__ bool has(int key) const {
        return key >= 0 && key / block_keys % splits == split;
    }
};

constexpr int items = int(K::size(0)) * kv_heads * row_blocks * splits;

// The number of a block's first warps after which no warp has keys that are attended to.
__device__ __forceinline__ int warps_with_keys(const Prefetched &prefetched) {
    int count = 0;
#pragma unroll
    for (int warp = 0; warp < warps; warp++) {
        count = prefetched.first_tiles[warp].key < keys ? warp + 1 : count;
    }
    return count;
}

__device__ __forceinline__ bool has_new_keys(const Prefetched &prefetched, const Item &item) {
    bool found = false;
    for (int token = 0; token < tokens; token++) {
        found |= item.has(prefetched.token_keys[token]);
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

// Stores the cosines and sines of the queries' angles, the gains, and the tokens' places in the cache (I6), by thread `thread`
// of `threads`.
template <typename Cosines, typename Indices>
__device__ __forceinline__ void store_small_operands(
    Prefetched &prefetched, const Item &item, const Cos::type *cos, const Sin::type *sin, const Query_gain::type *query_gain,
    const Key_gain::type *key_gain, const Index::type *index, int thread, int threads
) {
    if constexpr (normed) {
#pragma unroll 4
        for (int dim = thread; dim < width; dim += threads) {
            prefetched.gains[0][dim] =
                Query_gain::present ? to_float(query_gain[dim * Query_gain::stride(0)]) + gain_offset : 1.0f;
            prefetched.gains[1][dim] = Key_gain::present ? to_float(key_gain[dim * Key_gain::stride(0)]) + gain_offset : 1.0f;
        }
    }
    if constexpr (Indices::present) {
        for (int token = thread; token < tokens; token += threads) {
            const int key = index[token * Indices::stride(0)];
            prefetched.token_keys[token] = unsigned(key) < unsigned(keys) ? key : -1;
        }
    }
    if constexpr (Cosines::present) {
#pragma unroll 4
        for (int at = thread; at < queries * width; at += threads) {
            const int query = at / width;
            const int dim = at % width;
            prefetched.cosines[query][dim] = cos[item.batch * Cos::stride(0) + query * Cos::stride(2) + dim * Cos::stride(3)];
            prefetched.sines[query][dim] = sin[item.batch * Sin::stride(0) + query * Sin::stride(2) + dim * Sin::stride(3)];
        }
    }
}

// Finds each computing warp's first tiles by the mask and prefetches them into the L2 cache; the step itself can still change
// a new row of them (I6). By warp `part` of `parts`.
__device__ __forceinline__ void prefetch_item(
    Prefetched &prefetched, const Item &item, const K::type *k, const V::type *v, const Mask::type *mask, const Cos::type *cos,
    const Sin::type *sin, const Query_gain::type *query_gain, const Key_gain::type *key_gain, const Index::type *index, int part,
    int parts
) {
    const Problem problem(nullptr, k, v, mask, item.batch, item.kv_head);
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int warp = part; warp < warps; warp += parts) {
        Turns turns(problem, item.first_row, warp * splits + item.split, splits * warps);
        const int key = turns.next();
        const int next = turns.next();
        prefetch_tile(problem, key);
        prefetch_tile(problem, next);
        if (lane == 0) {
            prefetched.first_tiles[warp] = FirstTiles{key, next, turns.turn, turns.found, turns.looked, turns.lowest_counts};
        }
    }
    store_small_operands<Cos, Index>(
        prefetched, item, cos, sin, query_gain, key_gain, index, part * WARP + lane, parts * WARP
    );
}

// Neighbouring lanes that divide so many parts among themselves: a power of two.
__device__ __forceinline__ constexpr int lanes_for(int parts) {
    int lanes = 1;
    while (lanes < parts && lanes < WARP) {
        lanes *= 2;
    }
    return lanes;
}

constexpr int pack = smaller(
    smaller(width % 16 == 0 && (tokens == 0 || value_width % 16 == 0) ? 8 : 4, Unrotated::vector),
    smaller(Key_source::vector, Value_source::vector)
);

static_assert(pack == 8 || !from_mailbox, "messages are read eight at a time");

constexpr int row_pairs = larger(width, value_width) / 2 / pack;

// Two packs of a row, half the row apart, which the rotary embedding combines: where they come from and where they go.
struct Pair {
    static constexpr int of_row = normed ? lanes_for(row_pairs) : row_pairs;  // normalized by lanes of one warp
    static constexpr int count = (held_rows + 2 * tokens) * of_row;

    const Half *source = nullptr;  // null where the block needs no such pair
    Half *staged;  // in shared memory
    Half *cached = nullptr;  // in the cache, for a new row
    int half;  // elements from a pack to its partner
    int dim;
    int angle = -1;  // the query by whose angles it is rotated, -1 for values
    bool is_key = false;
    Pack<Half, pack> low, high;

    // The `number`-th pair of the queries, the new keys and the new values of a block.
    template <typename Indices, typename NewKey, typename NewValue, typename Key, typename Value>
    __device__ __forceinline__ void find(
        int number, const Prefetched &prefetched, Scratch &scratch, const Item &item, const Half *q, const NewKey *key_source,
        const NewValue *value_source, Key *k, Value *v
    ) {
        const int held = number / of_row;
        dim = number % of_row * pack;
        if (held < held_rows) {
            half = width / 2;
            const int row = item.first_row + held;
            const int head = item.kv_head * sharing + row % sharing;
            if (row < rows && dim < half) {
                source = q + item.batch * Unrotated::stride(0) + head * Unrotated::stride(1)
                    + row / sharing * Unrotated::stride(2) + dim;
                staged = &scratch.q[held][dim];
                angle = row / sharing;
            }
            return;
        }
        if constexpr (Indices::present) {
            const int token = (held - held_rows) % tokens;
            const int key = number < count ? prefetched.token_keys[token] : -1;
            if (!item.has(key)) {
                return;
            }
            if (held < held_rows + tokens) {
                half = width / 2;
                if (dim < half) {
                    source = key_source + item.batch * Key_source::stride(0) + item.kv_head * Key_source::stride(1)
                        + token * Key_source::stride(2) + dim;
                    staged = &scratch.new_keys[token][dim];
                    cached = k + item.batch * K::stride(0) + item.kv_head * K::stride(1) + key * K::stride(2) + dim;
                    angle = token;
                    is_key = true;
                }
            } else {
                half = value_width / 2;
                if (dim < half) {
                    source = value_source + item.batch * Value_source::stride(0)
                        + item.kv_head * Value_source::stride(1) + token * Value_source::stride(2) + dim;
                    staged = &scratch.new_values[token][dim];
                    cached = v + item.batch * V::stride(0) + item.kv_head * V::stride(1) + key * V::stride(2) + dim;
                }
            }
        }
    }

    // Reads the pair; returns whether it has been written. Messages have the order of `message`, the result of the step before.
    template <typename Result>
    __device__ __forceinline__ bool load(const Grid &grid, const Result *message) {
        if (source == nullptr) {
            return true;
        }
        if constexpr (from_mailbox) {
            const int index = source - message;
            const bool first = grid.receive(low, index);
            return grid.receive(high, index + half) && first;
        } else {
            low = load_pack<pack>(source);
            high = load_pack<pack>(source + half);
            return true;
        }
    }

    // RMS-normalizes the pair if it is of a query or a key. By whole warps, whose lanes exchange the sums of squares.
    __device__ __forceinline__ void normalize(const Prefetched &prefetched) {
        static_assert(!normed || (of_row >= row_pairs && WARP % of_row == 0), "a row's pairs are in lanes of one warp");
        const bool wanted = source != nullptr && angle >= 0;
        float first[pack], second[pack];
        float squares = 0.0f;
        if (wanted) {
            to_floats(first, low);
            to_floats(second, high);
#pragma unroll
            for (int i = 0; i < pack; i++) {
                squares = fmaf(first[i], first[i], fmaf(second[i], second[i], squares));
            }
        }
#pragma unroll
        for (int step = of_row / 2; step > 0; step /= 2) {
            squares += __shfl_xor_sync(0xffffffffu, squares, step);
        }
        if (wanted) {
            const float scale = rsqrtf(squares / float(width) + norm_eps);
            const float *gains = prefetched.gains[is_key];
#pragma unroll
            for (int i = 0; i < pack; i++) {
                low.item[i] = from<Half>(first[i] * scale * gains[dim + i]);
                high.item[i] = from<Half>(second[i] * scale * gains[dim + half + i]);
            }
        }
    }

    // Rotates the pair, and stores it in shared memory and in the cache.
    __device__ __forceinline__ void store(const Prefetched &prefetched) {
        if (source == nullptr) {
            return;
        }
        if (Cos::present && angle >= 0) {
            float first[pack], second[pack], cosines[2][pack], sines[2][pack];
            to_floats(first, low);
            to_floats(second, high);
            load_floats(cosines[0], &prefetched.cosines[angle][dim]);
            load_floats(cosines[1], &prefetched.cosines[angle][dim + half]);
            load_floats(sines[0], &prefetched.sines[angle][dim]);
            load_floats(sines[1], &prefetched.sines[angle][dim + half]);
#pragma unroll
            for (int i = 0; i < pack; i++) {
                low.item[i] = from<Half>(first[i] * cosines[0][i] - second[i] * sines[0][i]);
                high.item[i] = from<Half>(second[i] * cosines[1][i] + first[i] * sines[1][i]);
            }
        }
        store_pack(staged, low);
        store_pack(staged + half, high);
        if (cached != nullptr) {
            store_pack(cached, low);
            store_pack(cached + half, high);
        }
    }
};

// Replaces the new rows of a tile that was loaded before they were there, or while they were written (I20).
__device__ __forceinline__ void insert_new_rows(
    KeyWords &key_words, ValueWords &values, const Prefetched &prefetched, const Scratch &scratch, int first
) {
#pragma unroll 1
    for (int token = 0; token < tokens; token++) {
        const int place = prefetched.token_keys[token] - first;
        if (place < 0 || place >= block_keys) {
            continue;
        }
        key_words.each([&](Words &words, int key, int piece) {
            if (key == place && piece * 8 < width) {
                words = *reinterpret_cast<const Words *>(&scratch.new_keys[token][piece * 8]);
            }
        });
        values.each([&](Words &words, int key, int piece) {
            if (key == place && piece * 8 < value_width) {
                words = *reinterpret_cast<const Words *>(&scratch.new_values[token][piece * 8]);
            }
        });
    }
}

// The tagged sums: a split's maximum and total for a row, [row of a problem, split, 2], and after all of these its weighted sums
// of values, [row of a problem, split, dimension].
constexpr int all_partials = int(K::size(0)) * kv_heads * rows * splits;

__device__ __forceinline__ unsigned long long *stats_of(int *partials, int part) {
    return reinterpret_cast<unsigned long long *>(partials) + 2 * part;
}

__device__ __forceinline__ unsigned long long *sums_of(int *partials, int part, int dim) {
    return reinterpret_cast<unsigned long long *>(partials) + 2 * all_partials + part * value_width + dim;
}

struct SendPartials {
    const Grid &grid;
    int *partials;
    int split;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float largest, float total, const float (&found)[4]
    ) const {
        const int part = (int(problem.batch * kv_heads + problem.kv_head) * rows + row) * splits + split;
        if (total != 0.0f) {
            grid.send_tagged(sums_of(partials, part, dim), found[0], found[1]);
            grid.send_tagged(sums_of(partials, part, dim + 2), found[2], found[3]);
        }
        if (dim == 0) {
            grid.send_tagged(stats_of(partials, part), largest, total);
        }
    }
};

// This block's share of the results, four dimensions at a time: neighbouring lanes read the splits' tagged sums for them (I16)
// and combine these with each other.
__device__ __forceinline__ void combine_partials(const Grid &grid, int *partials, Out::type *out) {
    constexpr int lanes = lanes_for(splits);
    constexpr int own = (splits + lanes - 1) / lanes;
    constexpr int pieces = value_width / 4;
    constexpr int results = all_partials / splits * pieces;
    const int lane = threadIdx.x % lanes;
    for (int first = 0; first < results; first += THREADS / lanes * gridDim.x) {
        const int number = first + threadIdx.x / lanes * gridDim.x + blockIdx.x;
        const int row = number / pieces;
        const int dim = number % pieces * 4;
        float largest[own], total[own], sums[own][4];
        bool complete;
        do {
            complete = true;
#pragma unroll
            for (int i = 0; i < own; i++) {
                const int split = i * lanes + lane;
                largest[i] = -FLOAT_MAX;
                total[i] = 0.0f;
                if (number >= results || split >= splits) {
                    continue;
                }
                const int part = row * splits + split;
                const bool known = grid.receive_tagged(stats_of(partials, part), largest[i], total[i]);
                const bool low = grid.receive_tagged(sums_of(partials, part, dim), sums[i][0], sums[i][1]);
                const bool high = grid.receive_tagged(sums_of(partials, part, dim + 2), sums[i][2], sums[i][3]);
                // A split without keys sends no sums.
                complete &= known && (total[i] == 0.0f || (low && high));
            }
        } while (!complete);
        float greatest = -FLOAT_MAX;
#pragma unroll
        for (int i = 0; i < own; i++) {
            greatest = fmaxf(greatest, largest[i]);
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
        }
        float whole = 0.0f;
        float result[4] = {};
#pragma unroll
        for (int i = 0; i < own; i++) {
            const float weight = total[i] == 0.0f ? 0.0f : expf(largest[i] - greatest);
            whole = fmaf(weight, total[i], whole);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                result[j] = total[i] == 0.0f ? result[j] : fmaf(weight, sums[i][j], result[j]);
            }
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            whole += __shfl_xor_sync(0xffffffffu, whole, step);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                result[j] += __shfl_xor_sync(0xffffffffu, result[j], step);
            }
        }
        if (lane != 0 || number >= results) {
            continue;
        }
        const int kv_head = row / rows % kv_heads;
        const index_t place = row / (rows * kv_heads) * Out::stride(0)
            + (kv_head * sharing + row % rows % sharing) * Out::stride(1) + row % rows / sharing * Out::stride(2);
        Out::type values[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // A query that attends to no key at all gets zeros, as in PyTorch.
            values[j] = from<Out::type>(whole == 0.0f ? 0.0f : result[j] / whole);
        }
        if constexpr (to_mailbox) {
            grid.send(place + dim, values);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out[place + (dim + j) * Out::stride(3)] = values[j];
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
    if constexpr (!from_mailbox) {
        grid.wait();  // I11, I17
    }
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
        const int used = warps_with_keys(prefetched);
        if (used == 0 && !has_new_keys(prefetched, item)) {
            const int row = item.first_row + threadIdx.x;
            if (threadIdx.x < held_rows && row < rows) {
                send(problem, row, 0, -FLOAT_MAX, 0.0f, {});
            }
            continue;
        }
        idle = false;
        // All loads from memory start together.
        const FirstTiles &first_tiles = prefetched.first_tiles[warp];
        int key = first_tiles.key;
        int next = first_tiles.next;
        KeyWords key_words;
        ValueWords values;
        float bias[2][2 * halves];
        if (key < keys) {
            load(key_words, problem, key);
            fragment_biases(problem, item.first_row, key, bias);
            load(values, problem, key);
        }
        Pair pairs[(Pair::count + THREADS - 1) / THREADS];
#pragma unroll
        for (int i = 0; i < int(sizeof(pairs) / sizeof(Pair)); i++) {
            pairs[i].find<Index>(
                i * THREADS + threadIdx.x, prefetched, scratch, item, unrotated, key_source, value_source, k, v
            );
        }
        bool complete;  // before the barrier and the update of the caches (I8, I21)
        do {
            complete = true;
#pragma unroll
            for (Pair &pair : pairs) {
                complete &= pair.load(grid, message);
            }
        } while (!complete);
#pragma unroll
        for (Pair &pair : pairs) {
            if constexpr (normed) {
                pair.normalize(prefetched);
            }
            pair.store(prefetched);
        }
        sync_block();
        insert_new_rows(key_words, values, prefetched, scratch, key);
        Turns turns(problem, item.first_row, warp * splits + item.split, splits * warps);
        turns.turn = first_tiles.turn;
        turns.found = first_tiles.found;
        turns.looked = first_tiles.looked;
        turns.lowest_counts = first_tiles.lowest_counts;
        problem.q = &scratch.q[0][0] - item.first_row * Q::row;
        State state;
        state.start(problem, item.first_row);
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
    if constexpr (from_mailbox) {
        grid.wait();  // I11
    }
    if (idle) {
        // Polling (I8) slows down the blocks that still have keys to attend to.
        __nanosleep(backoff_ns);
    }
    combine_partials(grid, partials, out);
}
