// What the products of linear layers share: the tiles of those with many rows, the sums of those with one, and what
// follows a product.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint bias_type [[function_constant(1)]];
constant uint residual_type [[function_constant(2)]];
constant uint out_type [[function_constant(3)]];
constant bool has_bias [[function_constant(4)]];
constant bool has_residual [[function_constant(5)]];
constant uint activation [[function_constant(6)]];

// A threadgroup makes BLOCK × BLOCK outputs, BLOCK terms of their sums at a time; each of its SIMD groups a quadrant.
#define BLOCK (2 * TILE)
#define BLOCK_THREADS (4 * SIMD_WIDTH)
// Rows are staged four floats further apart than they are long, so that a column's elements lie in different banks.
#define STAGE_STRIDE (BLOCK + 4)
#define STAGE_SIZE (BLOCK * STAGE_STRIDE)

// A matrix in device memory. Consecutive threads read along its columns, so these are the close ones.
struct Matrix {
    uint start;
    uint rows;
    uint columns;
    uint row_stride;
    uint column_stride;
};

// Where a SIMD group of a tiled product works.
struct Quadrant {
    uint row;  // of the whole product
    uint column;
    uint block_row;  // within the threadgroup's block
    uint block_column;
};

inline Quadrant quadrant_of(uint2 block, uint simdgroup) {
    Quadrant quadrant;
    quadrant.block_row = simdgroup / 2 * TILE;
    quadrant.block_column = simdgroup % 2 * TILE;
    quadrant.row = block.y * BLOCK + quadrant.block_row;
    quadrant.column = block.x * BLOCK + quadrant.block_column;
    return quadrant;
}

// Puts the BLOCK × BLOCK part of a matrix that begins at (row, column) into threadgroup memory, zeros where the matrix
// has ended; four at a time where `in_quads`, for which its rows have to lie at multiples of four elements.
inline void stage(
    threadgroup float *tile, device const void *data, uint type, Matrix matrix, uint row, uint column, bool in_quads,
    uint thread_index
) {
    if (in_quads) {
        for (uint i = thread_index; i < BLOCK * BLOCK / 4; i += BLOCK_THREADS) {
            const uint r = i / (BLOCK / 4);
            const uint c = i % (BLOCK / 4) * 4;
            float4 values = float4(0.0f);
            if (row + r < matrix.rows) {
                const uint index = matrix.start + (row + r) * matrix.row_stride + column + c;
                if (column + c + 4 <= matrix.columns) {
                    values = load4(data, type, index);
                } else {
                    for (uint j = 0; column + c + j < matrix.columns; j++) {
                        values[j] = load(data, type, index + j);
                    }
                }
            }
            for (uint j = 0; j < 4; j++) {
                tile[r * STAGE_STRIDE + c + j] = values[j];
            }
        }
    } else {
        for (uint i = thread_index; i < BLOCK * BLOCK; i += BLOCK_THREADS) {
            const uint r = i / BLOCK;
            const uint c = i % BLOCK;
            float value = 0.0f;
            if (row + r < matrix.rows && column + c < matrix.columns) {
                const uint index =
                    matrix.start + (row + r) * matrix.row_stride + (column + c) * matrix.column_stride;
                value = load(data, type, index);
            }
            tile[r * STAGE_STRIDE + c] = value;
        }
    }
}

// act(value + bias) + residual, in float, before the one rounding.
inline float finish(
    float value, device const void *bias, uint column, device const void *residual, uint residual_index
) {
    if (has_bias) {
        value += load(bias, bias_type, column);
    }
    value = activate(value, activation);
    if (has_residual) {
        value += load(residual, residual_type, residual_index);
    }
    return value;
}

// Finishes a SIMD group's quadrant of sums, which is in threadgroup memory, and writes what of it is in out[m, n].
inline void store_quadrant(
    threadgroup const float *sums, device const void *bias, device const void *residual, constant Strided &residual_view,
    device void *out, constant Strided &out_view, uint m, uint n, Quadrant quadrant, uint lane
) {
    for (uint i = lane; i < TILE * TILE; i += SIMD_WIDTH) {
        const uint row = quadrant.row + i / TILE;
        const uint column = quadrant.column + i % TILE;
        if (row < m && column < n) {
            const float value = finish(sums[i], bias, column, residual, row * residual_view.strides[0] + column);
            store(out, out_type, row * out_view.strides[0] + column, value);
        }
    }
}

#define VEC_SIMDGROUPS (VEC_TPG / SIMD_WIDTH)
static_assert(VEC_COLUMNS % 4 == 0, "sums are reduced four at a time");

// Leaves the sums of ROWS rows over a SIMD group's lanes in `partials`: [SIMD group, row].
template <uint ROWS>
inline void sum_over_lanes(threadgroup float *partials, thread const float *sums, uint simdgroup, uint lane) {
#pragma unroll
    for (uint row = 0; row < ROWS; row += 4) {
        const float4 total = simd_sum(float4(sums[row], sums[row + 1], sums[row + 2], sums[row + 3]));
        if (lane == 0) {
            for (uint i = 0; i < 4; i++) {
                partials[simdgroup * ROWS + row + i] = total[i];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A row's sum over the SIMD groups.
template <uint ROWS>
inline float total(threadgroup const float *partials, uint row, uint simdgroups) {
    float sum = 0.0f;
    for (uint i = 0; i < simdgroups; i++) {
        sum += partials[i * ROWS + row];
    }
    return sum;
}
