// The largest elements of a row, of equal ones the first, with NaN above all, and what they weigh, by a warp that has the row in
// registers.

#include "common/ordered.cuh"

// An element's place in the order: the larger comes first, of equal ones that with the smaller number. 0 is behind all.
__device__ __forceinline__ unsigned long long place_of(float value, int number) {
    const unsigned rank = unsigned(key_of<false>(value)) ^ 0x80000000u;
    return (unsigned long long)(rank) << 32 | (0xffffffffu - unsigned(number));
}

__device__ __forceinline__ unsigned long long warp_first(unsigned long long place) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, place, step);
        place = other > place ? other : place;
    }
    return place;
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
    unsigned long long places[held];
#pragma unroll
    for (int i = 0; i < held; i++) {
        const int number = i * WARP + lane;
        places[i] = number < width ? place_of(values[i], number) : 0;
    }
    Choice own;
#pragma unroll
    for (int choice = 0; choice < choices; choice++) {
        unsigned long long first = places[0];
#pragma unroll
        for (int i = 1; i < held; i++) {
            first = places[i] > first ? places[i] : first;
        }
        first = warp_first(first);
        const int number = int(0xffffffffu - unsigned(first));
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < held; i++) {
            if (places[i] == first) {
                value = values[i];
                places[i] = 0;
            }
        }
        value = __shfl_sync(0xffffffffu, value, number % WARP);
        if (lane == choice) {
            own = Choice{number, value};
        }
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
