// softmax and log_softmax over a view's last dimension, where neighbours in memory lie along one that is kept. A thread reads
// `pack` of these columns side by side, `turns` rows of them at a time. A block has `columns` threads side by side, and for
// each of them `walkers` that share the rows; both are powers of two. The rows are read twice.

#include "common/exp_sum.cuh"

constexpr int last = X::rank - 1;
constexpr index_t width = X::size(last);
constexpr index_t columns_of_all = X::numel / width / pack;
constexpr int near = columns < WARP ? smaller(walkers, WARP / columns) : 1;  // walkers of a column in one warp

// Where a thread's columns begin.
template <typename V>
__device__ __forceinline__ index_t column_offset(index_t column) {
    constexpr index_t across = V::size(last - 1) / pack;
    return leading_offset<V, last - 1>(column / across) + column % across * pack * V::stride(last - 1);
}

// Has each walker know what all walkers of its columns know.
__device__ __forceinline__ void combine(ExpSum (&own)[pack], int column, int walker) {
#pragma unroll
    for (int distance = columns; distance < columns * near; distance *= 2) {
#pragma unroll
        for (int j = 0; j < pack; j++) {
            ExpSum other;
            other.largest = __shfl_xor_sync(0xffffffffu, own[j].largest, distance);
            other.total = __shfl_xor_sync(0xffffffffu, own[j].total, distance);
            own[j].merge(other);
        }
    }
    if constexpr (walkers > near) {
        __shared__ float largest[walkers / near][columns * pack];
        __shared__ float total[walkers / near][columns * pack];
        if (walker % near == 0) {
#pragma unroll
            for (int j = 0; j < pack; j++) {
                largest[walker / near][column * pack + j] = own[j].largest;
                total[walker / near][column * pack + j] = own[j].total;
            }
        }
        __syncthreads();
        for (int slot = threadIdx.x; slot < columns * pack; slot += THREADS) {
            ExpSum sum;
#pragma unroll 4
            for (int i = 0; i < walkers / near; i++) {
                ExpSum part;
                part.largest = largest[i][slot];
                part.total = total[i][slot];
                sum.merge(part);
            }
            largest[0][slot] = sum.largest;
            total[0][slot] = sum.total;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < pack; j++) {
            own[j].largest = largest[0][column * pack + j];
            own[j].total = total[0][column * pack + j];
        }
    }
}

// Reads scale · x of a walker's next rows; there is -inf beyond the last one, which counts for nothing.
__device__ __forceinline__ void get(float (&values)[turns][pack], const X::type *x, index_t row) {
#pragma unroll
    for (int turn = 0; turn < turns; turn++) {
        const index_t its = row + turn * walkers;
        const bool exists = its < width;
        if (exists) {
            load_floats(values[turn], x + its * X::stride(last));
        }
#pragma unroll
        for (int j = 0; j < pack; j++) {
            values[turn][j] = exists ? values[turn][j] * param::scale : -INFINITY_F;
        }
    }
}

template <bool logarithm>
__device__ __forceinline__ void put(Out::type *out, const float (&values)[pack], const ExpSum (&sums)[pack]) {
    float results[pack];
#pragma unroll
    for (int j = 0; j < pack; j++) {
        results[j] = Share<logarithm>(sums[j]).of(values[j]);
    }
    if constexpr (stores_packs) {
        store_floats(out, results);
    } else {
#pragma unroll
        for (int j = 0; j < pack; j++) {
            out[j * Out::stride(last - 1)] = from<Out::type>(results[j]);
        }
    }
}

template <bool logarithm>
__device__ __forceinline__ void softmax(const X::type *x, Out::type *out) {
    const int column = int(threadIdx.x) % columns;
    const int walker = int(threadIdx.x) / columns;
    const index_t number = index_t(blockIdx.x) * columns + column;
    const index_t end = number < columns_of_all ? width : 0;
    x += end ? column_offset<X>(number) : 0;
    out += end ? column_offset<Out>(number) : 0;
    ExpSum own[pack];
    float values[turns][pack];
    for (index_t row = walker; row < end; row += turns * walkers) {
        get(values, x, row);
#pragma unroll
        for (int j = 0; j < pack; j++) {
            float of_column[turns];
#pragma unroll
            for (int turn = 0; turn < turns; turn++) {
                of_column[turn] = values[turn][j];
            }
            own[j].add(of_column);
        }
    }
    combine(own, column, walker);
    for (index_t row = walker; row < end; row += turns * walkers) {
        get(values, x, row);
#pragma unroll
        for (int turn = 0; turn < turns; turn++) {
            const index_t its = row + turn * walkers;
            if (its < width) {
                put<logarithm>(out + its * Out::stride(last), values[turn], own);
            }
        }
    }
}

#kernel softmax_columns
KERNEL(softmax_columns) { softmax<false>(x, out); }

#kernel log_softmax_columns
KERNEL(log_softmax_columns) { softmax<true>(x, out); }
