// Rotary embedding, x · cos + rotate_half(x) · sin over the last dimension: a thread takes four pairs of a row.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint cos_type [[function_constant(1)]];
constant uint sin_type [[function_constant(2)]];
constant uint out_type [[function_constant(3)]];
constant bool vectorized [[function_constant(4)]];

struct RopeParams {
    uint rotary_dim;
};

kernel void rope_kernel(
    device const void *x [[buffer(0)]],
    device const void *cos [[buffer(1)]],
    device const void *sin [[buffer(2)]],
    device void *out [[buffer(3)]],
    constant RopeParams &params [[buffer(4)]],
    constant Strided *views [[buffer(5)]],
    uint2 position [[thread_position_in_grid]]
) {
    const uint last = views[0].rank - 1;
    const uint half_width = params.rotary_dim / 2;
    uint rows = 1;
    for (uint dim = 0; dim < last; dim++) {
        rows *= views[0].shape[dim];
    }
    const uint first = 4 * position.x;
    const uint row = position.y;
    if (first >= half_width || row >= rows) {
        return;
    }
    const uint x_row = offset_of(views[0], row, last);
    const uint cos_row = offset_of(views[1], row, last);
    const uint sin_row = offset_of(views[2], row, last);
    const uint out_row = offset_of(views[3], row, last);
    if (vectorized && half_width % 4 == 0) {
        const uint second = first + half_width;
        const float4 a = load4(x, x_type, x_row + first);
        const float4 b = load4(x, x_type, x_row + second);
        store4(out, out_type, out_row + first,
            a * load4(cos, cos_type, cos_row + first) - b * load4(sin, sin_type, sin_row + first));
        store4(out, out_type, out_row + second,
            b * load4(cos, cos_type, cos_row + second) + a * load4(sin, sin_type, sin_row + second));
        return;
    }
    const uint x_step = views[0].strides[last];
    const uint cos_step = views[1].strides[last];
    const uint sin_step = views[2].strides[last];
    const uint out_step = views[3].strides[last];
    for (uint i = first; i < min(first + 4, half_width); i++) {
        const uint j = i + half_width;
        const float a = load(x, x_type, x_row + i * x_step);
        const float b = load(x, x_type, x_row + j * x_step);
        store(out, out_type, out_row + i * out_step,
            a * load(cos, cos_type, cos_row + i * cos_step) - b * load(sin, sin_type, sin_row + i * sin_step));
        store(out, out_type, out_row + j * out_step,
            b * load(cos, cos_type, cos_row + j * cos_step) + a * load(sin, sin_type, sin_row + j * sin_step));
    }
}
