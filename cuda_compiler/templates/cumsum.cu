// Running sums along the last dimension: a team per row, walked in blocks of as many elements as threads.

#include "reduction.cuh"

constexpr int last = X::rank - 1;
constexpr index_t width = X::size(last);

// Integers wrap around, as PyTorch's do when they are stored in 32 bits.
template <typename T>
__device__ __forceinline__ T fetched(X::type value) {
    if constexpr (is_float<X::type>::value) {
        return to_float(value);
    } else {
        return T(to_int(value));
    }
}

template <typename T>
__device__ __forceinline__ void running_sum(const X::type *x, Out::type *out, Place place) {
    __shared__ T totals[team_warps];
    T before = T(0);
    for (index_t start = 0; start < width; start += Place::threads()) {
        const index_t i = start + place.thread();
        T sum = i < width ? fetched<T>(x[i * X::stride(last)]) : T(0);
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const T other = __shfl_up_sync(0xffffffffu, sum, step);
            sum = place.lane >= step ? sum + other : sum;
        }
        if (place.lane == WARP - 1) {
            totals[place.warp] = sum;
        }
        __syncthreads();
        T block = T(0);
        for (int warp = 0; warp < team_warps; warp++) {
            sum = warp == place.warp ? sum + block : sum;
            block += totals[warp];
        }
        __syncthreads();  // the next block's totals take their place
        if (i < width) {
            if constexpr (is_float<X::type>::value) {
                out[i * Out::stride(last)] = from<Out::type>(before + sum);
            } else {
                out[i * Out::stride(last)] = from<Out::type>(int(before + sum));
            }
        }
        before += block;
    }
}

template <bool first>
struct Summed { using type = float; };
template <>
struct Summed<false> { using type = unsigned; };

#kernel cumsum_kernel
KERNEL(cumsum_kernel) {
    const Place place;
    running_sum<Summed<is_float<X::type>::value>::type>(
        x + leading_offset<X, last>(place.row), out + leading_offset<Out, last>(place.row), place
    );
}
