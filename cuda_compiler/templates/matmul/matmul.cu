// Matrix products that cuBLAS does not take, and what follows or precedes those that it does.

#kernel tiled_linear tiled_batched
// left is [..., M, K], right [..., N, K], both with any strides: a block makes a tile of 64 × 64, 16 terms at a time;
// each of its 256 threads 4 × 4 elements of it.
constexpr int tile = 64;
constexpr int depth = 16;
constexpr int side = 4;
constexpr int stage = tile + 4;  // so that a column's elements lie in different banks

constexpr bool whole = !is_float<Left::type>::value && !is_float<Right::type>::value;

template <bool integers>
struct Summed { using type = float; };
template <>
struct Summed<true> { using type = unsigned; };  // integers wrap around
using Sum = Summed<whole>::type;

template <typename T>
__device__ __forceinline__ Sum term(T value) {
    if constexpr (whole) {
        return Sum(to_int(value));
    } else {
        return to_float(value);
    }
}

// Stages [tile rows, depth] of a matrix, transposed; zeros beyond its edges. Consecutive threads read along the dimension
// of unit stride.
template <typename V>
__device__ __forceinline__ void stage_tile(
    Sum (&target)[depth][stage], const typename V::type *matrix, index_t first_row, index_t first_term
) {
    constexpr int rank = V::rank;
    constexpr bool along_terms = V::stride(rank - 1) == 1;
#pragma unroll
    for (int turn = 0; turn < tile * depth / THREADS; turn++) {
        const int i = turn * THREADS + threadIdx.x;
        const int row = along_terms ? i / depth : i % tile;
        const int k = along_terms ? i % depth : i / tile;
        const index_t matrix_row = first_row + row;
        const index_t matrix_term = first_term + k;
        const bool inside = matrix_row < V::size(rank - 2) && matrix_term < V::size(rank - 1);
        target[k][row] = inside
            ? term(matrix[matrix_row * V::stride(rank - 2) + matrix_term * V::stride(rank - 1)]) : Sum(0);
    }
}

// Hands every element of the product to finish(sum, row, column, batch).
template <typename Finish>
__device__ __forceinline__ void product(const Left::type *left, const Right::type *right, Finish finish) {
    __shared__ Sum left_tile[depth][stage];
    __shared__ Sum right_tile[depth][stage];
    constexpr index_t m = Left::size(Left::rank - 2);
    constexpr index_t n = Right::size(Right::rank - 2);
    constexpr index_t k = Left::size(Left::rank - 1);
    constexpr index_t across = (n + tile - 1) / tile;
    constexpr index_t down = (m + tile - 1) / tile;
    const index_t batch = blockIdx.x / (across * down);
    const index_t first_row = blockIdx.x / across % down * tile;
    const index_t first_column = blockIdx.x % across * tile;
    left += leading_offset<Left, Left::rank - 2>(batch);
    right += leading_offset<Right, Right::rank - 2>(batch);
    const int row = threadIdx.x / (tile / side) * side;
    const int column = threadIdx.x % (tile / side) * side;
    Sum sums[side][side] = {};
    for (index_t start = 0; start < k; start += depth) {
        stage_tile<Left>(left_tile, left, first_row, start);
        stage_tile<Right>(right_tile, right, first_column, start);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < depth; i++) {
            const Pack<Sum, side> a = load_pack<side>(&left_tile[i][row]);
            const Pack<Sum, side> b = load_pack<side>(&right_tile[i][column]);
#pragma unroll
            for (int y = 0; y < side; y++) {
#pragma unroll
                for (int x = 0; x < side; x++) {
                    sums[y][x] += a.item[y] * b.item[x];
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int y = 0; y < side; y++) {
#pragma unroll
        for (int x = 0; x < side; x++) {
            if (first_row + row + y < m && first_column + column + x < n) {
                finish(sums[y][x], first_row + row + y, first_column + column + x, batch);
            }
        }
    }
}

#kernel tiled_linear
struct Epilogue {
    const Bias::type *bias;
    const Residual::type *residual;
    Out::type *out;

    __device__ __forceinline__ void operator()(Sum sum, index_t row, index_t column, index_t) const {
        float value = whole ? float(int(sum)) : float(sum);
        if constexpr (Bias::present) {
            value += to_float(bias[column * Bias::stride(0)]);
        }
        value = activate(value);
        if constexpr (Residual::present) {
            value += to_float(residual[row * Residual::stride(0) + column * Residual::stride(1)]);
        }
        out[row * Out::stride(0) + column * Out::stride(1)] = from<Out::type>(value);
    }
};

KERNEL(tiled_linear) { product(left, right, Epilogue{bias, residual, out}); }

#kernel tiled_batched
struct Epilogue {
    Out::type *out;

    __device__ __forceinline__ void operator()(Sum sum, index_t row, index_t column, index_t batch) const {
        constexpr int rank = Out::rank;
        const index_t place = leading_offset<Out, rank - 2>(batch) + row * Out::stride(rank - 2)
            + column * Out::stride(rank - 1);
        if constexpr (whole) {
            out[place] = from<Out::type>(int(sum));
        } else {
            out[place] = from<Out::type>(param::scale * sum);
        }
    }
};

KERNEL(tiled_batched) { product(left, right, Epilogue{out}); }

#kernel linear_epilogue
// out = act(product + bias) + residual, `pack` columns to a thread. With `rows` and `columns`, the product is that of codes:
// first it is multiplied with these scales.
constexpr index_t packs = Out::size(1) / pack;

template <typename T>
__device__ __forceinline__ void add(float (&values)[pack], const T *data, index_t place) {
    if constexpr (pack > 1) {
        float read[pack];
        load_floats(read, data + place);
#pragma unroll
        for (int i = 0; i < pack; i++) {
            values[i] += read[i];
        }
    } else {
        values[0] += to_float(data[place]);
    }
}

KERNEL(linear_epilogue) {
    const index_t thread = index_t(blockIdx.x) * THREADS + threadIdx.x;
    const index_t row = thread / packs;
    const index_t column = thread % packs * pack;
    if (row >= Out::size(0)) {
        return;
    }
    float values[pack] = {};
    add(values, product, row * Product::stride(0) + column * Product::stride(1));
    if constexpr (Columns::present) {
        float scales[pack] = {};
        add(scales, columns, column);
        const float of_row = to_float(rows[row]);
#pragma unroll
        for (int i = 0; i < pack; i++) {
            values[i] *= scales[i] * of_row;
        }
    }
    if constexpr (Bias::present) {
        add(values, bias, column * Bias::stride(0));
    }
#pragma unroll
    for (int i = 0; i < pack; i++) {
        values[i] = activate(values[i]);
    }
    if constexpr (Residual::present) {
        add(values, residual, row * Residual::stride(0) + column * Residual::stride(1));
    }
    const index_t place = row * Out::stride(0) + column * Out::stride(1);
    if constexpr (pack > 1) {
        store_floats(out + place, values);
    } else {
        out[place] = from<Out::type>(values[0]);
    }
}
