// What attention phases of a resident kernel do with queries, new keys and new values before they attend: read them from memory or
// from the mailbox, RMS-normalize and rotate queries and keys, keep them in shared memory, and replace rows of the KV cache.
//
// Expects `rows`, `sharing`, `tokens` (whose keys and values are new), `angle_rows` (angles that are kept), `cache_rows`, and
// an `Item`:
//
// struct Item {
//     int first_row;                  // of the problem's rows of queries
//     index_t batch;                  // of the angles
//     int angle(int row);             // the angles of a row
//     index_t query_place(int row);
//     index_t new_place<Source>(int token);
//     index_t cache_place<Cache>(int row);
//     bool takes(int row);            // whether the block needs what replaces a row of the cache
//     bool stores(int token);         // whether the block replaces a token's row, where it takes it
// };

// The small operands of a step, small.
struct SmallOperands {
    alignas(16) Cos::type cosines[Cos::present ? angle_rows : 1][width];
    alignas(16) Sin::type sines[Cos::present ? angle_rows : 1][width];
    alignas(16) float gains[2][normed ? width : 2];  // of queries and of keys, with what is added to them
    int token_rows[larger(tokens, 1)];  // of the cache; -1 for an index out of range
};

struct Scratch {
    alignas(16) Half q[held_rows][Q::row];
    alignas(16) Half new_keys[larger(tokens, 1)][width];
    alignas(16) Half new_values[larger(tokens, 1)][value_width];
    struct : TeamScores<team> {
        Found found;
    } memory[warps];
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES - PREFETCH_QUEUE_BYTES, "the scratch memory is the largest phase's");

// Stores the cosines and sines of the queries' angles, the gains, and the tokens' places in the cache (I6), by thread `thread`
// of `threads`.
template <typename Cosines, typename Indices>
__device__ __forceinline__ void store_small_operands(
    SmallOperands &small, const Item &item, const Cos::type *cos, const Sin::type *sin, const Query_gain::type *query_gain,
    const Key_gain::type *key_gain, const Index::type *index, int thread, int threads
) {
    if constexpr (normed) {
#pragma unroll 4
        for (int dim = thread; dim < width; dim += threads) {
            small.gains[0][dim] =
                Query_gain::present ? to_float(query_gain[dim * Query_gain::stride(0)]) + gain_offset : 1.0f;
            small.gains[1][dim] = Key_gain::present ? to_float(key_gain[dim * Key_gain::stride(0)]) + gain_offset : 1.0f;
        }
    }
    if constexpr (Indices::present) {
        for (int token = thread; token < tokens; token += threads) {
            const int row = index[token * Indices::stride(0)];
            small.token_rows[token] = unsigned(row) < unsigned(cache_rows) ? row : -1;
        }
    }
    if constexpr (Cosines::present) {
#pragma unroll 4
        for (int at = thread; at < angle_rows * width; at += threads) {
            const int angle = at / width;
            const int dim = at % width;
            small.cosines[angle][dim] = cos[item.batch * Cos::stride(0) + angle * Cos::stride(2) + dim * Cos::stride(3)];
            small.sines[angle][dim] = sin[item.batch * Sin::stride(0) + angle * Sin::stride(2) + dim * Sin::stride(3)];
        }
    }
}

constexpr int teams = warps / team;

// Neighbouring lanes that divide so many parts among themselves: a power of two.
__device__ __forceinline__ constexpr int lanes_for(int parts) { return power_of_2_from(smaller(parts, WARP)); }

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

    // Nothing is left open, or it would keep its registers from step to step.
    const Half *source = nullptr;  // null where the block needs no such pair
    Half *staged = nullptr;  // in shared memory
    Half *cached = nullptr;  // in the cache, for a new row
    int half = 0;  // elements from a pack to its partner
    int dim = 0;
    int angle = -1;  // the number of its angles, -1 for values
    bool is_key = false;
    Pack<Half, pack> low = {}, high = {};

    // The `number`-th pair of the queries, the new keys and the new values of a block.
    template <typename Indices, typename NewKey, typename NewValue, typename Key, typename Value>
    __device__ __forceinline__ void find(
        int number, const SmallOperands &small, Scratch &scratch, const Item &item, const Half *q, const NewKey *key_source,
        const NewValue *value_source, Key *k, Value *v
    ) {
        const int held = number / of_row;
        dim = number % of_row * pack;
        if (held < held_rows) {
            half = width / 2;
            const int row = item.first_row + held;
            if (row < rows && dim < half) {
                source = q + item.query_place(row) + dim;
                staged = &scratch.q[held][dim];
                angle = item.angle(row);
            }
            return;
        }
        if constexpr (Indices::present) {
            const int token = (held - held_rows) % tokens;
            const int row = number < count ? small.token_rows[token] : -1;
            if (!item.takes(row)) {
                return;
            }
            if (held < held_rows + tokens) {
                half = width / 2;
                if (dim < half) {
                    source = key_source + item.template new_place<Key_source>(token) + dim;
                    staged = &scratch.new_keys[token][dim];
                    cached = item.stores(token) ? k + item.template cache_place<K>(row) + dim : nullptr;
                    angle = token;
                    is_key = true;
                }
            } else {
                half = value_width / 2;
                if (dim < half) {
                    source = value_source + item.template new_place<Value_source>(token) + dim;
                    staged = &scratch.new_values[token][dim];
                    cached = item.stores(token) ? v + item.template cache_place<V>(row) + dim : nullptr;
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
    __device__ __forceinline__ void normalize(const SmallOperands &small) {
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
            const float *gains = small.gains[is_key];
#pragma unroll
            for (int i = 0; i < pack; i++) {
                low.item[i] = from<Half>(first[i] * scale * gains[dim + i]);
                high.item[i] = from<Half>(second[i] * scale * gains[dim + half + i]);
            }
        }
    }

    // Rotates the pair, and stores it in shared memory and in the cache.
    __device__ __forceinline__ void store(const SmallOperands &small) {
        if (source == nullptr) {
            return;
        }
        if (Cos::present && angle >= 0) {
            float first[pack], second[pack], cosines[2][pack], sines[2][pack];
            to_floats(first, low);
            to_floats(second, high);
            load_floats(cosines[0], &small.cosines[angle][dim]);
            load_floats(cosines[1], &small.cosines[angle][dim + half]);
            load_floats(sines[0], &small.sines[angle][dim]);
            load_floats(sines[1], &small.sines[angle][dim + half]);
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

// Finds, reads, normalizes, rotates and stores the pairs of a block's queries and new rows, by all of its threads. Ends with a
// barrier.
template <typename Indices, typename NewKey, typename NewValue, typename Key, typename Value, typename Result>
__device__ __forceinline__ void stage_rows(
    const Grid &grid, const SmallOperands &small, Scratch &scratch, const Item &item, const Half *q, const NewKey *key_source,
    const NewValue *value_source, Key *k, Value *v, const Result *message
) {
    Pair pairs[(Pair::count + THREADS - 1) / THREADS];
#pragma unroll
    for (int i = 0; i < int(sizeof(pairs) / sizeof(Pair)); i++) {
        pairs[i].find<Indices>(i * THREADS + threadIdx.x, small, scratch, item, q, key_source, value_source, k, v);
    }
    bool complete;
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
            pair.normalize(small);
        }
        pair.store(small);
    }
    sync_block();
}

// Replaces a row of a tile that was loaded before it was there, or while it was written (I20).
__device__ __forceinline__ void insert_new_row(
    KeyWords &key_words, ValueWords &values, const Scratch &scratch, int token, int place
) {
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
