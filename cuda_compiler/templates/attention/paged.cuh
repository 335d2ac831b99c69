// Attention to keys and values that lie in blocks of a pool: `sharing` heads of one KV head with the queries of some tokens
// side by side, all of one sequence, whose keys and values are read once for all.
//
// Tokens n, n + 1, … are handled together if they belong to one sequence and their positions follow each other, but never
// across a multiple of `tile_tokens` positions. So each token can tell by itself whether it is the first of its tile,
// and a tile has at most `tile_tokens` tokens whatever the operands hold.
#where window
//
// Keys are counted from the block of the pool where the window of a tile's first token begins: those before do not exist here,
// and the `hidden` ones of that block, before the window, are not read.
#end

constexpr int tokens = Q::size(0);
constexpr int width = Q::size(2);
constexpr int value_width = V::size(2);
constexpr int head_groups = int(Q::size(1)) / sharing;
constexpr int groups_per_kv_head = head_groups / int(K::size(1));
constexpr int rows = tile_tokens * sharing;
constexpr int block_size = param::block_size;
constexpr int blocks = int(K::size(0)) / block_size;
constexpr int context = int(Tables::size(1)) * block_size;

__device__ __forceinline__ int clamped(int value, int count) { return smaller(larger(value, 0), count - 1); }

// The tokens of one tile and where their keys and values are.
struct Problem {
    const Q::type *q;
    const K::type *k;
    const V::type *v;
    const Tables::type *table;
    int head_group;
    int token;  // the first one
    int count;  // of tokens; 0 if another block has this token in its tile
    int position;  // of the first token, as given
    int keys;  // that the last token attends to
#where window
    int skipped;  // keys of the blocks before
    int hidden;
#end

    __device__ __forceinline__ Problem(
        const Q::type *q_start, const K::type *k_start, const V::type *v_start, const Tables::type *tables,
        const Sequences::type *sequences, const Positions::type *positions, int token, int head_group
    ) : q(q_start + token * Q::stride(0) + head_group * sharing * Q::stride(1)),
        k(k_start + head_group / groups_per_kv_head * K::stride(1)),
        v(v_start + head_group / groups_per_kv_head * V::stride(1)), head_group(head_group), token(token), count(0) {
        const int sequence = to_int(sequences[token * Sequences::stride(0)]);
        position = to_int(positions[token * Positions::stride(0)]);
        table = tables + clamped(sequence, Tables::size(0)) * Tables::stride(0);
        if (!continues(sequences, positions, token)) {
            count = 1;
            while (count < tile_tokens && token + count < tokens && continues(sequences, positions, token + count)) {
                count++;
            }
        }
#where window
        skipped = larger(clamped(position, context) + 1 - int(param::window), 0) / block_size * block_size;
        keys = clamped(position + count - 1, context) + 1 - skipped;
        hidden = larger(clamped(position, context) + 1 - skipped - int(param::window), 0);
#elsewhere
        keys = clamped(position + count - 1, context) + 1;
#end
    }

    // Whether a token belongs to the tile of the one before it.
    __device__ __forceinline__ static bool continues(
        const Sequences::type *sequences, const Positions::type *positions, int token
    ) {
        const int position = to_int(positions[token * Positions::stride(0)]);
        return token > 0 && position % tile_tokens != 0
            && sequences[token * Sequences::stride(0)] == sequences[(token - 1) * Sequences::stride(0)]
            && position == to_int(positions[(token - 1) * Positions::stride(0)]) + 1;
    }

    __device__ __forceinline__ const Q::type *q_row(int row) const {
        const int query = smaller(row / sharing, count - 1);
        return q + row % sharing * Q::stride(1) + query * Q::stride(0);
    }

    // The row of the pool at which a key's block begins.
    __device__ __forceinline__ int block_row(int key) const {
#where window
        key += skipped;
#end
        return clamped(to_int(table[smaller(key, context - 1) / block_size * Tables::stride(1)]), blocks) * block_size;
    }

    __device__ __forceinline__ bool has(int key) const { return key < keys; }

    __device__ __forceinline__ const K::type *k_row(int key) const {
        return k + (block_row(key) + key % block_size) * K::stride(0);
    }

    __device__ __forceinline__ const V::type *v_row(int key) const {
        return v + (block_row(key) + key % block_size) * V::stride(0);
    }

    // The number of keys that a row attends to; 0 for rows that there are not.
#where window
    // Those before its window count too; `first_seen` says where that begins.
#end
    __device__ __forceinline__ int reach(int row) const {
        const int query = row / sharing;
#where window
        return query < count ? clamped(position + query, context) + 1 - skipped : 0;
#elsewhere
        return query < count ? clamped(position + query, context) + 1 : 0;
#end
    }
#where window

    __device__ __forceinline__ int first_seen(int row) const { return reach(row) - int(param::window); }

    // Whether some row attends to a key.
    __device__ __forceinline__ bool sees(int key) const { return key >= hidden && key < keys; }
#end
};
#where has_sinks

#include "attention/sinks.cuh"
#end

// Which tokens are the first of their tiles, known to all lanes of a warp.
struct Tiles {
    static constexpr int words = (tokens + WARP - 1) / WARP;
    unsigned starts[words];  // a bit for each token

    __device__ __forceinline__ Tiles(const Sequences::type *sequences, const Positions::type *positions) {
        bool first[words];
#pragma unroll
        for (int word = 0; word < words; word++) {
            const int token = word * WARP + threadIdx.x % WARP;
            first[word] = token < tokens && !Problem::continues(sequences, positions, smaller(token, tokens - 1));
        }
#pragma unroll
        for (int word = 0; word < words; word++) {
            starts[word] = __ballot_sync(0xffffffffu, first[word]);
        }
    }

    // The first token of the tile with a number, counted from 0; `tokens` if there are fewer.
    __device__ __forceinline__ int token(int number) const {
        int found = tokens;
#pragma unroll
        for (int word = 0; word < words; word++) {
            const int count = __popc(starts[word]);
            if (number >= 0 && number < count) {
                unsigned rest = starts[word];
                for (; number > 0; number--) {
                    rest &= rest - 1;  // without the lowest
                }
                found = word * WARP + __ffs(rest) - 1;
                number = -1;
            }
            number -= count;
        }
        return found;
    }
};
