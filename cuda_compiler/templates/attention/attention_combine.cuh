// Puts together what the splits of a row found (see `LeaveParts`), 32 dimensions of it at a time. Expects the operands Sums
// and Out.
#where has_sinks

#include "attention/sinks.cuh"
#end

constexpr int combine_width = 32;
constexpr int combine_slices = (int(Sums::size(4)) + combine_width - 1) / combine_width;
constexpr int combine_items = int(Sums::size(0) * Sums::size(1) * Sums::size(2)) * combine_slices;

template <int threads, int splits>
struct CombineMemory {
    float largest[threads / WARP];
    float total[threads / WARP];
    float weights[splits];
    float sums[threads / 8][combine_width];
};

// The `item`-th piece of work, by a block of `threads`, a multiple of 32. Whoever uses `memory` next synchronizes first.
template <int threads, int splits>
__device__ __forceinline__ void combine_splits(
#where has_sinks
    const float *sums, const float *stats, const Sinks::type *sinks, int item, CombineMemory<threads, splits> &memory,
    Out::type *out
#elsewhere
    const float *sums, const float *stats, int item, CombineMemory<threads, splits> &memory, Out::type *out
#end
) {
    constexpr int width = Sums::size(4);
    const int first_dim = item % combine_slices * combine_width;
    const index_t found_row = item / combine_slices;
    sums += found_row * splits * width;
    stats += found_row * splits * 2;
    constexpr int warps = threads / WARP;
    constexpr int own = (splits + threads - 1) / threads;
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    float largest[own];
    float total[own];
    float greatest = -3.402823466e38f;
#pragma unroll
    for (int i = 0; i < own; i++) {
        const int split = i * threads + threadIdx.x;
        const bool inside = split < splits;
        largest[i] = inside ? stats[2 * split] : -3.402823466e38f;
        total[i] = inside ? stats[2 * split + 1] : 0.0f;
        greatest = fmaxf(greatest, largest[i]);
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
    }
    if (lane == 0) {
        memory.largest[warp] = greatest;
    }
    sync_block();
#pragma unroll
    for (int other = 0; other < warps; other++) {
        greatest = fmaxf(greatest, memory.largest[other]);
    }
    float whole = 0.0f;
#pragma unroll
    for (int i = 0; i < own; i++) {
        const int split = i * threads + threadIdx.x;
        const float weight = total[i] == 0.0f ? 0.0f : expf(largest[i] - greatest);
        whole += weight * total[i];
        if (split < splits) {
            memory.weights[split] = total[i] == 0.0f ? -1.0f : weight;
        }
    }
    whole = warp_sum(whole);
    if (lane == 0) {
        memory.total[warp] = whole;
    }
    sync_block();
    whole = 0.0f;
#pragma unroll
    for (int other = 0; other < warps; other++) {
        whole += memory.total[other];
    }
    // Eight threads side by side have the 32 dimensions of a split; a split without keys left no sums.
    const int dim = threadIdx.x % 8 * 4;
    float sum[4] = {};
#pragma unroll 8
    for (int split = threadIdx.x / 8; split < splits; split += threads / 8) {
        const float weight = memory.weights[split];
        if (weight >= 0.0f && first_dim + dim < width) {
            float found[4];
            load_floats(found, sums + index_t(split) * width + first_dim + dim);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[i] += weight * found[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        memory.sums[threadIdx.x / 8][dim + i] = sum[i];
    }
    sync_block();
    if (threadIdx.x < combine_width && first_dim + threadIdx.x < width) {
        float result = 0.0f;
#pragma unroll
        for (int part = 0; part < threads / 8; part++) {
            result += memory.sums[part][threadIdx.x];
        }
        constexpr int rows = Sums::size(2);
        constexpr int kv_heads = Sums::size(1);
        constexpr int sharing = Out::size(1) / kv_heads;
        const int row = found_row % rows;
        const index_t head = found_row / rows % kv_heads * sharing + row % sharing;
        const index_t place = found_row / (rows * kv_heads) * Out::stride(0) + head * Out::stride(1)
            + row / sharing * Out::stride(2) + (first_dim + threadIdx.x) * Out::stride(3);
#where has_sinks
        whole += sink_weight(sinks, head, greatest);
#end
        // A query that attends to no key at all gets zeros, as in PyTorch.
        out[place] = from<Out::type>(whole == 0.0f ? 0.0f : result / whole);
    }
}
