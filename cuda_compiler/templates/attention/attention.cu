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

#kernel attention_split attention_once
extern __shared__ __align__(16) unsigned char shared_memory[];

#kernel attention_once
struct Finish {
    Out::type *out;

    __device__ __forceinline__ void operator()(
        const Problem &problem, int row, int dim, float, float total, const float (&sums)[4]
    ) const {
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
    split_keys(problem, blockIdx.y % row_blocks * block_rows, 0, 1, memory, Finish{out});
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
    combine_splits<THREADS, splits>(sums, stats, blockIdx.x, memory, out);
}

#kernel attention_plain
// Any dtypes, widths and strides, in float arithmetic: a block per query of a head and per slice of its result; each warp
// follows keys of its own.
constexpr int warps = THREADS / WARP;
constexpr int slices = (value_width + slice - 1) / slice;
constexpr int parts = (slice + WARP - 1) / WARP;

KERNEL(attention_plain) {
    __shared__ float largest_of[warps];
    __shared__ float total_of[warps];
    __shared__ float sums_of[warps][slice];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const int first_dim = blockIdx.x % slices * slice;
    const int row = blockIdx.x / slices % rows;
    const index_t head = blockIdx.x / slices / rows;
    const Problem problem(q, k, v, mask, head / kv_heads, head % kv_heads);
    const Q::type *query = problem.q_row(row);
    float largest = -FLOAT_MAX;
    float total = 0.0f;
    float sums[parts] = {};
    const int reach = param::causal ? smaller(keys, Problem::query_of(row) + 1) : keys;
    bool lowest_counts = true;
    if constexpr (Mask::present && is_float<Mask::type>::value) {
        lowest_counts = !all_attend(problem, row, row);
    }
    for (int key = warp; key < reach; key += warps) {
        const float bias = problem.bias(row, key);
        if (bias == -INFINITY_F || (bias <= lowest_bias && !lowest_counts)) {
            continue;
        }
        float product = 0.0f;
        for (int dim = lane; dim < width; dim += WARP) {
            const float right = to_float(problem.k[key * K::stride(2) + dim * K::stride(3)]);
            product = fmaf(to_float(query[dim * Q::stride(3)]), right, product);
        }
        const float score = warp_sum(product) * param::scale + bias;
        const float before = largest;
        largest = fmaxf(largest, score);
        const float shrink = expf(before - largest);
        const float weight = expf(score - largest);
        total = total * shrink + weight;
#pragma unroll
        for (int part = 0; part < parts; part++) {
            const int dim = first_dim + part * WARP + lane;
            if (dim < value_width) {
                const float value = to_float(problem.v[key * V::stride(2) + dim * V::stride(3)]);
                sums[part] = sums[part] * shrink + weight * value;
            }
        }
    }
#pragma unroll
    for (int part = 0; part < parts; part++) {
        if (part * WARP + lane < slice) {
            sums_of[warp][part * WARP + lane] = sums[part];
        }
    }
    if (lane == 0) {
        largest_of[warp] = largest;
        total_of[warp] = total;
    }
    __syncthreads();
    largest = -FLOAT_MAX;
    total = 0.0f;
#pragma unroll
    for (int other = 0; other < warps; other++) {
        largest = fmaxf(largest, largest_of[other]);
    }
#pragma unroll
    for (int other = 0; other < warps; other++) {
        total += total_of[other] * expf(largest_of[other] - largest);
    }
    for (int dim = threadIdx.x; dim < slice && first_dim + dim < value_width; dim += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < warps; other++) {
            sum += sums_of[other][dim] * expf(largest_of[other] - largest);
        }
        // A query that attends to no key at all gets zeros, as in PyTorch.
        const float value = total == 0.0f ? 0.0f : sum / total;
        out[out_row(problem, row) + (first_dim + dim) * Out::stride(3)] = from<Out::type>(value);
    }
}
