// The largest elements of a row, of equal ones the first, with NaN above all, and what they weigh, by a warp that has the row in
// registers.

#include "common/ordered.cuh"

// An element's rank: the larger comes first. 0 is behind all, and no element has it.
__device__ __forceinline__ unsigned rank_of(float value) { return unsigned(key_of<false>(value)) ^ 0x80000000u; }

__device__ __forceinline__ unsigned largest_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, value);
#else
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, value, step);
        value = other > value ? other : value;
    }
    return value;
#endif
}

// Replaces a row's values, element `i * WARP + lane` as `values[i]`, by their softmax; those behind the end are -infinity.
template <int held>
__device__ __forceinline__ void softmax_of_row(float (&values)[held]) {
    float largest = -INFINITY_F;
#pragma unroll
    for (int i = 0; i < held; i++) {
        largest = max_nan(largest, values[i]);
    }
    largest = warp_max(largest);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < held; i++) {
        values[i] = expf(values[i] - largest);
        sum += values[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < held; i++) {
        values[i] /= sum;
    }
}

// A lane's choice: lane c has choice number c, lanes from `choices` on have none.
struct Choice {
    int number = 0;
    float weight = 0.0f;
};

// The choices of a row of `width` values, as in `softmax_of_row`. With `before`, elements weigh what the softmax of all makes of
// them, with `after` what that of the chosen ones does; with `divides`, weights are divided by their sum.
template <int width, int choices, bool before, bool after, bool divides, int held>
__device__ __forceinline__ Choice choice_of_row(float (&values)[held]) {
    static_assert(choices <= WARP && choices <= width, "a lane has one choice");
    const int lane = threadIdx.x % WARP;
    if constexpr (before) {
        softmax_of_row(values);
    }
    unsigned ranks[held];
#pragma unroll
    for (int i = 0; i < held; i++) {
        ranks[i] = i * WARP + lane < width ? rank_of(values[i]) : 0;
    }
    Choice own;
#pragma unroll
    for (int choice = 0; choice < choices; choice++) {
        unsigned rank = ranks[0];
        int at = 0;  // the first of the lane's largest
#pragma unroll
        for (int i = 1; i < held; i++) {
            at = ranks[i] > rank ? i : at;
            rank = ranks[i] > rank ? ranks[i] : rank;
        }
        const unsigned first = largest_of_warp(rank);
        // Of equal ones the first, which has the largest complement.
        const int number = int(~largest_of_warp(rank == first ? ~unsigned(at * WARP + lane) : 0));
#pragma unroll
        for (int i = 0; i < held; i++) {
            ranks[i] = i * WARP + lane == number ? 0 : ranks[i];
        }
        own.number = lane == choice ? number : own.number;
    }
    // What a lane has chosen, another one may hold.
#pragma unroll
    for (int i = 0; i < held; i++) {
        const float value = __shfl_sync(0xffffffffu, values[i], own.number % WARP);
        own.weight = lane < choices && own.number / WARP == i ? value : own.weight;
    }
    if constexpr (after) {
        const float largest = warp_max(lane < choices ? own.weight : -INFINITY_F);
        own.weight = expf(own.weight - largest);
    }
    if constexpr (after || divides) {
        own.weight /= warp_sum(lane < choices ? own.weight : 0.0f);
    }
    return own;
}
