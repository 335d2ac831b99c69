// out[..., m, n] = scale · left[..., m, k] · right[..., k, n] for few m and short k, bound by reading `right` once: a thread has all
// rows of one column, whose terms it reads as vectors (`along`), or else of `pack` neighbouring columns.

constexpr int rank = Out::rank;
constexpr int rows = Out::size(rank - 2);
constexpr index_t depth = Left::size(rank - 1);
constexpr int wide = along ? 1 : pack;     // columns of a thread
constexpr int deep = along ? pack : 1;     // terms of a step
constexpr index_t across = Out::size(rank - 1) / wide;

KERNEL(few_rows) {
    const index_t thread = index_t(blockIdx.x) * THREADS + threadIdx.x;
    if (thread >= Out::numel / (rows * wide)) {
        return;
    }
    const index_t batch = thread / across;
    const index_t column = thread % across * wide;
    left += leading_offset<Left, rank - 2>(batch);
    right += leading_offset<Right, rank - 2>(batch) + column * Right::stride(rank - 1);
    out += leading_offset<Out, rank - 2>(batch) + column * Out::stride(rank - 1);
    float sums[rows][wide] = {};
#pragma unroll 4
    for (index_t first = 0; first < depth; first += deep) {
        float values[pack];
        load_floats(values, right + first * Right::stride(rank - 2));
#pragma unroll
        for (int row = 0; row < rows; row++) {
#pragma unroll
            for (int term = 0; term < deep; term++) {
                const float factor =
                    to_float(left[row * Left::stride(rank - 2) + (first + term) * Left::stride(rank - 1)]);
#pragma unroll
                for (int i = 0; i < wide; i++) {
                    sums[row][i] += factor * values[along ? term : i];
                }
            }
        }
    }
#pragma unroll
    for (int row = 0; row < rows; row++) {
#pragma unroll
        for (int i = 0; i < wide; i++) {
            sums[row][i] *= param::scale;
        }
        if constexpr (wide > 1 && whole) {
            store_floats(out + row * Out::stride(rank - 2), sums[row]);
        } else {
#pragma unroll
            for (int i = 0; i < wide; i++) {
                out[row * Out::stride(rank - 2) + i * Out::stride(rank - 1)] = from<Out::type>(sums[row][i]);
            }
        }
    }
}
