// Matrix products with float sums: tiled ones by SIMD-group matrices, and one row times a matrix, which is bound by
// the bandwidth of reading that matrix once.

#include "linear.metal"

constant uint weight_type [[function_constant(7)]];
constant uint a_type [[function_constant(8)]];
constant uint b_type [[function_constant(9)]];
constant uint product_type [[function_constant(10)]];
constant bool transpose_b [[function_constant(11)]];
constant bool vectorized [[function_constant(12)]];

struct MatmulParams {
    uint m;
    uint n;
    uint k;
};

struct BatchedMatmulParams {
    uint m;
    uint n;
    uint k;
    uint batch;
    float scale;
};

// The block of left[M, K] · right that begins at the threadgroup's place; each SIMD group leaves its quadrant in
// `shared`, for its own lanes to read, and the result points to it. right is [K, N], or [N, K] where `transposed`.
template <bool transposed>
inline threadgroup const float *product(
    threadgroup float *shared, device const void *left_data, uint left_type, Matrix left, device const void *right_data,
    uint right_type, Matrix right, uint2 block, Quadrant quadrant, uint thread_index
) {
    threadgroup float *left_tile = shared;
    threadgroup float *right_tile = shared + STAGE_SIZE;
    threadgroup const float *left_part = left_tile + quadrant.block_row * STAGE_STRIDE;
    threadgroup const float *right_part =
        right_tile + quadrant.block_column * (transposed ? STAGE_STRIDE : 1);
    ProductBlock<TILE / FRAGMENT, TILE / FRAGMENT> sums;
    sums.clear();
    for (uint k = 0; k < left.columns; k += BLOCK) {
        stage(left_tile, left_data, left_type, left, block.y * BLOCK, k, vectorized, thread_index);
        if (transposed) {
            stage(right_tile, right_data, right_type, right, block.x * BLOCK, k, vectorized, thread_index);
        } else {
            stage(right_tile, right_data, right_type, right, k, block.x * BLOCK, vectorized, thread_index);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sums.template accumulate<transposed>(left_part, STAGE_STRIDE, right_part, STAGE_STRIDE, BLOCK);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup float *result = shared + (quadrant.block_row * 2 + quadrant.block_column) * TILE;
    sums.store(result);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    return result;
}

// out[M, N] = act(x[M, K] · right + bias) + residual
template <bool transposed>
inline void linear(
    threadgroup float *shared, device const void *x, device const void *weight, Matrix right, device const void *bias,
    device const void *residual, device void *out, constant MatmulParams &params, constant Strided *views, uint2 block,
    uint thread_index, uint simdgroup, uint lane
) {
    const Matrix left = {0, params.m, params.k, views[0].strides[0], 1};
    const Quadrant quadrant = quadrant_of(block, simdgroup);
    threadgroup const float *result = product<transposed>(
        shared, x, x_type, left, weight, weight_type, right, block, quadrant, thread_index
    );
    store_quadrant(result, bias, residual, views[3], out, views[4], params.m, params.n, quadrant, lane);
}

// out = act(product + bias) + residual, for products that MPS has made; product and out are the same memory there.
kernel void linear_epilogue_kernel(
    device const void *product [[buffer(0)]],
    device const void *bias [[buffer(1), function_constant(has_bias)]],
    device const void *residual [[buffer(2), function_constant(has_residual)]],
    device void *out [[buffer(3)]],
    constant Strided *views [[buffer(5)]],
    uint2 position [[thread_position_in_grid]])
{
    const uint column = position.x;
    const uint row = position.y;
    if (column >= views[3].shape[1] || row >= views[3].shape[0]) {
        return;
    }
    const float sum = load(product, product_type, row * views[0].strides[0] + column);
    const float value = finish(sum, bias, column, residual, row * views[2].strides[0] + column);
    store(out, out_type, row * views[3].strides[0] + column, value);
}

// weight is [N, K] with unit stride along K
kernel void matmul_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device const void *residual [[buffer(3), function_constant(has_residual)]],
    device void *out [[buffer(4)]],
    constant MatmulParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint2 block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[2 * STAGE_SIZE];
    const Matrix right = {0, params.n, params.k, views[1].strides[0], 1};
    linear<true>(
        shared, x, weight, right, bias, residual, out, params, views, block, thread_index, simdgroup, lane
    );
}

// weight is [N, K] with unit stride along N
kernel void matmul_notrans_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device const void *residual [[buffer(3), function_constant(has_residual)]],
    device void *out [[buffer(4)]],
    constant MatmulParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint2 block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[2 * STAGE_SIZE];
    const Matrix right = {0, params.k, params.n, views[1].strides[1], 1};
    linear<false>(
        shared, x, weight, right, bias, residual, out, params, views, block, thread_index, simdgroup, lane
    );
}

// Integers multiply exactly, which float sums do not beyond 2^24; they come with a scale of 1.
inline void integer_product(
    device const void *a, Matrix left, device const void *b, Matrix right, device void *out, Matrix result,
    uint2 block, uint thread_index
) {
    for (uint i = thread_index; i < BLOCK * BLOCK; i += BLOCK_THREADS) {
        const uint row = block.y * BLOCK + i / BLOCK;
        const uint column = block.x * BLOCK + i % BLOCK;
        if (row < result.rows && column < result.columns) {
            uint sum = 0;
            uint left_index = left.start + row * left.row_stride;
            uint right_index = right.start + column * right.column_stride;
            for (uint k = 0; k < left.columns; k++) {
                sum += uint(load_int(a, a_type, left_index)) * uint(load_int(b, b_type, right_index));
                left_index += left.column_stride;
                right_index += right.row_stride;
            }
            store_int(
                out, out_type, result.start + row * result.row_stride + column * result.column_stride, int(sum)
            );
        }
    }
}

inline Matrix matrix_of(constant Strided &view, uint batch) {
    const uint outer = view.rank - 2;
    return {
        offset_of(view, batch, outer), view.shape[outer], view.shape[outer + 1], view.strides[outer],
        view.strides[outer + 1]
    };
}

inline Matrix transpose(Matrix matrix) {
    return {matrix.start, matrix.columns, matrix.rows, matrix.column_stride, matrix.row_stride};
}

// out[…, M, N] = scale · a[…, M, K] · b[…, K, N]; b has unit stride along K where `transpose_b`
kernel void batched_matmul_kernel(
    device const void *a [[buffer(0)]],
    device const void *b [[buffer(1)]],
    device void *out [[buffer(2)]],
    constant BatchedMatmulParams &params [[buffer(3)]],
    constant Strided *views [[buffer(4)]],
    uint3 block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[2 * STAGE_SIZE];
    const Matrix left = matrix_of(views[0], block.z);
    const Matrix right = matrix_of(views[1], block.z);
    const Matrix result = matrix_of(views[2], block.z);
    if (a_type == TYPE_INT && b_type == TYPE_INT) {
        integer_product(a, left, b, right, out, result, block.xy, thread_index);
        return;
    }
    const Quadrant quadrant = quadrant_of(block.xy, simdgroup);
    threadgroup const float *sums;
    if (transpose_b) {
        sums = product<true>(
            shared, a, a_type, left, b, b_type, transpose(right), block.xy, quadrant, thread_index
        );
    } else {
        sums = product<false>(shared, a, a_type, left, b, b_type, right, block.xy, quadrant, thread_index);
    }
    for (uint i = lane; i < TILE * TILE; i += SIMD_WIDTH) {
        const uint row = quadrant.row + i / TILE;
        const uint column = quadrant.column + i % TILE;
        if (row < params.m && column < params.n) {
            const uint index = result.start + row * result.row_stride + column * result.column_stride;
            store(out, out_type, index, params.scale * sums[i]);
        }
    }
}

// Dot products of x[K] with ROWS rows of a weight, which start at `starts` and have unit stride; x is read once for all
// of them, and so many loads are on their way at a time. Each SIMD group leaves its part in `partials`:
// [SIMD group, row].
template <uint ROWS>
inline void dot_rows(
    threadgroup float *partials, device const void *x, device const void *weight, thread const uint *starts, uint k,
    uint thread_index, uint threads, uint simdgroup, uint lane
) {
    float sums[ROWS];
#pragma unroll
    for (uint row = 0; row < ROWS; row++) {
        sums[row] = 0.0f;
    }
    uint scalar_start = 0;
    if (vectorized) {
        float4 quads[ROWS];
#pragma unroll
        for (uint row = 0; row < ROWS; row++) {
            quads[row] = float4(0.0f);
        }
        scalar_start = k / 4 * 4;
        for (uint i = 4 * thread_index; i < scalar_start; i += 4 * threads) {
            const float4 value = load4(x, x_type, i);
#pragma unroll
            for (uint row = 0; row < ROWS; row++) {
                quads[row] = fma(value, load4(weight, weight_type, starts[row] + i), quads[row]);
            }
        }
#pragma unroll
        for (uint row = 0; row < ROWS; row++) {
            sums[row] = (quads[row].x + quads[row].y) + (quads[row].z + quads[row].w);
        }
    }
    for (uint i = scalar_start + thread_index; i < k; i += threads) {
        const float value = load(x, x_type, i);
#pragma unroll
        for (uint row = 0; row < ROWS; row++) {
            sums[row] = fma(value, load(weight, weight_type, starts[row] + i), sums[row]);
        }
    }
    sum_over_lanes<ROWS>(partials, sums, simdgroup, lane);
}

// out[1, N] = act(x[1, K] · weight[N, K]ᵀ + bias) + residual; VEC_COLUMNS outputs by a threadgroup
kernel void matmul_vec_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device const void *residual [[buffer(3), function_constant(has_residual)]],
    device void *out [[buffer(4)]],
    constant MatmulParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float partials[VEC_COLUMNS * VEC_SIMDGROUPS];
    uint starts[VEC_COLUMNS];
    for (uint i = 0; i < VEC_COLUMNS; i++) {
        starts[i] = min(block * VEC_COLUMNS + i, params.n - 1) * views[1].strides[0];
    }
    dot_rows<VEC_COLUMNS>(
        partials, x, weight, starts, params.k, thread_index, threads, simdgroup, lane
    );
    const uint column = block * VEC_COLUMNS + thread_index;
    if (thread_index < VEC_COLUMNS && column < params.n) {
        const float sum = total<VEC_COLUMNS>(partials, thread_index, simdgroups);
        store(out, out_type, column, finish(sum, bias, column, residual, column));
    }
}

// out[1, N] = act(gate) · up, with [gate, up] = x[1, K] · weight[2N, K]ᵀ + bias
kernel void gated_matmul_vec_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device void *out [[buffer(3)]],
    constant MatmulParams &params [[buffer(4)]],
    constant Strided *views [[buffer(5)]],
    uint block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float partials[2 * VEC_COLUMNS * VEC_SIMDGROUPS];
    uint starts[2 * VEC_COLUMNS];
    for (uint i = 0; i < VEC_COLUMNS; i++) {
        const uint column = min(block * VEC_COLUMNS + i, params.n - 1);
        starts[i] = column * views[1].strides[0];
        starts[VEC_COLUMNS + i] = (params.n + column) * views[1].strides[0];
    }
    dot_rows<2 * VEC_COLUMNS>(
        partials, x, weight, starts, params.k, thread_index, threads, simdgroup, lane
    );
    const uint column = block * VEC_COLUMNS + thread_index;
    if (thread_index < VEC_COLUMNS && column < params.n) {
        float gate = total<2 * VEC_COLUMNS>(partials, thread_index, simdgroups);
        float up = total<2 * VEC_COLUMNS>(partials, VEC_COLUMNS + thread_index, simdgroups);
        if (has_bias) {
            gate += load(bias, bias_type, column);
            up += load(bias, bias_type, params.n + column);
        }
        store(out, out_type, column, activate(gate, activation) * up);
    }
}

// As matmul_vec_kernel, with a weight of unit stride along N: a lane per column, K split over the SIMD groups.
kernel void matmul_vec_notrans_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device const void *residual [[buffer(3), function_constant(has_residual)]],
    device void *out [[buffer(4)]],
    constant MatmulParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint block [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float partials[SIMD_WIDTH * VEC_SIMDGROUPS];
    const uint column = block * SIMD_WIDTH + lane;
    const uint last = params.n - 1;
    float sum = 0.0f;
    uint index = min(column, last) + simdgroup * views[1].strides[1];
    for (uint i = simdgroup; i < params.k; i += simdgroups) {
        sum = fma(load(x, x_type, i), load(weight, weight_type, index), sum);
        index += simdgroups * views[1].strides[1];
    }
    partials[simdgroup * SIMD_WIDTH + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0 && column < params.n) {
        const float value = total<SIMD_WIDTH>(partials, lane, simdgroups);
        store(out, out_type, column, finish(value, bias, column, residual, column));
    }
}
