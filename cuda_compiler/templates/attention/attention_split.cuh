#include "attention/attention.cuh"
#include "attention/attention_fragments.cuh"

// Attention of few queries: every warp of a GPU, or team of warps, takes tiles of 16 keys of its own, in turns, so that all have work
// wherever in a cache the attended keys are. `split_keys` is the part of one block, `combine_splits` (in another file)
// puts the parts together.

constexpr int row_blocks = (rows + block_rows - 1) / block_rows;
constexpr int glance = smaller(4, (held_rows - 1) / mask_sharing + 1);  // masks that are on their way together

// Finds the tiles that a warp has to multiply: one look, half a tile a lane, tells it of 16 turns.
struct Turns {
    const Problem &problem;
    int first_row;
    int tile;  // of the first turn
    int step;  // tiles from one turn to the next
    int turn;  // the first one of the last look
    unsigned found = 0;  // two bits a turn, of which the lower one counts
    bool looked = false;
    bool lowest_counts = true;

    __device__ __forceinline__ Turns(const Problem &problem, int first_row, int tile, int step)
        : problem(problem), first_row(first_row), tile(tile), step(step), turn(-WARP / 2) {}

    // The first key of the next tile in which some row attends to a key; `keys` if there is none.
    __device__ __forceinline__ int next() {
        while (found == 0) {
            turn += WARP / 2;
            if ((tile + turn * step) * block_keys >= keys) {
                return keys;
            }
            look();
        }
        const int key = (tile + (turn + __ffs(found) / 2) * step) * block_keys;
        found &= found - 1;
        return key;
    }

    __device__ __forceinline__ void look() {
        const int lane = threadIdx.x % WARP;
        const int key = (tile + (turn + lane / 2) * step) * block_keys + lane % 2 * 8;
        const int last_row = smaller(first_row + block_rows, rows) - 1;
        if constexpr (!Mask::present) {
            const bool attended = key < keys && (!param::causal || key <= Problem::query_of(last_row));
            found = either_half(__ballot_sync(0xffffffffu, attended));
            return;
        }
        bool counts = false;
        bool lowest = false;
        for (int row = first_row / mask_sharing * mask_sharing; row <= last_row; row += glance * mask_sharing) {
            float bias[glance][8];
#pragma unroll
            for (int i = 0; i < glance; i++) {
                // What is looked at twice does no harm.
                problem.biases(smaller(row + i * mask_sharing, last_row), key, bias[i]);
            }
#pragma unroll
            for (int i = 0; i < glance * 8; i++) {
                counts |= !(bias[i / 8][i % 8] <= lowest_bias);
                lowest |= bias[i / 8][i % 8] > -INFINITY_F;
            }
        }
        found = either_half(__ballot_sync(0xffffffffu, counts));
        if constexpr (is_float<Mask::type>::value) {
            const unsigned perhaps = either_half(__ballot_sync(0xffffffffu, lowest));
            if (found != perhaps && !looked) {
                looked = true;
                lowest_counts = !all_attend(problem, first_row, last_row);
            }
            found = lowest_counts ? found | perhaps : found;
        }
    }

    __device__ __forceinline__ static unsigned either_half(unsigned bits) { return (bits | bits >> 1) & 0x55555555u; }
};

// What is added to the scores of 16 rows with 16 keys, as the fragments have them.
__device__ __forceinline__ void fragment_biases(
    const Problem &problem, int first_row, int first_key, float (&bias)[2][2 * halves]
) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
        for (int i = 0; i < 2 * halves; i++) {
            const int row = first_row + lane / 4 + i / 2 * 8;
            bias[tile][i] = problem.bias(row, first_key + 8 * tile + lane % 4 * 2 + i % 2);
        }
    }
}

// Block `split` of `splits` attends to its part of the keys for the 16 rows from `first_row` on, by its first `warps`
// warps, which are all that it has. Ends as `combine_warps` does. Whoever uses `memory` next synchronizes first.
template <int warps, int stages, typename Finish>
__device__ __forceinline__ void split_keys(
    const Problem &problem, int first_row, int split, int splits, SplitMemory<stages> (&memory)[warps], Finish finish
) {
    const int warp = threadIdx.x / WARP;
    KeyTile(&tiles)[stages] = memory[warp].tiles;
    constexpr int teams = warps / team;
    Turns turns(problem, first_row, split * teams + warp / team, splits * teams);
    int key = turns.next();
    if (key < keys) {
        tiles[0].copy(problem, key);
    }
    end_of_copies();
    float bias[2][2 * halves];
    fragment_biases(problem, first_row, key, bias);
    State state(problem, first_row, memory);
    int turn = 0;
    while (key < keys) {
        const int next = turns.next();
        if (stages > 1 && next < keys) {
            tiles[stages - 1 - turn].copy(problem, next);
        }
        end_of_copies();
        wait_for_copies<stages - 1>();
        __syncwarp();
        KeyWords key_words;
        tiles[turn].read(key_words);
        const Weights weights = state.weigh(key_words, bias);
        if (next < keys) {
            fragment_biases(problem, first_row, next, bias);
        }
        ValueWords values;
        tiles[turn].read(values);
        state.add(weights, values);
        __syncwarp();
        if (stages == 1 && next < keys) {
            tiles[0].copy(problem, next);
        }
        key = next;
        turn = stages - 1 - turn;
    }
    combine_warps(problem, first_row, state, memory, finish);
}

// Where a split leaves what it found: sums[batch, KV head, row, split, dimension]; stats has the maximum and the total.
struct LeaveParts {
    float *sums;
    float *stats;
    int split;
    int splits;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float largest, float total, const float (&found)[4]
    ) const {
        const index_t part = ((problem.batch * kv_heads + problem.kv_head) * rows + row) * splits + split;
        if (total != 0.0f) {
            store_floats(sums + part * value_width + dim, found);
        }
        if (dim == 0) {
            store_floats(stats + 2 * part, {largest, total});
        }
    }
};
