// softmax, log_softmax and masked softmax over the last dimension: a threadgroup per row, each element read twice.

#include "reduction.metal"

constant uint x_type [[function_constant(0)]];
constant uint mask_type [[function_constant(1)]];
constant uint out_type [[function_constant(2)]];
constant bool vectorized [[function_constant(3)]];

struct SoftmaxParams {
    float scale;
};

// A row of scale · x.
struct Scores {
    device const void *x;
    uint base;
    uint stride;
    float scale;

    bool in_floats() const { return x_type <= TYPE_FLOAT; }
    float at(uint column) const { return load(x, x_type, base + column * stride) * scale; }
    float4 four_at(uint column) const { return load4(x, x_type, base + column) * scale; }
};

// A row of scale · x + mask.
struct MaskedScores {
    Scores scores;
    device const void *mask;
    uint base;
    uint stride;

    bool in_floats() const { return scores.in_floats() && mask_type <= TYPE_FLOAT; }
    float at(uint column) const { return scores.at(column) + load(mask, mask_type, base + column * stride); }
    float4 four_at(uint column) const { return scores.four_at(column) + load4(mask, mask_type, base + column); }
};

struct Softmax {
    float largest;
    float factor;

    Softmax(ExpSum row) : largest(row.largest), factor(1.0f / row.total) {}

    template <typename T>
    T of(T logit) const { return exp(logit - largest) * factor; }
};

struct LogSoftmax {
    float largest;
    float log_total;

    LogSoftmax(ExpSum row) : largest(row.largest), log_total(log(row.total)) {}

    template <typename T>
    T of(T logit) const { return logit - largest - log_total; }
};

template <typename Form, typename Logits>
inline void normalize_row(
    Logits logits, device void *out, constant Strided &view, uint row, threadgroup uint *maxima,
    threadgroup uint *totals, Place place
) {
    const uint last = view.rank - 1;
    const uint width = view.shape[last];
    const uint stride = view.strides[last];
    const uint base = offset_of(view, row, last);
    const uint wide = vectorized && logits.in_floats() ? width / 4 : 0;
    ExpSum sum;
    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        sum.add(logits.four_at(4 * i));
    }
    for (uint i = 4 * wide + place.thread_index(); i < width; i += place.thread_count()) {
        sum.add(logits.at(i));
    }
    sum.reduce(maxima, totals, place);
    const Form form(sum);
    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        store4(out, out_type, base + 4 * i, form.of(logits.four_at(4 * i)));
    }
    for (uint i = 4 * wide + place.thread_index(); i < width; i += place.thread_count()) {
        store(out, out_type, base + i * stride, form.of(logits.at(i)));
    }
}

inline Scores scores_of(device const void *x, constant Strided &view, uint row, float scale) {
    return Scores{x, offset_of(view, row, view.rank - 1), view.strides[view.rank - 1], scale};
}

kernel void softmax_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant SoftmaxParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint maxima[MAX_SIMDGROUPS];
    threadgroup uint totals[MAX_SIMDGROUPS];
    const Scores scores = scores_of(x, views[0], row, params.scale);
    normalize_row<Softmax>(scores, out, views[1], row, maxima, totals, Place{lane, group, groups});
}

kernel void log_softmax_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant SoftmaxParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint maxima[MAX_SIMDGROUPS];
    threadgroup uint totals[MAX_SIMDGROUPS];
    const Scores scores = scores_of(x, views[0], row, params.scale);
    normalize_row<LogSoftmax>(scores, out, views[1], row, maxima, totals, Place{lane, group, groups});
}

kernel void masked_softmax_kernel(
    device const void *x [[buffer(0)]],
    device const void *mask [[buffer(1)]],
    device void *out [[buffer(2)]],
    constant SoftmaxParams &params [[buffer(3)]],
    constant Strided *views [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint maxima[MAX_SIMDGROUPS];
    threadgroup uint totals[MAX_SIMDGROUPS];
    const uint last = views[1].rank - 1;
    const MaskedScores scores{
        scores_of(x, views[0], row, params.scale), mask, offset_of(views[1], row, last), views[1].strides[last]};
    normalize_row<Softmax>(scores, out, views[2], row, maxima, totals, Place{lane, group, groups});
}
