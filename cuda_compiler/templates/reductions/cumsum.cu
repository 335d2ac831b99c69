// Running sums along the last dimension: a team per row, walked in blocks of as many elements as threads. Of a few long
// rows, a team per chunk of a row, which begins with the sum of the chunks before.

#include "common/reduction.cuh"

constexpr int last = X::rank - 1;
constexpr index_t width = X::size(last);

// What is added, and what that means. Integers wrap around, as PyTorch's do when they are stored in 32 bits.
template <bool floats>
struct Summed {
    using type = float;
    using value = float;
};
template <>
struct Summed<false> {
    using type = unsigned;
    using value = int;
};
using Total = Summed<is_float<X::type>::value>::type;

__device__ __forceinline__ Total fetched(X::type value) {
    if constexpr (is_float<X::type>::value) {
        return to_float(value);
    } else {
        return Total(to_int(value));
    }
}

#kernel cumsum_kernel cumsum_of_chunks
// The elements from `start` to `end` of a row, on top of what came before.
__device__ __forceinline__ void running_sum(
    const X::type *x, Out::type *out, index_t start, index_t end, Total before, Place place
) {
    __shared__ Total totals[team_warps];
    for (; start < end; start += Place::threads()) {
        const index_t i = start + place.thread();
        Total sum = i < end ? fetched(x[i * X::stride(last)]) : Total(0);
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const Total other = __shfl_up_sync(0xffffffffu, sum, step);
            sum = place.lane >= step ? sum + other : sum;
        }
        if (place.lane == WARP - 1) {
            totals[place.warp] = sum;
        }
        __syncthreads();
        Total block = Total(0);
        for (int warp = 0; warp < team_warps; warp++) {
            sum = warp == place.warp ? sum + block : sum;
            block += totals[warp];
        }
        __syncthreads();  // the next block's totals take their place
        if (i < end) {
            out[i * Out::stride(last)] = from<Out::type>(Summed<is_float<X::type>::value>::value(before + sum));
        }
        before += block;
    }
}

#kernel cumsum_kernel
KERNEL(cumsum_kernel) {
    const Place place;
    running_sum(x + leading_offset<X, last>(place.row), out + leading_offset<Out, last>(place.row), 0, width, 0, place);
}

#kernel sum_chunks cumsum_of_chunks
__device__ __forceinline__ index_t chunk_end() {
    const index_t end = (index_t(blockIdx.x) + 1) * CHUNK;
    return end < width ? end : width;
}

#kernel sum_chunks
KERNEL(sum_chunks) {
    const Place place;
    const X::type *row = x + leading_offset<X, last>(blockIdx.y);
    Total total = 0;
    for (index_t i = index_t(blockIdx.x) * CHUNK + place.thread(); i < chunk_end(); i += Place::threads()) {
        total += fetched(row[i * X::stride(last)]);
    }
    total = reduce_team<Sum>(total, Total(0), place);
    if (place.thread() == 0) {
        sums[blockIdx.y * gridDim.x + blockIdx.x] = Sums::type(total);
    }
}

#kernel cumsum_of_chunks
KERNEL(cumsum_of_chunks) {
    const Place place;
    Total before = 0;
    for (int chunk = place.thread(); chunk < int(blockIdx.x); chunk += Place::threads()) {
        before += Total(sums[blockIdx.y * gridDim.x + chunk]);
    }
    before = reduce_team<Sum>(before, Total(0), place);
    running_sum(x + leading_offset<X, last>(blockIdx.y), out + leading_offset<Out, last>(blockIdx.y),
                index_t(blockIdx.x) * CHUNK, chunk_end(), before, place);
}
