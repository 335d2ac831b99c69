// RMSNorm and LayerNorm over rows, GroupNorm over groups of channels: a team each. LayerNorm and GroupNorm make the mean first, then the squares about it, so
// that a large mean costs no precision.

#include "common/held_row.cuh"

struct AddAll {
    float &sum;
    template <int N>
    __device__ __forceinline__ void operator()(const float (&values)[N], index_t) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum += values[i];
        }
    }
};

// `Values` also has `put<N>`.
template <typename Values>
struct PutNormalized {
    const Values &target;
    float mean;
    float scale;
    template <int N>
    __device__ __forceinline__ void operator()(const float (&values)[N], index_t first) const {
        float normalized[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            normalized[i] = (values[i] - mean) * scale;
        }
        target.put(normalized, first);
    }
};

template <bool centered, typename Values>
__device__ __forceinline__ void normalize(const Values &values, Place place) {
    Held<Values> held;
    float mean = 0.0f;
    if constexpr (centered) {
        float sum = 0.0f;
        held.template each<false>(values, place, AddAll{sum});
        mean = reduce_sum(sum, place) / float(Values::count);
    }
    float squares = 0.0f;
    held.template each<centered>(values, place, AddSquares{squares, mean});
    const float scale = rsqrtf(reduce_sum(squares, place) / float(Values::count) + param::eps);
    held.template each<true>(values, place, PutNormalized<Values>{values, mean, scale});
}

#kernel rmsnorm_kernel layernorm_kernel fused_rmsnorm_kernel fused_layernorm_kernel
#if !defined(PROLOGUE)
struct Stored {
    const X::type *x;

    template <int N>
    __device__ __forceinline__ void get(float (&values)[N], index_t first) const { get_floats(values, x + first); }

    __device__ __forceinline__ Stored row(index_t number) const { return {x + number * X::stride(0)}; }
};
#define PROLOGUE Stored{x}
#endif

#if !defined(EPILOGUE)
struct Result {
    Out::type *out;

    template <int N>
    __device__ __forceinline__ void put(const float (&values)[N], index_t first) const {
        put_floats(out + first, values);
    }

    __device__ __forceinline__ Result row(index_t number) const { return {out + number * Out::stride(0)}; }
};
#define EPILOGUE Result{out}
#endif

#kernel rmsnorm_kernel fused_rmsnorm_kernel
template <typename Source, typename Target>
struct Row {
    static constexpr index_t count = param::width;
    Source x;
    const Weight::type *weight;
    Target out;

    template <int N>
    __device__ __forceinline__ void get(float (&values)[N], index_t first) const { x.get(values, first); }

    template <int N>
    __device__ __forceinline__ void put(float (&values)[N], index_t first) const {
        if constexpr (Weight::present) {
            float gains[N];
            get_floats(gains, weight + first);
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] *= gains[i] + param::weight_offset;
            }
        }
        out.put(values, first);
    }
};

template <typename Sources, typename Targets>
__device__ __forceinline__ void normalize_row(const Sources &x, const Weight::type *weight, const Targets &out) {
    const Place place;
    if (place.row < param::rows) {
        using Values = Row<decltype(x.row(0)), decltype(out.row(0))>;
        normalize<false>(Values{x.row(place.row), weight, out.row(place.row)}, place);
    }
}

#kernel rmsnorm_kernel
KERNEL(rmsnorm_kernel) { normalize_row(PROLOGUE, weight, EPILOGUE); }

#kernel fused_rmsnorm_kernel
KERNEL(fused_rmsnorm_kernel) { normalize_row(PROLOGUE, weight, EPILOGUE); }

#kernel layernorm_kernel fused_layernorm_kernel
template <typename Source, typename Target>
struct Row {
    static constexpr index_t count = param::width;
    Source x;
    const Weight::type *weight;
    const Bias::type *bias;
    Target out;

    template <int N>
    __device__ __forceinline__ void get(float (&values)[N], index_t first) const { x.get(values, first); }

    template <int N>
    __device__ __forceinline__ void put(float (&values)[N], index_t first) const {
        float part[N];
        if constexpr (Weight::present) {
            get_floats(part, weight + first);
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] *= part[i];
            }
        }
        if constexpr (Bias::present) {
            get_floats(part, bias + first);
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] += part[i];
            }
        }
        out.put(values, first);
    }
};

template <typename Sources, typename Targets>
__device__ __forceinline__ void normalize_row(
    const Sources &x, const Weight::type *weight, const Bias::type *bias, const Targets &out
) {
    const Place place;
    if (place.row < param::rows) {
        using Values = Row<decltype(x.row(0)), decltype(out.row(0))>;
        normalize<true>(Values{x.row(place.row), weight, bias, out.row(place.row)}, place);
    }
}

#kernel layernorm_kernel
KERNEL(layernorm_kernel) { normalize_row(PROLOGUE, weight, bias, EPILOGUE); }

#kernel fused_layernorm_kernel
KERNEL(fused_layernorm_kernel) { normalize_row(PROLOGUE, weight, bias, EPILOGUE); }

#kernel groupnorm_kernel
constexpr index_t channels = X::size(1) / param::groups;  // of a group
constexpr index_t spatial = X::numel / (X::size(0) * X::size(1));

// The group's elements; `pack` of them, if more than one, lie side by side in one channel.
struct ChannelGroup {
    static constexpr index_t count = channels * spatial;
    const X::type *x;
    const Weight::type *weight;
    const Bias::type *bias;
    Out::type *out;
    index_t first_element;  // in row-major order
    index_t first_channel;

    template <int N>
    __device__ __forceinline__ void get(float (&values)[N], index_t i) const {
        get_floats(values, x + X::offset(first_element + i));
    }

    template <int N>
    __device__ __forceinline__ void put(float (&values)[N], index_t i) const {
        const index_t channel = first_channel + i / spatial;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if constexpr (Weight::present) {
                values[j] *= to_float(weight[channel * Weight::stride(0)]);
            }
            if constexpr (Bias::present) {
                values[j] += to_float(bias[channel * Bias::stride(0)]);
            }
            values[j] = activate(values[j]);
        }
        put_floats(out + Out::offset(first_element + i), values);
    }
};

KERNEL(groupnorm_kernel) {
    const Place place;
    if (place.row >= X::size(0) * param::groups) {
        return;
    }
    const ChannelGroup group{
        x, weight, bias, out, place.row * ChannelGroup::count, place.row % param::groups * channels};
    normalize<true>(group, place);
}
