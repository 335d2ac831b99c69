// Resampling of [N, C, H, W]. A thread makes one pixel: x is its column, y its row, z its image and channel.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint out_type [[function_constant(1)]];
constant bool exact [[function_constant(2)]];
constant bool align_corners [[function_constant(3)]];

// Input pixels per output pixel, vertically and horizontally.
struct UpsampleParams {
    float scale[2];
};

inline uint pixel_offset(constant Strided &view, uint plane, uint row, uint column) {
    return plane + row * view.strides[2] + column * view.strides[3];
}

inline uint nearest(uint position, float scale, uint size) {
    return min(uint((float(position) + (exact ? 0.5f : 0.0f)) * scale), size - 1);
}

kernel void upsample_nearest_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant UpsampleParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint3 position [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[1];
    if (position.x >= target.shape[3] || position.y >= target.shape[2]) {
        return;
    }
    const uint row = nearest(position.y, params.scale[0], source.shape[2]);
    const uint column = nearest(position.x, params.scale[1], source.shape[3]);
    const uint from = pixel_offset(source, offset_of(source, position.z, 2), row, column);
    const uint to = pixel_offset(target, offset_of(target, position.z, 2), position.y, position.x);
    move_element(out, out_type, to, x, x_type, from);
}

// The two pixels that an output pixel lies between, and how far it is from the first to the second.
struct Between {
    uint low;
    uint high;
    float weight;
};

inline Between between(uint position, float scale, uint size, uint out_size) {
    float place;
    if (align_corners) {
        place = out_size > 1 ? float(position) * (float(size - 1) / float(out_size - 1)) : 0.0f;
    } else {
        place = max((float(position) + 0.5f) * scale - 0.5f, 0.0f);
    }
    const uint low = min(uint(place), size - 1);
    return {low, min(low + 1, size - 1), clamp(place - float(low), 0.0f, 1.0f)};
}

kernel void upsample_bilinear_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant UpsampleParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint3 position [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[1];
    if (position.x >= target.shape[3] || position.y >= target.shape[2]) {
        return;
    }
    const Between rows = between(position.y, params.scale[0], source.shape[2], target.shape[2]);
    const Between columns = between(position.x, params.scale[1], source.shape[3], target.shape[3]);
    const uint plane = offset_of(source, position.z, 2);
    const float4 corner = float4(
        load(x, x_type, pixel_offset(source, plane, rows.low, columns.low)),
        load(x, x_type, pixel_offset(source, plane, rows.low, columns.high)),
        load(x, x_type, pixel_offset(source, plane, rows.high, columns.low)),
        load(x, x_type, pixel_offset(source, plane, rows.high, columns.high))
    );
    const float upper = corner.x * (1.0f - columns.weight) + corner.y * columns.weight;
    const float lower = corner.z * (1.0f - columns.weight) + corner.w * columns.weight;
    const uint to = pixel_offset(target, offset_of(target, position.z, 2), position.y, position.x);
    store(out, out_type, to, upper * (1.0f - rows.weight) + lower * rows.weight);
}
