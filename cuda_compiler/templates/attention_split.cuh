#include "attention_products.cuh"

// Attention of few queries: every warp of a GPU takes tiles of 16 keys of its own, in turns, so that all have work
// wherever in a cache the attended keys are. `split_keys` is the part of one block, `combine_splits` (in another file)
// puts the parts together.
//
// A product does not mind in which order its terms come. So a lane's operands are 16 bytes side by side in memory: of
// queries and keys dimensions 8p to 8p + 7 of each 32 (`chunks`), of values dimensions 8g to 8g + 7 of each 64 (`spans`).

constexpr int block_keys = 16;
constexpr int chunks = (width + 31) / 32;
constexpr int spans = (value_width + 63) / 64;
constexpr int row_blocks = (rows + block_rows - 1) / block_rows;
constexpr int held_rows = rows < block_rows ? rows : block_rows;
constexpr int held_width = spans * 66;  // of a row of sums in shared memory, one element apart after every 32
constexpr int halves = held_rows > 8 ? 2 : 1;  // of a fragment's rows that are in use

// Two weights as 16-bit values and what these lack, so that no precision is lost: both parts are multiplied. A weight
// that is not 0 has two parts that are not, or its product with an infinite value would be NaN.
struct WeightPair {
    unsigned coarse;
    unsigned fine;

    __device__ __forceinline__ WeightPair(float first, float second) {
        const float first_part = truncated(first);
        const float second_part = truncated(second);
        coarse = packed(first_part, second_part);
        fine = packed(rest(first, first_part), rest(second, second_part));
    }

    __device__ __forceinline__ static float truncated(float value) {
        return __uint_as_float(__float_as_uint(value) & (IsBrain<Half>::value ? 0xffff0000u : 0xffffe000u));
    }

    __device__ __forceinline__ static float rest(float value, float part) {
        return value > 0.0f ? fmaxf(value - part, IsBrain<Half>::value ? 1e-30f : 6e-8f) : 0.0f;
    }
};

// 16 keys and their values. Pieces of 16 bytes are shuffled so that lanes that read at a time meet different banks.
struct alignas(16) KeyTile {
    Half k[block_keys * chunks * 32];
    Half v[block_keys * spans * 64];

    __device__ __forceinline__ static int k_place(int key, int piece) {
        return (key * chunks * 4 + (chunks % 2 ? piece : piece ^ key % 2 * 4)) * 8;
    }

    __device__ __forceinline__ static int v_place(int key, int piece) {
        return (key * spans * 8 + (piece ^ key % 8)) * 8;
    }

    // Begins to copy the keys from `first` on, by one warp; zeros stand for keys and dimensions that there are not.
    __device__ __forceinline__ void copy(const Problem &problem, int first) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < block_keys * chunks * 4; i += WARP) {
            const int key = (i + lane) / (chunks * 4);
            const int piece = (i + lane) % (chunks * 4);
            const bool inside = first + key < keys && piece * 8 < width;
            const index_t place = inside ? index_t(first + key) * K::stride(2) + piece * 8 : 0;
            copy_words(k + k_place(key, piece), problem.k + place, inside);
        }
#pragma unroll
        for (int i = 0; i < block_keys * spans * 8; i += WARP) {
            const int key = (i + lane) / (spans * 8);
            const int piece = (i + lane) % (spans * 8);
            const bool inside = first + key < keys && piece * 8 < value_width;
            const index_t place = inside ? index_t(first + key) * V::stride(2) + piece * 8 : 0;
            copy_words(v + v_place(key, piece), problem.v + place, inside);
        }
    }

    __device__ __forceinline__ Words k_words(int key, int piece) const {
        return *reinterpret_cast<const Words *>(k + k_place(key, piece));
    }

    __device__ __forceinline__ Words v_words(int key, int piece) const {
        return *reinterpret_cast<const Words *>(v + v_place(key, piece));
    }
};

// What a warp knows of its 16 rows after some keys.
struct State {
    Words q[halves][chunks];  // rows g and g + 8
    float largest[halves];
    float total[halves];  // of this lane's keys
    float sums[spans][8][4];

    __device__ __forceinline__ void start(const Problem &problem, int first_row) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < halves; half++) {
            const int row = first_row + 8 * half + lane / 4;
#pragma unroll
            for (int chunk = 0; chunk < chunks; chunk++) {
                const int dim = 32 * chunk + lane % 4 * 8;
                const bool inside = row < rows && dim < width;
                q[half][chunk] = load_words(problem.q_row(inside ? row : 0) + (inside ? dim : 0), inside);
            }
            largest[half] = -FLOAT_MAX;
            total[half] = 0.0f;
        }
#pragma unroll
        for (int span = 0; span < spans; span++) {
#pragma unroll
            for (int tile = 0; tile < 8; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[span][tile][i] = 0.0f;
                }
            }
        }
    }

    // Adds 16 keys, with what is to be added to their scores.
    __device__ __forceinline__ void add(const KeyTile &keys_at, const float (&bias)[2][2 * halves]) {
        const int lane = threadIdx.x % WARP;
        const int group = lane / 4;
        const int part = lane % 4;
        float scores[2][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < chunks; chunk++) {
            const Words &top = q[0][chunk];
            const Words bottom = halves == 2 ? q[halves - 1][chunk] : Words{};
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const Words key = keys_at.k_words(8 * tile + group, 4 * chunk + part);
                multiply(scores[tile], top.at[0], bottom.at[0], top.at[1], bottom.at[1], key.at[0], key.at[1]);
                multiply(scores[tile], top.at[2], bottom.at[2], top.at[3], bottom.at[3], key.at[2], key.at[3]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int i = 0; i < 2 * halves; i++) {
                // -inf even where an excluded key made the score NaN.
                scores[tile][i] =
                    bias[tile][i] == -INFINITY_F ? -INFINITY_F : scores[tile][i] * param::scale + bias[tile][i];
            }
        }

        float shrink[halves];
#pragma unroll
        for (int half = 0; half < halves; half++) {
            float greatest = fmaxf(
                fmaxf(scores[0][2 * half], scores[0][2 * half + 1]), fmaxf(scores[1][2 * half], scores[1][2 * half + 1])
            );
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 2));
            greatest = fmaxf(greatest, largest[half]);
            shrink[half] = expf(largest[half] - greatest);
            largest[half] = greatest;
            total[half] *= shrink[half];
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int i = 0; i < 2 * halves; i++) {
                scores[tile][i] = expf(scores[tile][i] - largest[i / 2]);
                total[i / 2] += scores[tile][i];
            }
        }
        const WeightPair weights[4] = {
            {scores[0][0], scores[0][1]}, {scores[0][2], scores[0][3]},
            {scores[1][0], scores[1][1]}, {scores[1][2], scores[1][3]},
        };
#pragma unroll
        for (int span = 0; span < spans; span++) {
            Words values[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                values[i] = keys_at.v_words(2 * part + i % 2 + i / 2 * 8, 8 * span + group);
            }
#pragma unroll
            for (int tile = 0; tile < 8; tile++) {
                float(&target)[4] = sums[span][tile];
#pragma unroll
                for (int i = 0; i < 2 * halves; i++) {
                    target[i] *= shrink[i / 2];
                }
                const unsigned order = tile % 2 ? 0x7632 : 0x5410;
                const unsigned first = __byte_perm(values[0].at[tile / 2], values[1].at[tile / 2], order);
                const unsigned second = __byte_perm(values[2].at[tile / 2], values[3].at[tile / 2], order);
                multiply(
                    target, weights[0].coarse, weights[1].coarse, weights[2].coarse, weights[3].coarse, first, second
                );
                multiply(target, weights[0].fine, weights[1].fine, weights[2].fine, weights[3].fine, first, second);
            }
        }
    }

    // The totals of whole rows, in every lane that has a part of them.
    __device__ __forceinline__ void finish_totals() {
#pragma unroll
        for (int half = 0; half < halves; half++) {
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
        }
    }

    // Dimension 64 · span + 16 · p + i of this lane's row.
    __device__ __forceinline__ float sum_at(int half, int span, int i) const {
        return sums[span][i % 8][2 * half + i / 8];
    }
};

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

// Shared memory of a block while it is in `split_keys`, with `stages` tiles for each warp.
template <int warps, int stages>
union SplitMemory {
    KeyTile tiles[warps][stages];
    struct {
        float largest[warps][block_rows];
        float total[warps][block_rows];
        float weight[warps][block_rows];
        float sums[warps][held_rows][held_width];
    } found;
};

// The rest of `split_keys`, when a warp has found its first key, begun to copy that key's tile to the first stage, and
// read the tile's biases.
template <int warps, int stages, typename Finish>
__device__ __forceinline__ void continue_keys(
    const Problem &problem, int first_row, Turns &turns, int key, float (&bias)[2][2 * halves],
    SplitMemory<warps, stages> &memory, Finish finish
) {
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    KeyTile(&tiles)[stages] = memory.tiles[warp];
    State state;
    state.start(problem, first_row);
    int turn = 0;
    while (key < keys) {
        const int next = turns.next();
        if (stages > 1 && next < keys) {
            tiles[stages - 1 - turn].copy(problem, next);
        }
        end_of_copies();
        float next_bias[2][2 * halves];
        fragment_biases(problem, first_row, next, next_bias);
        wait_for_copies<stages - 1>();
        __syncwarp();
        state.add(tiles[turn], bias);
        __syncwarp();
        if (stages == 1 && next < keys) {
            tiles[0].copy(problem, next);
        }
        key = next;
        turn = stages - 1 - turn;
#pragma unroll
        for (int i = 0; i < 4 * halves; i++) {
            bias[i / (2 * halves)][i % (2 * halves)] = next_bias[i / (2 * halves)][i % (2 * halves)];
        }
    }
    state.finish_totals();
    __syncthreads();
#pragma unroll
    for (int half = 0; half < halves; half++) {
        const int row = lane / 4 + 8 * half;
        if (lane % 4 == 0) {
            memory.found.largest[warp][row] = state.largest[half];
            memory.found.total[warp][row] = state.total[half];
        }
        if (row < held_rows) {
#pragma unroll
            for (int i = 0; i < 16 * spans; i++) {
                const int dim = i / 16 * 64 + lane % 4 * 16 + i % 16;
                memory.found.sums[warp][row][dim + dim / 32] = state.sum_at(half, i / 16, i % 16);
            }
        }
    }
    __syncthreads();
    const auto greatest = [&](int row) {
        float largest = -FLOAT_MAX;
#pragma unroll
        for (int other = 0; other < warps; other++) {
            largest = fmaxf(largest, memory.found.largest[other][row]);
        }
        return largest;
    };
    if (threadIdx.x < warps * held_rows) {
        const int row = threadIdx.x % held_rows;
        const int other = threadIdx.x / held_rows;
        memory.found.weight[other][row] = expf(memory.found.largest[other][row] - greatest(row));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < held_rows * value_width; i += warps * WARP) {
        const int row = i / value_width;
        const int dim = i % value_width;
        if (first_row + row >= rows) {
            continue;
        }
        const float largest = greatest(row);
        float total = 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < warps; other++) {
            const float weight = memory.found.weight[other][row];
            total += weight * memory.found.total[other][row];
            sum += weight * memory.found.sums[other][row][dim + dim / 32];
        }
        finish(problem, first_row + row, dim, largest, total, sum);
    }
}

// Block `split` of `splits` attends to its part of the keys for the 16 rows from `first_row` on, by its first `warps`
// warps, which are all that it has. It hands every element of what it finds to finish(problem, row, dim, maximum, total,
// sum), `threads` side by side. Whoever uses `memory` next synchronizes first.
template <int warps, int stages, typename Finish>
__device__ __forceinline__ void split_keys(
    const Problem &problem, int first_row, int split, int splits, SplitMemory<warps, stages> &memory, Finish finish
) {
    const int warp = threadIdx.x / WARP;
    Turns turns(problem, first_row, split * warps + warp, splits * warps);
    const int key = turns.next();
    if (key < keys) {
        memory.tiles[warp][0].copy(problem, key);
    }
    end_of_copies();
    float bias[2][2 * halves];
    fragment_biases(problem, first_row, key, bias);
    continue_keys(problem, first_row, turns, key, bias, memory, finish);
}

// Where a split leaves what it found: sums[batch, KV head, row, split, dimension]; stats has the maximum and the total.
struct LeaveParts {
    float *sums;
    float *stats;
    int split;
    int splits;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float largest, float total, float sum
    ) const {
        const index_t part = ((problem.batch * kv_heads + problem.kv_head) * rows + row) * splits + split;
        if (total != 0.0f) {
            sums[part * value_width + dim] = sum;
        }
        if (dim == 0) {
            stats[2 * part] = largest;
            stats[2 * part + 1] = total;
        }
    }
};
