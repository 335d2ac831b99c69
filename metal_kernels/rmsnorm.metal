// x · rsqrt(mean(x²) + eps) · (weight + weight_offset): a threadgroup per row.

#include "reduction.metal"

constant uint x_type [[function_constant(0)]];
constant uint weight_type [[function_constant(1)]];
constant uint out_type [[function_constant(2)]];
constant bool has_weight [[function_constant(3)]];
constant bool vectorized [[function_constant(4)]];

struct RMSNormParams {
    uint rows;
    uint width;
    float eps;
    float weight_offset;
};

kernel void rmsnorm_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1), function_constant(has_weight)]],
    device void *out [[buffer(2)]],
    constant RMSNormParams &params [[buffer(3)]],
    constant Strided *views [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint partial[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const uint width = params.width;
    const uint wide = vectorized ? width / 4 : 0;
    const uint x_base = row * views[0].strides[0];
    const uint out_base = row * views[2].strides[0];
    float squares = 0.0f;
    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        const float4 values = load4(x, x_type, x_base + 4 * i);
        squares += dot(values, values);
    }
    for (uint i = 4 * wide + place.thread_index(); i < width; i += place.thread_count()) {
        const float value = load(x, x_type, x_base + i);
        squares = fma(value, value, squares);
    }
    const float scale = rsqrt(reduce_sum(squares, partial, place) / float(width) + params.eps);
    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        const float4 values = load4(x, x_type, x_base + 4 * i) * scale;
        const float4 gain = has_weight ? load4(weight, weight_type, 4 * i) + params.weight_offset : float4(1.0f);
        store4(out, out_type, out_base + 4 * i, values * gain);
    }
    for (uint i = 4 * wide + place.thread_index(); i < width; i += place.thread_count()) {
        const float value = load(x, x_type, x_base + i) * scale;
        const float gain = has_weight ? load(weight, weight_type, i) + params.weight_offset : 1.0f;
        store(out, out_type, out_base + i, value * gain);
    }
}
