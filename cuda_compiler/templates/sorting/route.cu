// Choices of experts: the largest elements of each row, of equal ones the first, with NaN above all, and their weights. A warp has a
// row in registers; lane c has its choice c.

#include "common/ordered.cuh"

constexpr int width = int(X::size(1));
constexpr int choices = int(Weights::size(1));
constexpr int held = (width + WARP - 1) / WARP;
static_assert(choices <= WARP && choices <= width, "");

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

#kernel route
KERNEL(route) {
    const index_t row = index_t(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= X::size(0)) {
        return;
    }
    float values[held];
#pragma unroll
    for (int i = 0; i < held; i++) {
        const int number = i * WARP + lane;
        values[i] = number < width ? to_float(x[row * X::stride(0) + number * X::stride(1)]) : -INFINITY_F;
    }
    if constexpr (before) {
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
    unsigned long long places[held];
#pragma unroll
    for (int i = 0; i < held; i++) {
        const int number = i * WARP + lane;
        places[i] = number < width ? place_of(values[i], number) : 0;
    }
    float weight = 0.0f;
    int chosen = 0;
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
            chosen = number;
            weight = value;
        }
    }
    if constexpr (after) {
        const float largest = warp_max(lane < choices ? weight : -INFINITY_F);
        weight = expf(weight - largest);
    }
    if constexpr (after || divides) {
        weight /= warp_sum(lane < choices ? weight : 0.0f);
    }
    if (lane < choices) {
        order[row * Order::stride(0) + lane * Order::stride(1)] = chosen;
        weights[row * Weights::stride(0) + lane * Weights::stride(1)] = from<Weights::type>(weight);
    }
}
