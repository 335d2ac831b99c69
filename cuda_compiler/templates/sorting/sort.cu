// Sorting along the last dimension; equal elements keep their order. Short rows: each element counts those that come
// before it. Long rows: a radix sort, digit by digit from the least one, a block to each tile of a row; the elements of
// a tile that have the same digit move side by side, behind those of the tiles before.

#include "common/ordered.cuh"

constexpr int last = X::present ? X::rank - 1 : 1;

// An element's place among all values of its type, by which it is sorted in ascending order.
__device__ __forceinline__ unsigned rank_of(X::type value) {
    int key;
    if constexpr (is_float<X::type>::value) {
        key = key_of<false>(to_float(value));
    } else {
        key = to_int(value);
    }
    const unsigned rank = unsigned(key) ^ 0x80000000u;
    return param::descending ? ~rank : rank;
}

#kernel argsort_kernel
KERNEL(argsort_kernel) {
    __shared__ unsigned others[THREADS];
    constexpr index_t width = X::size(last);
    const X::type *from = x + leading_offset<X, last>(blockIdx.x);
    const index_t own = index_t(blockIdx.y) * THREADS + threadIdx.x;
    const unsigned rank = own < width ? rank_of(from[own * X::stride(last)]) : 0u;
    index_t place = 0;
    for (index_t start = 0; start < width; start += THREADS) {
        const index_t i = start + threadIdx.x;
        __syncthreads();
        others[threadIdx.x] = i < width ? rank_of(from[i * X::stride(last)]) : 0xffffffffu;
        __syncthreads();
        for (int j = 0; j < THREADS && start + j < width; j++) {
            place += others[j] < rank || (others[j] == rank && start + j < own);
        }
    }
    if (own < width) {
        order[leading_offset<Order, last>(blockIdx.x) + place * Order::stride(last)] = int(own);
    }
}

#kernel count_digits move_by_digit
constexpr int DIGITS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROUNDS = TILE / THREADS;

// Elements of a row in the order that the digits before have brought them into; before the first digit, as they lie.
__device__ __forceinline__ unsigned fetched_rank(const X::type *x, const Ranks::type *ranks, index_t row, index_t i) {
    if constexpr (X::present) {
        return rank_of(x[leading_offset<X, last>(row) + i * X::stride(last)]);
    } else {
        return unsigned(ranks[row * WIDTH + i]);
    }
}

__device__ __forceinline__ int digit_of(unsigned rank) {
    return int(rank >> SHIFT & (DIGITS - 1u));
}

#kernel count_digits
// How often each digit occurs in each tile: counts is [rows, tiles, digits].
KERNEL(count_digits) {
    __shared__ int found[DIGITS];
    for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) {
        found[digit] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const index_t i = index_t(blockIdx.y) * TILE + round * THREADS + threadIdx.x;
        if (i < WIDTH) {
            atomicAdd(found + digit_of(fetched_rank(x, ranks, blockIdx.x, i)), 1);
        }
    }
    __syncthreads();
    for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) {
        counts[(index_t(blockIdx.x) * gridDim.y + blockIdx.y) * DIGITS + digit] = found[digit];
    }
}

#kernel move_by_digit
constexpr int HELPERS = THREADS / DIGITS;  // threads that add up one digit's counts
static_assert(THREADS % DIGITS == 0, "every digit has as many");

// The sum of the values of the threads below this one.
__device__ __forceinline__ int sum_below(int value, int *totals) {
    const int warp = threadIdx.x / WARP;
    int sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        sum += int(threadIdx.x % WARP) >= step ? other : 0;
    }
    if (threadIdx.x % WARP == WARP - 1) {
        totals[warp] = sum;
    }
    __syncthreads();
    for (int i = 0; i < warp; i++) {
        sum += totals[i];
    }
    return sum - value;
}

// The lanes whose digit is this lane's.
__device__ __forceinline__ unsigned lanes_of(int digit) {
    unsigned lanes = 0xffffffffu;
#pragma unroll
    for (int bit = 1; bit < DIGITS; bit *= 2) {
        const unsigned set = __ballot_sync(0xffffffffu, digit & bit);
        lanes &= digit & bit ? set : ~set;
    }
    return lanes;
}

// A tile is sorted in shared memory first, so that neighbours go to neighbours.
KERNEL(move_by_digit) {
    __shared__ int partial[2][HELPERS][DIGITS];
    __shared__ int totals[2][WARPS];
    __shared__ int shift[DIGITS];  // from a place in the sorted tile to one in the row
    __shared__ unsigned short places[WARPS][DIGITS];
    __shared__ unsigned sorted_ranks[TILE];
    __shared__ int sorted_order[TILE];
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int digit = threadIdx.x % DIGITS;
    const int helper = threadIdx.x / DIGITS;
    const int tile = blockIdx.y;
    const index_t row = blockIdx.x * index_t(WIDTH);
    const index_t first = index_t(tile) * TILE + warp * (ROUNDS * WARP) + lane;
    const int *found = counts + index_t(blockIdx.x) * gridDim.y * DIGITS + digit;
    unsigned rank[ROUNDS];
    int from_place[ROUNDS];
    int place[ROUNDS];
    // What lies behind the row's end has the last digit and comes after all that has it, so it moves nothing.
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const index_t i = first + round * WARP;
        rank[round] = i < WIDTH ? fetched_rank(x, ranks, blockIdx.x, i) : 0xffffffffu;
        from_place[round] = Before::present && i < WIDTH ? int(before[row + i]) : int(i);
    }
    int earlier = 0;
    int all = 0;
#pragma unroll 16
    for (int other = helper; other < int(gridDim.y); other += HELPERS) {
        const int count = found[other * DIGITS];
        earlier += other < tile ? count : 0;
        all += count;
    }
    partial[0][helper][digit] = earlier;
    partial[1][helper][digit] = all;
    for (int i = lane; i < DIGITS; i += WARP) {
        places[warp][i] = 0;
    }
    __syncwarp();
    unsigned equals[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        equals[round] = lanes_of(digit_of(rank[round]));
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        unsigned short &next = places[warp][digit_of(rank[round])];
        const int below = __popc(equals[round] & ((1u << lane) - 1u));
        place[round] = next + below;
        __syncwarp();
        if (below == 0) {
            next += __popc(equals[round]);
        }
        __syncwarp();
    }
    __syncthreads();
    earlier = 0;
    all = 0;
    for (int i = 0; i < HELPERS; i++) {
        earlier += partial[0][i][digit];
        all += partial[1][i][digit];
    }
    int start = sum_below(found[tile * DIGITS], totals[0]);
    const int below = sum_below(all, totals[1]);
    if (helper == 0) {
        shift[digit] = below + earlier - start;
        for (int i = 0; i < WARPS; i++) {
            const int count = places[i][digit];
            places[i][digit] = start;
            start += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int to = places[warp][digit_of(rank[round])] + place[round];
        sorted_ranks[to] = rank[round];
        sorted_order[to] = from_place[round];
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int i = round * THREADS + threadIdx.x;
        if (index_t(tile) * TILE + i < WIDTH) {
            const index_t to = shift[digit_of(sorted_ranks[i])] + i;
            moved[row + to] = int(sorted_ranks[i]);
            order[leading_offset<Order, Order::rank - 1>(blockIdx.x) + to * Order::stride(Order::rank - 1)] =
                sorted_order[i];
        }
    }
}
