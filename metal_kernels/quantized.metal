// Products and lookups with weights in few bits, which are taken apart in registers; sums are float. The format is
// described in npu_compiler/graph/quantization.py. Codes of float8_e4m3 are taken for finite.

#include "linear.metal"

constant uint scales_type [[function_constant(7)]];
constant uint offset_type [[function_constant(8)]];
constant bool has_offset [[function_constant(9)]];
constant uint codes [[function_constant(10)]];
constant uint offsets [[function_constant(11)]];
constant bool checked [[function_constant(12)]];
constant bool x_vectorized [[function_constant(13)]];
constant bool data_vectorized [[function_constant(14)]];
constant bool out_vectorized [[function_constant(15)]];

// In the order in which the declarations name them (`KERNEL_CODES` in npu_compiler/target_config.py).
enum Codes : uint { INT4, INT8, FLOAT8_E4M3, FLOAT4_E2M1, IQ4_NL };
constant bool in_nibbles = codes == INT4 || codes == FLOAT4_E2M1 || codes == IQ4_NL;
// The numbers of 4-bit codes that choose from a table, those of `CODE_FORMATS`.
constant float FLOAT4_NUMBERS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constant float IQ4_NUMBERS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
enum Offsets : uint { NO_OFFSETS, MINIMUM, ZERO_POINT };

struct QuantizedMatmulParams {
    uint m;
    uint n;
    uint k;
    uint groups;
};

struct QuantizedEmbeddingParams {
    uint rows;
    uint k;
    uint groups;
};

// A weight [rows, k]. Strides are from one row to the next, in elements of each part.
struct QuantizedWeight {
    device const uchar *data;
    device const void *scales;
    device const void *offset;
    uint data_stride;
    uint scales_stride;
    uint offset_stride;
    uint k;
    uint group;  // elements that share a scale

    float scale(uint row, uint group_index) const {
        return load(scales, scales_type, row * scales_stride + group_index);
    }

    // What is added to each product of a scale and a code.
    float minimum(uint row, uint group_index) const {
        return offsets == MINIMUM ? load(offset, offset_type, row * offset_stride + group_index) : 0.0f;
    }

    // The code that stands for 0.
    float zero(uint row, uint group_index) const {
        if (offsets == ZERO_POINT) {
            const uchar code = ((device const uchar *)offset)[row * offset_stride + group_index];
            return codes == INT8 ? float(as_type<char>(code)) : float(code);
        }
        return offsets == NO_OFFSETS && codes == INT4 ? 8.0f : 0.0f;
    }
};

inline QuantizedWeight weight_of(
    device const void *data, device const void *scales, device const void *offset, constant Strided *views, uint k,
    uint groups
) {
    return {
        (device const uchar *)data, scales, offset, views[0].strides[0], views[1].strides[0], views[2].strides[0], k,
        k / groups
    };
}

inline float4 from_float8(uint4 bytes) {
    const uint4 magnitude = bytes & 127u;
    // The exponent's bias of 7 becomes 127; subnormals, multiples of 2^-9, are made without subnormal floats, which a
    // GPU may take for 0.
    const float4 normal = as_type<float4>((magnitude << 20u) + (120u << 23));
    const float4 value = select(normal, float4(magnitude) * 0.001953125f, magnitude < 8u);
    return as_type<float4>(as_type<uint4>(value) | (bytes & 128u) << 24u);
}

// Four codes as numbers: those in the low 16 bits, or the four bytes.
inline float4 numbers(uint bits) {
    const uint4 nibbles = (uint4(bits) >> uint4(0, 4, 8, 12)) & 15u;
    switch (codes) {
        case INT4: return float4(nibbles);
        case FLOAT4_E2M1:
            return float4(
                FLOAT4_NUMBERS[nibbles.x], FLOAT4_NUMBERS[nibbles.y], FLOAT4_NUMBERS[nibbles.z], FLOAT4_NUMBERS[nibbles.w]
            );
        case IQ4_NL:
            return float4(IQ4_NUMBERS[nibbles.x], IQ4_NUMBERS[nibbles.y], IQ4_NUMBERS[nibbles.z], IQ4_NUMBERS[nibbles.w]);
        case INT8: return float4(as_type<char4>(bits));
        case FLOAT8_E4M3: return from_float8((uint4(bits) >> uint4(0, 8, 16, 24)) & 255u);
    }
    return float4(NAN);
}

// Four codes of 4 bits where they lie, 1, 16, 256 and 4096 times their values, which spares the shifts; what they are
// multiplied with makes up for it.
inline float4 in_place(uint bits) {
    return float4(uint4(bits) & uint4(0xf, 0xf0, 0xf00, 0xf000));
}

inline float4 for_codes_in_place(float4 x) {
    return x * float4(1.0f, 0.0625f, 0.00390625f, 0.000244140625f);
}

// Whether four elements at a multiple of four share a group, and their codes lie where they can be read at once.
inline bool in_quads(QuantizedWeight weight) {
    return data_vectorized && weight.group % 4 == 0;
}

// Four elements of a row from `first` on, a multiple of four below k; zeros where the row has ended.
inline float4 elements(QuantizedWeight weight, uint row, uint first) {
    device const uchar *data = weight.data + row * weight.data_stride;
    float4 values = float4(0.0f);
    if (in_quads(weight)) {
        const uint bits =
            in_nibbles ? *(device const ushort *)(data + first / 2) : *(device const uint *)(data + first);
        const uint group = first / weight.group;
        return weight.scale(row, group) * (numbers(bits) - weight.zero(row, group)) + weight.minimum(row, group);
    }
    for (uint i = 0; i < 4 && first + i < weight.k; i++) {
        const uint index = first + i;
        const uint bits = in_nibbles ? data[index / 2] >> index % 2 * 4 : data[index];
        const uint group = index / weight.group;
        values[i] = weight.scale(row, group) * (numbers(bits).x - weight.zero(row, group)) + weight.minimum(row, group);
    }
    return values;
}

// The part of a weight's rows from `row` on, and of their elements from `column` on, as `stage` leaves a matrix.
inline void stage_weight(
    threadgroup float *tile, QuantizedWeight weight, uint rows, uint row, uint column, uint thread_index
) {
    for (uint i = thread_index; i < BLOCK * BLOCK / 4; i += BLOCK_THREADS) {
        const uint r = i / (BLOCK / 4);
        const uint c = i % (BLOCK / 4) * 4;
        float4 values = float4(0.0f);
        if (row + r < rows && column + c < weight.k) {
            values = elements(weight, row + r, column + c);
        }
        for (uint j = 0; j < 4; j++) {
            tile[r * STAGE_STRIDE + c + j] = values[j];
        }
    }
}

// out[M, N] = act(x[M, K] · weight[N, K]ᵀ + bias) + residual
kernel void quantized_matmul_kernel(
    device const void *x [[buffer(0)]],
    device const void *data [[buffer(1)]],
    device const void *scales [[buffer(2)]],
    device const void *offset [[buffer(3), function_constant(has_offset)]],
    device const void *bias [[buffer(4), function_constant(has_bias)]],
    device const void *residual [[buffer(5), function_constant(has_residual)]],
    device void *out [[buffer(6)]],
    constant QuantizedMatmulParams &params [[buffer(7)]],
    constant Strided *views [[buffer(8)]],
    uint2 block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[2 * STAGE_SIZE];
    threadgroup float *left_tile = shared;
    threadgroup float *right_tile = shared + STAGE_SIZE;
    const Matrix left = {0, params.m, params.k, views[0].strides[0], 1};
    const QuantizedWeight weight = weight_of(data, scales, offset, views + 1, params.k, params.groups);
    const Quadrant quadrant = quadrant_of(block, simdgroup);
    ProductBlock<TILE / FRAGMENT, TILE / FRAGMENT> sums;
    sums.clear();
    for (uint k = 0; k < params.k; k += BLOCK) {
        stage(left_tile, x, x_type, left, block.y * BLOCK, k, x_vectorized, thread_index);
        stage_weight(right_tile, weight, params.n, block.x * BLOCK, k, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sums.accumulate<true>(
            left_tile + quadrant.block_row * STAGE_STRIDE, STAGE_STRIDE,
            right_tile + quadrant.block_column * STAGE_STRIDE, STAGE_STRIDE, BLOCK
        );
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup float *result = shared + (quadrant.block_row * 2 + quadrant.block_column) * TILE;
    sums.store(result);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    store_quadrant(result, bias, residual, views[5], out, views[6], params.m, params.n, quadrant, lane);
}

// A thread's share of a row at a time: 16 bytes of codes.
#define CHUNK_BYTES 16

// Dot products of x[K] with ROWS rows of a weight; x is read once for all of them, and so many loads are on their way
// at a time. Each SIMD group leaves its part in `partials`: [SIMD group, row].
//
// What a group's elements have in common is left out of the sum over its codes: scale · (Σ x · code - zero · Σ x) +
// minimum · Σ x. An x that is not finite makes NaN of them.
template <uint ROWS>
inline void dot_rows(
    threadgroup float *partials, device const void *x, QuantizedWeight weight, thread const uint *rows,
    uint thread_index, uint threads, uint simdgroup, uint lane
) {
    float sums[ROWS];
#pragma unroll
    for (uint row = 0; row < ROWS; row++) {
        sums[row] = 0.0f;
    }
    const uint chunk = in_nibbles ? 2 * CHUNK_BYTES : CHUNK_BYTES;
    if (x_vectorized && data_vectorized && weight.group % chunk == 0) {
        for (uint first = thread_index * chunk; first < weight.k; first += threads * chunk) {
            uint4 words[ROWS];
            float products[ROWS];
#pragma unroll
            for (uint row = 0; row < ROWS; row++) {
                const uint start = rows[row] * weight.data_stride + first / chunk * CHUNK_BYTES;
                words[row] = *(device const uint4 *)(weight.data + start);
                products[row] = 0.0f;
            }
            float x_sum = 0.0f;
#pragma unroll
            for (uint i = 0; i < CHUNK_BYTES / 2; i++) {
                if (i % 2 == 1 && !in_nibbles) {
                    continue;  // a word holds four codes only
                }
                float4 value = load4(x, x_type, first + (in_nibbles ? 4 * i : 2 * i));
                x_sum += (value.x + value.y) + (value.z + value.w);
                if (codes == INT4) {
                    value = for_codes_in_place(value);
                }
#pragma unroll
                for (uint row = 0; row < ROWS; row++) {
                    const uint bits = words[row][i / 2] >> i % 2 * 16;
                    products[row] += dot(value, codes == INT4 ? in_place(bits) : numbers(bits));
                }
            }
            const uint group = first / weight.group;
#pragma unroll
            for (uint row = 0; row < ROWS; row++) {
                const float product = products[row] - weight.zero(rows[row], group) * x_sum;
                sums[row] += weight.scale(rows[row], group) * product + weight.minimum(rows[row], group) * x_sum;
            }
        }
    } else {
        for (uint first = 4 * thread_index; first < weight.k; first += 4 * threads) {
            float4 value = float4(0.0f);
            for (uint i = 0; i < 4 && first + i < weight.k; i++) {
                value[i] = load(x, x_type, first + i);
            }
#pragma unroll
            for (uint row = 0; row < ROWS; row++) {
                sums[row] += dot(value, elements(weight, rows[row], first));
            }
        }
    }
    sum_over_lanes<ROWS>(partials, sums, simdgroup, lane);
}

// out[1, N] = act(x[1, K] · weight[N, K]ᵀ + bias) + residual; VEC_COLUMNS outputs by a threadgroup
kernel void quantized_matmul_vec_kernel(
    device const void *x [[buffer(0)]],
    device const void *data [[buffer(1)]],
    device const void *scales [[buffer(2)]],
    device const void *offset [[buffer(3), function_constant(has_offset)]],
    device const void *bias [[buffer(4), function_constant(has_bias)]],
    device const void *residual [[buffer(5), function_constant(has_residual)]],
    device void *out [[buffer(6)]],
    constant QuantizedMatmulParams &params [[buffer(7)]],
    constant Strided *views [[buffer(8)]],
    uint block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float partials[VEC_COLUMNS * VEC_SIMDGROUPS];
    const QuantizedWeight weight = weight_of(data, scales, offset, views + 1, params.k, params.groups);
    uint rows[VEC_COLUMNS];
    for (uint i = 0; i < VEC_COLUMNS; i++) {
        rows[i] = min(block * VEC_COLUMNS + i, params.n - 1);
    }
    dot_rows<VEC_COLUMNS>(partials, x, weight, rows, thread_index, threads, simdgroup, lane);
    const uint column = block * VEC_COLUMNS + thread_index;
    if (thread_index < VEC_COLUMNS && column < params.n) {
        const float sum = total<VEC_COLUMNS>(partials, thread_index, simdgroups);
        store(out, out_type, column, finish(sum, bias, column, residual, column));
    }
}

// out[1, N] = act(gate) · up, with [gate, up] = x[1, K] · weight[2N, K]ᵀ + bias
kernel void quantized_gated_matmul_vec_kernel(
    device const void *x [[buffer(0)]],
    device const void *data [[buffer(1)]],
    device const void *scales [[buffer(2)]],
    device const void *offset [[buffer(3), function_constant(has_offset)]],
    device const void *bias [[buffer(4), function_constant(has_bias)]],
    device void *out [[buffer(5)]],
    constant QuantizedMatmulParams &params [[buffer(6)]],
    constant Strided *views [[buffer(7)]],
    uint block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float partials[2 * VEC_COLUMNS * VEC_SIMDGROUPS];
    const QuantizedWeight weight = weight_of(data, scales, offset, views + 1, params.k, params.groups);
    uint rows[2 * VEC_COLUMNS];
    for (uint i = 0; i < VEC_COLUMNS; i++) {
        rows[i] = min(block * VEC_COLUMNS + i, params.n - 1);
        rows[VEC_COLUMNS + i] = params.n + rows[i];
    }
    dot_rows<2 * VEC_COLUMNS>(partials, x, weight, rows, thread_index, threads, simdgroup, lane);
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

// Rows of a table by number: four columns a thread; y counts the ids.
kernel void quantized_embedding_kernel(
    device const void *data [[buffer(0)]],
    device const void *scales [[buffer(1)]],
    device const void *offset [[buffer(2), function_constant(has_offset)]],
    device const int *ids [[buffer(3)]],
    device void *out [[buffer(4)]],
    constant QuantizedEmbeddingParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint2 position [[thread_position_in_grid]])
{
    const uint first = 4 * position.x;
    if (first >= params.k) {
        return;
    }
    constant Strided &target = views[4];
    const uint row = uint(ids[offset_of(views[3], position.y)]);
    float4 values = float4(NAN);
    if (checked || row < params.rows) {
        values = elements(weight_of(data, scales, offset, views, params.k, params.groups), row, first);
    }
    const uint to = offset_of(target, position.y, target.rank - 1);
    if (out_vectorized && first + 4 <= params.k) {
        store4(out, out_type, to + first, values);
        return;
    }
    const uint step = target.strides[target.rank - 1];
    for (uint i = 0; i < 4 && first + i < params.k; i++) {
        store(out, out_type, to + (first + i) * step, values[i]);
    }
}

struct QuantizedExpertMatmulParams {
    uint e;
    uint k;
    uint groups;
};

// Each row with the matrix of its expert; a thread per output element.
kernel void quantized_expert_matmul_kernel(
    device const void *x [[buffer(0)]],
    device const void *data [[buffer(1)]],
    device const void *scales [[buffer(2)]],
    device const void *offset [[buffer(3), function_constant(has_offset)]],
    device const int *experts [[buffer(4)]],
    device const void *bias [[buffer(5), function_constant(has_bias)]],
    device void *out [[buffer(6)]],
    constant QuantizedExpertMatmulParams &params [[buffer(7)]],
    constant Strided *views [[buffer(8)]],
    uint2 position [[thread_position_in_grid]])
{
    constant Strided &target = views[6];
    const uint column = position.x;
    const uint row = position.y;
    if (column >= target.shape[1] || row >= target.shape[0]) {
        return;
    }
    const uint expert = uint(experts[row]);
    float sum = 0.0f;
    if (expert < params.e) {
        const QuantizedWeight weight = weight_of(data, scales, offset, views + 1, params.k, params.groups);
        const uint from_x = row / (target.shape[0] / views[0].shape[0]) * views[0].strides[0];
        for (uint k = 0; k < params.k; k += 4) {
            const float4 values = elements(weight, expert * target.shape[1] + column, k);
            for (uint i = 0; i < 4 && k + i < params.k; i++) {
                sum += load(x, x_type, from_x + k + i) * values[i];
            }
        }
        if (has_bias) {
            sum += load(bias, bias_type, expert * views[5].strides[0] + column);
        }
    }
    store(out, out_type, row * target.strides[0] + column * target.strides[1], sum);
}
