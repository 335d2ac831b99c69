// What blocks of many rows have in common: a look at the mask beforehand tells which tiles of keys they need, and weights
// are relative to the largest score so far.

#include "attention/attention.cuh"
#include "attention/attention_products.cuh"
#include "attention/attention_verdicts.cuh"

#where has_sinks
#include "attention/sinks.cuh"

#end
constexpr int key_groups = tile_keys / 8;  // of a fragment of scores
static_assert(8 * value_tiles >= value_width);
constexpr float log2_e = 1.44269504f;

constexpr int problems = int(K::size(0)) * kv_heads;

// The pair of a batch and a KV head, and the rows there, of a block's item of work. The last rows have the most keys where
// attention is causal: they begin first.
constexpr int items = problems * row_blocks;
__device__ __forceinline__ int problem_of(int item) { return item % problems; }
__device__ __forceinline__ int row_block_of(int item) { return row_blocks - 1 - item / problems; }

// The tiles of keys that a block has to multiply.
struct Tiles {
    const Verdicts::type *verdicts;  // of the block
    int first_query;
    int count;

    __device__ __forceinline__ Tiles(const Verdicts::type *start, const Problem &problem, int row_block)
        : verdicts(start) {
        const int last_row = smaller((row_block + 1) * tile_rows, rows) - 1;
        const int reach = param::causal ? smaller(keys, Problem::query_of(last_row) + 1) : keys;
        count = (reach + tile_keys - 1) / tile_keys;
        first_query = Problem::query_of(row_block * tile_rows);
        if constexpr (Verdicts::present) {
            const index_t place = problem.batch % Verdicts::size(0) * Verdicts::size(1)
                + problem.kv_head % Verdicts::size(1);
            verdicts += (place * row_blocks + row_block) * key_tiles;
        }
    }

    // The first one from `tile` on, or `count`.
    __device__ __forceinline__ int next(int tile) const {
        if constexpr (Verdicts::present) {
            const int lane = threadIdx.x % WARP;
            for (; tile < count; tile += WARP) {
                const bool needed = tile + lane < count && verdicts[tile + lane] != left_out;
                const unsigned found = __ballot_sync(0xffffffffu, needed);
                if (found != 0) {
                    return tile + __ffs(found) - 1;
                }
            }
            return count;
        }
        return tile;
    }

    __device__ __forceinline__ bool is_biased(int tile) const {
        if constexpr (Verdicts::present) {
            return verdicts[tile] == biased;
        }
        if constexpr (Mask::present) {
            return true;
        }
        const int behind = (tile + 1) * tile_keys;
        return behind > keys || (param::causal && behind - 1 > first_query);
    }
};

// What a warp knows of 16 rows after some keys.
struct Rows {
    float largest[2] = {-FLOAT_MAX, -FLOAT_MAX};  // of rows g and g + 8
    float total[2] = {};  // of this lane's keys
    float shrink[2];  // by which `sums` lags behind
    float sums[value_tiles][4] = {};

    // Scores to weights, relative to the largest scores so far. It leaves the sums alone, which may be on their way.
    __device__ __forceinline__ void weigh(
        float (&scores)[key_groups][4], const Problem &problem, int first_row, int first_key, bool is_biased
    ) {
        const int lane = threadIdx.x % WARP;
#where soft_cap
        constexpr float scale = 1.0f;
#pragma unroll
        for (int group = 0; group < key_groups; group++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[group][i] = param::soft_cap * tanhf(scores[group][i] * (param::scale / param::soft_cap));
            }
        }
#elsewhere
        constexpr float scale = param::scale;
#end
        const bool plain = !is_biased && scale > 0.0f;
        if (!plain) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int group = 0; group < key_groups; group++) {
                    float bias[2];
                    problem.biases(first_row + lane / 4 + half * 8, first_key + 8 * group + lane % 4 * 2, bias);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float &score = scores[group][2 * half + i];
                        // -inf even where an excluded key made the score NaN.
                        score = bias[i] == -INFINITY_F ? -INFINITY_F : score * scale + bias[i];
                    }
                }
            }
        }
        const float unit = plain ? scale : 1.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float greatest = scores[0][2 * half];
#pragma unroll
            for (int group = 0; group < key_groups; group++) {
                greatest = fmaxf(greatest, fmaxf(scores[group][2 * half], scores[group][2 * half + 1]));
            }
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, 2));
            greatest = fmaxf(greatest * unit, largest[half]);
            shrink[half] = near_exp2((largest[half] - greatest) * log2_e);
            largest[half] = greatest;
            total[half] *= shrink[half];
        }
        if (plain) {
            const float top[2] = {largest[0] * log2_e, largest[1] * log2_e};
#pragma unroll
            for (int group = 0; group < key_groups; group++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[group][i] = near_exp2(fmaf(scores[group][i], scale * log2_e, -top[i / 2]));
                }
            }
        } else {
            // A mask's lowest value times log2(e) would be infinite.
#pragma unroll
            for (int group = 0; group < key_groups; group++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[group][i] = near_exp2((scores[group][i] - largest[i / 2]) * log2_e);
                }
            }
        }
#pragma unroll
        for (int group = 0; group < key_groups; group++) {
            total[0] += scores[group][0] + scores[group][1];
            total[1] += scores[group][2] + scores[group][3];
        }
    }

    // Brings all that was summed to the largest scores of now.
    __device__ __forceinline__ void shrink_sums() {
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int tile = 0; tile < value_tiles; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[tile][i] *= shrink[i / 2];
                }
            }
        }
    }

#where has_sinks
    __device__ __forceinline__ void finish(
        const Problem &problem, int first_row, const Sinks::type *sinks, Out::type *out
    ) {
#elsewhere
    __device__ __forceinline__ void finish(const Problem &problem, int first_row, Out::type *out) {
#end
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
            total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
            const int row = first_row + lane / 4 + 8 * half;
            if (row >= rows) {
                continue;
            }
#where has_sinks
            total[half] += sink_weight(sinks, problem.kv_head * sharing + row % sharing, largest[half]);
#end
            // A query that attends to no key at all gets zeros, as in PyTorch.
            const float factor = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
            Out::type *target = out + problem.batch * Out::stride(0)
                + (problem.kv_head * sharing + row % sharing) * Out::stride(1)
                + Problem::query_of(row) * Out::stride(2);
#pragma unroll
            for (int tile = 0; tile < value_tiles; tile++) {
                const int dim = 8 * tile + lane % 4 * 2;
                const float values[2] = {sums[tile][2 * half] * factor, sums[tile][2 * half + 1] * factor};
                if (dim < value_width) {
                    if constexpr (Out::vector >= 2) {
                        store_floats(target + dim, values);
                    } else {
                        target[dim * Out::stride(3)] = from<Out::type>(values[0]);
                        target[(dim + 1) * Out::stride(3)] = from<Out::type>(values[1]);
                    }
                }
            }
        }
    }
};
