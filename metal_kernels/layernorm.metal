// LayerNorm over rows and GroupNorm over groups of channels: a threadgroup each; the mean first, then the squares about
// it, so that a large mean costs no precision.

#include "reduction.metal"

constant uint x_type [[function_constant(0)]];
constant uint weight_type [[function_constant(1)]];
constant uint bias_type [[function_constant(2)]];
constant uint out_type [[function_constant(3)]];
constant bool has_weight [[function_constant(4)]];
constant bool has_bias [[function_constant(5)]];
constant bool vectorized [[function_constant(6)]];

struct LayerNormParams {
    uint rows;
    uint width;
    float eps;
};

struct GroupNormParams {
    uint groups;
    float eps;
};

struct Affine {
    device const void *weight;
    device const void *bias;

    template <typename T>
    T apply(T value, uint channel) const {
        value = has_weight ? value * load(weight, weight_type, channel) : value;
        return has_bias ? value + load(bias, bias_type, channel) : value;
    }

    float4 apply_four(float4 values, uint channel) const {
        values = has_weight ? values * load4(weight, weight_type, channel) : values;
        return has_bias ? values + load4(bias, bias_type, channel) : values;
    }
};

// A row whose every element has its own weight and bias.
struct Row {
    device const void *x;
    device void *out;
    uint x_base;
    uint out_base;
    Affine affine;

    float at(uint i) const { return load(x, x_type, x_base + i); }
    float4 four_at(uint i) const { return load4(x, x_type, x_base + i); }
    void put(uint i, float value) const { store(out, out_type, out_base + i, affine.apply(value, i)); }
    void put_four(uint i, float4 values) const {
        store4(out, out_type, out_base + i, affine.apply_four(values, i));
    }
};

// A group of channels of one image. Where it is packed in memory, x_base and out_base are its first element's places;
// else `first` is its number in row-major order.
struct ChannelGroup {
    device const void *x;
    device void *out;
    constant Strided *x_view;
    constant Strided *out_view;
    bool packed;
    uint x_base;
    uint out_base;
    uint first;
    uint first_channel;
    uint spatial;
    Affine affine;

    uint channel(uint i) const { return first_channel + i / spatial; }
    float at(uint i) const { return load(x, x_type, packed ? x_base + i : offset_of(*x_view, first + i)); }
    float4 four_at(uint i) const { return load4(x, x_type, x_base + i); }
    void put(uint i, float value) const {
        store(out, out_type, packed ? out_base + i : offset_of(*out_view, first + i), affine.apply(value, channel(i)));
    }
    void put_four(uint i, float4 values) const {
        store4(out, out_type, out_base + i, affine.apply(values, channel(i)));
    }
};

// out = (x - mean) · rsqrt(variance + eps), then the affine part, over `count` elements, four at a time for 4 · `wide`.
template <typename Values>
inline void normalize(
    Values values, uint count, uint wide, float eps, threadgroup uint *sums, threadgroup uint *squares, Place place
) {
    float4 sum = float4(0.0f);
    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        sum += values.four_at(4 * i);
    }
    for (uint i = 4 * wide + place.thread_index(); i < count; i += place.thread_count()) {
        sum.x += values.at(i);
    }
    const float mean = reduce_sum((sum.x + sum.y) + (sum.z + sum.w), sums, place) / float(count);

    float about_mean = 0.0f;
    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        const float4 distance = values.four_at(4 * i) - mean;
        about_mean += dot(distance, distance);
    }
    for (uint i = 4 * wide + place.thread_index(); i < count; i += place.thread_count()) {
        const float distance = values.at(i) - mean;
        about_mean = fma(distance, distance, about_mean);
    }
    const float scale = rsqrt(reduce_sum(about_mean, squares, place) / float(count) + eps);

    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        values.put_four(4 * i, (values.four_at(4 * i) - mean) * scale);
    }
    for (uint i = 4 * wide + place.thread_index(); i < count; i += place.thread_count()) {
        values.put(i, (values.at(i) - mean) * scale);
    }
}

kernel void layernorm_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1), function_constant(has_weight)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device void *out [[buffer(3)]],
    constant LayerNormParams &params [[buffer(4)]],
    constant Strided *views [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint sums[MAX_SIMDGROUPS];
    threadgroup uint squares[MAX_SIMDGROUPS];
    const Affine affine{has_weight ? weight : x, has_bias ? bias : x};
    const Row values{x, out, row * views[0].strides[0], row * views[3].strides[0], affine};
    const uint wide = vectorized ? params.width / 4 : 0;
    normalize(values, params.width, wide, params.eps, sums, squares, Place{lane, group, groups});
}

kernel void groupnorm_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1), function_constant(has_weight)]],
    device const void *bias [[buffer(2), function_constant(has_bias)]],
    device void *out [[buffer(3)]],
    constant GroupNormParams &params [[buffer(4)]],
    constant Strided *views [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint sums[MAX_SIMDGROUPS];
    threadgroup uint squares[MAX_SIMDGROUPS];
    constant Strided &x_view = views[0];
    constant Strided &out_view = views[3];
    uint spatial = 1;
    for (uint dim = 2; dim < x_view.rank; dim++) {
        spatial *= x_view.shape[dim];
    }
    const uint channels = x_view.shape[1] / params.groups;
    const uint count = channels * spatial;
    const uint image = row / params.groups;
    const uint first_channel = (row - image * params.groups) * channels;
    const uint last = x_view.rank - 1;
    const bool packed = x_view.strides[last] == 1 && steps_evenly(x_view, 1)
        && out_view.strides[last] == 1 && steps_evenly(out_view, 1);
    const ChannelGroup values{
        x, out, &x_view, &out_view, packed,
        image * x_view.strides[0] + first_channel * spatial,
        image * out_view.strides[0] + first_channel * spatial,
        row * count, first_channel, spatial,
        Affine{has_weight ? weight : x, has_bias ? bias : x}};
    const uint wide = vectorized && packed && spatial % 4 == 0 ? count / 4 : 0;
    normalize(values, count, wide, params.eps, sums, squares, Place{lane, group, groups});
}
