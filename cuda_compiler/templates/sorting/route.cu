// Choices of experts for rows, a warp for each.

#include "sorting/choice.cuh"

constexpr int width = int(X::size(1));
constexpr int choices = int(Weights::size(1));
constexpr int held = (width + WARP - 1) / WARP;

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
    const Choice own = choice_of_row<width, choices, before, after, divides>(values);
    if (lane < choices) {
        order[row * Order::stride(0) + lane * Order::stride(1)] = own.number;
        weights[row * Weights::stride(0) + lane * Weights::stride(1)] = from<Weights::type>(own.weight);
    }
}
