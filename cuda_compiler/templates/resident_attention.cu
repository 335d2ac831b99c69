// Phases of a resident kernel for attention of few queries: first the rotary embedding of queries and keys, the new rows
// of the cache and each block's part of the keys; then the sum of the parts.

#kernel attend_keys
// The queries as a block keeps them in shared memory: a KV head's rows one after the other.
struct Q {
    using type = Unrotated::type;
    static constexpr int row = int(Unrotated::size(3)) + 8;  // so that rows begin in different banks
    __device__ static constexpr index_t size(int dim) { return Unrotated::size(dim); }
    __device__ static constexpr index_t stride(int dim) {
        return dim == 0 ? 0 : dim == 1 ? row : dim == 2 ? row * (Unrotated::size(1) / K::size(1)) : 1;
    }
};

#include "attention_split.cuh"

// How far a warp has come before the barrier: its first tile is on its way.
struct Begun {
    int key;
    int turn;
    unsigned found;
    bool looked;
    bool lowest_counts;
};

struct Scratch {
    SplitMemory<warps, 1> memory;
    alignas(16) Q::type q[block_rows][Q::row];
    float bias[warps][WARP][2][2 * halves];
    Begun begun[warps];
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "the scratch memory is the largest phase's");

// What part of the work is a block's.
struct Item {
    int split;
    int first_row;
    int kv_head;
    index_t batch;

    __device__ __forceinline__ Item(int number)
        : split(number % splits), first_row(number / splits % row_blocks * block_rows),
          kv_head(number / (splits * row_blocks) % kv_heads), batch(number / (splits * row_blocks * kv_heads)) {}
};

constexpr int items = int(K::size(0)) * kv_heads * row_blocks * splits;

// Element `dim` of a row of queries or keys, rotated if they are to be, as it is stored.
template <typename X>
__device__ __forceinline__ Half rotated(
    const Half *x, int dim, const Cos::type *cos, const Sin::type *sin, index_t batch, int query
) {
    if constexpr (Cos::present) {
        constexpr int half = width / 2;
        const float own = to_float(x[dim * X::stride(3)]);
        const float other = to_float(x[(dim < half ? dim + half : dim - half) * X::stride(3)]);
        const float cosine = to_float(cos[batch * Cos::stride(0) + query * Cos::stride(2) + dim * Cos::stride(3)]);
        const float sine = to_float(sin[batch * Sin::stride(0) + query * Sin::stride(2) + dim * Sin::stride(3)]);
        return from<Half>(dim < half ? own * cosine - other * sine : own * cosine + other * sine);
    } else {
        return x[dim * X::stride(3)];
    }
}

// Writes those of a KV head's new rows that this split reads, to the cache and to a tile that was copied without them.
// Blocks with the same keys write the same.
template <typename I, typename Key, typename Value>
__device__ __forceinline__ void renew_rows(
    Key *k, Value *v, Scratch &scratch, const Item &item, const typename I::type *index,
    const Key_source::type *keys_from, const Value_source::type *values_from, const Cos::type *cos, const Sin::type *sin
) {
    if constexpr (I::present) {
        for (int token = 0; token < int(Key_source::size(2)); token++) {
            const unsigned key = index[token * I::stride(0)];
            const int owner = int(key) / block_keys % warps;
            if (key >= unsigned(keys) || int(key) / (block_keys * warps) % splits != item.split) {
                continue;
            }
            const int place = int(key) - scratch.begun[owner].key;
            const bool copied = place >= 0 && place < block_keys;
            KeyTile &tile = scratch.memory.tiles[owner][0];
            const Key_source::type *key_row = keys_from + item.batch * Key_source::stride(0)
                + item.kv_head * Key_source::stride(1) + token * Key_source::stride(2);
            for (int dim = threadIdx.x; dim < width; dim += THREADS) {
                const Half value = rotated<Key_source>(key_row, dim, cos, sin, item.batch, token);
                k[key * K::stride(2) + dim] = value;
                if (copied) {
                    tile.k[KeyTile::k_place(place, dim / 8) + dim % 8] = value;
                }
            }
            const Value_source::type *value_row = values_from + item.batch * Value_source::stride(0)
                + item.kv_head * Value_source::stride(1) + token * Value_source::stride(2);
            for (int dim = threadIdx.x; dim < value_width; dim += THREADS) {
                const Half value = value_row[dim * Value_source::stride(3)];
                v[key * V::stride(2) + dim] = value;
                if (copied) {
                    tile.v[KeyTile::v_place(place, dim / 8) + dim % 8] = value;
                }
            }
        }
    }
}

// Looks at the mask and begins to copy the first tile of each warp, of which only a new row can still change.
__device__ __forceinline__ void begin(Scratch &scratch, const Problem &problem, const Item &item) {
    const int warp = threadIdx.x / WARP;
    Turns turns(problem, item.first_row, item.split * warps + warp, splits * warps);
    const int key = turns.next();
    if (key < keys) {
        scratch.memory.tiles[warp][0].copy(problem, key);
    }
    end_of_copies();
    fragment_biases(problem, item.first_row, key, scratch.bias[warp][threadIdx.x % WARP]);
    if (threadIdx.x % WARP == 0) {
        scratch.begun[warp] = Begun{key, turns.turn, turns.found, turns.looked, turns.lowest_counts};
    }
}

PHASE(look_ahead) {
    if (blockIdx.x < items) {
        const Item item(blockIdx.x);
        begin(*reinterpret_cast<Scratch *>(shared), Problem(nullptr, k, v, mask, item.batch, item.kv_head), item);
    }
}

PHASE(attend_keys) {
    Scratch &scratch = *reinterpret_cast<Scratch *>(shared);
    const int warp = threadIdx.x / WARP;
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        const Item item(number);
        Problem problem(nullptr, k, v, mask, item.batch, item.kv_head);
        if (number >= gridDim.x) {
            begin(scratch, problem, item);
        }
        wait_for_copies<0>();
        __syncthreads();
        for (int i = threadIdx.x; i < held_rows * width; i += THREADS) {
            const int row = item.first_row + i / width;
            const int dim = i % width;
            if (row < rows) {
                const int query = row / sharing;
                const Half *source = unrotated + item.batch * Unrotated::stride(0)
                    + (item.kv_head * sharing + row % sharing) * Unrotated::stride(1) + query * Unrotated::stride(2);
                scratch.q[i / width][dim] = rotated<Unrotated>(source, dim, cos, sin, item.batch, query);
            }
        }
        renew_rows<Index>(
            k + item.batch * K::stride(0) + item.kv_head * K::stride(1),
            v + item.batch * V::stride(0) + item.kv_head * V::stride(1), scratch, item, index, key_source,
            value_source, cos, sin
        );
        __syncthreads();
        problem.q = &scratch.q[0][0] - item.first_row * Q::row;
        Turns turns(problem, item.first_row, item.split * warps + warp, splits * warps);
        const Begun &begun = scratch.begun[warp];
        turns.turn = begun.turn;
        turns.found = begun.found;
        turns.looked = begun.looked;
        turns.lowest_counts = begun.lowest_counts;
        float bias[2][2 * halves];
#pragma unroll
        for (int i = 0; i < 4 * halves; i++) {
            bias[i / (2 * halves)][i % (2 * halves)] =
                scratch.bias[warp][threadIdx.x % WARP][i / (2 * halves)][i % (2 * halves)];
        }
        continue_keys(
            problem, item.first_row, turns, begun.key, bias, scratch.memory,
            LeaveParts{sums, stats, item.split, splits}
        );
        __syncthreads();
    }
}

#kernel add_up
#include "attention_combine.cuh"

PHASE(look_ahead) {}

struct Write {
    Out::type *out;

    __device__ __forceinline__ void operator()(int dim, float value) const {
        out[dim * Out::stride(3)] = from<Out::type>(value);
    }
};

PHASE(add_up) {
    constexpr int width = Sums::size(4);
    constexpr int rows = Sums::size(2);
    constexpr int kv_heads = Sums::size(1);
    constexpr int sharing = Out::size(1) / kv_heads;
    constexpr int pieces = (width + combine_width - 1) / combine_width;
    using Memory = CombineMemory<THREADS, splits>;
    static_assert(sizeof(Memory) <= SCRATCH_BYTES, "the scratch memory is the largest phase's");
    Memory &memory = *reinterpret_cast<Memory *>(shared);
    for (int item = blockIdx.x; item < int(Sums::size(0)) * kv_heads * rows * pieces; item += gridDim.x) {
        const int row = item / pieces % rows;
        const int kv_head = item / (pieces * rows) % kv_heads;
        const index_t batch = item / (pieces * rows * kv_heads);
        const index_t first = index_t(item / pieces) * splits;
        const index_t target = batch * Out::stride(0) + (kv_head * sharing + row % sharing) * Out::stride(1)
            + row / sharing * Out::stride(2);
        combine_splits<THREADS, splits, width>(
            sums + first * width, stats + 2 * first, item % pieces * combine_width, memory, Write{out + target}
        );
        __syncthreads();
    }
}
