// softmax(scale · q·kᵀ + mask) · v in one pass over the keys, with a running maximum and no memory for the scores.

#kernel attention_split attention_once
// For few queries. Keys that the mask excludes for all rows at hand are not read, 16 at a time.
#include "attention/attention_split.cuh"

#kernel attention_plain
#include "attention/attention.cuh"

#kernel attention_once attention_plain
__device__ __forceinline__ index_t out_row(const Problem &problem, int row) {
    return problem.batch * Out::stride(0) + (problem.kv_head * sharing + row % sharing) * Out::stride(1)
        + Problem::query_of(row) * Out::stride(2);
}
#where has_sinks

#include "attention/sinks.cuh"

__device__ __forceinline__ float sink_weight(const Sinks::type *sinks, const Problem &problem, int row, float largest) {
    return sink_weight(sinks, problem.kv_head * sharing + row % sharing, largest);
}
#end

#kernel attention_split attention_once
extern __shared__ __align__(16) unsigned char shared_memory[];

#kernel attention_once
struct Finish {
    Out::type *out;
#where has_sinks
    const Sinks::type *sinks;
#end

    __device__ __forceinline__ void operator()(
#where has_sinks
        const Problem &problem, int row, int dim, float largest, float of_keys, const float (&sums)[4]
    ) const {
        const float total = of_keys + sink_weight(sinks, problem, row, largest);
#elsewhere
        const Problem &problem, int row, int dim, float, float total, const float (&sums)[4]
    ) const {
#end
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // A query that attends to no key at all gets zeros, as in PyTorch.
            const float value = total == 0.0f ? 0.0f : sums[i] / total;
            out[out_row(problem, row) + (dim + i) * Out::stride(3)] = from<Out::type>(value);
        }
    }
};

KERNEL(attention_once) {
    const Problem problem(q, k, v, mask, blockIdx.z, blockIdx.y / row_blocks);
    auto &memory = *reinterpret_cast<SplitMemory<stages>(*)[THREADS / WARP]>(shared_memory);
#where has_sinks
    split_keys(problem, blockIdx.y % row_blocks * block_rows, 0, 1, memory, Finish{out, sinks});
#elsewhere
    split_keys(problem, blockIdx.y % row_blocks * block_rows, 0, 1, memory, Finish{out});
#end
}

#kernel attention_split
KERNEL(attention_split) {
    const Problem problem(q, k, v, mask, blockIdx.z, blockIdx.y / row_blocks);
    auto &memory = *reinterpret_cast<SplitMemory<stages>(*)[THREADS / WARP]>(shared_memory);
    const LeaveParts finish{sums, stats, int(blockIdx.x), splits};
    split_keys(problem, blockIdx.y % row_blocks * block_rows, blockIdx.x, splits, memory, finish);
}

#kernel attention_combine
// A block per row and 32 of its dimensions.
#include "attention/attention_combine.cuh"

KERNEL(attention_combine) {
    __shared__ CombineMemory<THREADS, splits> memory;
#where has_sinks
    combine_splits<THREADS, splits>(sums, stats, sinks, blockIdx.x, memory, out);
#elsewhere
    combine_splits<THREADS, splits>(sums, stats, blockIdx.x, memory, out);
#end
}

#kernel attention_plain
// A block per query of a head and per slice of its result.
#include "attention/plain.cuh"

KERNEL(attention_plain) {
    const int row = blockIdx.x / slices % rows;
    const index_t head = blockIdx.x / slices / rows;
    const Problem problem(q, k, v, mask, head / kv_heads, head % kv_heads);
    const int reach = param::causal ? smaller(keys, Problem::query_of(row) + 1) : keys;
    bool lowest_counts = true;
    if constexpr (Mask::present && is_float<Mask::type>::value) {
        lowest_counts = !all_attend(problem, row, row);
    }
    auto bias = [&](int key) {
        const float value = problem.bias(row, key);
        return value <= lowest_bias && !lowest_counts ? -INFINITY_F : value;
    };
    auto store = [&](int dim, float value) {
        out[out_row(problem, row) + dim * Out::stride(3)] = from<Out::type>(value);
    };
#where has_sinks
    auto beside = [&](float largest) { return sink_weight(sinks, problem, row, largest); };
    attend_plainly<Q::stride(3), K::stride(3), V::stride(3)>(problem, row, reach, bias, store, beside);
#elsewhere
    attend_plainly<Q::stride(3), K::stride(3), V::stride(3)>(problem, row, reach, bias, store);
#end
}
