// softmax, log_softmax and masked softmax over the last dimension: a team per row. A row that fits is held in registers
// between the two passes; others are read twice.

#include "common/reduction.cuh"
#include "common/exp_sum.cuh"

constexpr int last = Out::rank - 1;
constexpr index_t width = Out::size(last);

// A row of scale · x (+ mask), with x from `Source`.
template <typename Source>
struct Logits {
    Source x;
    const Mask::type *mask;

    template <int N>
    __device__ __forceinline__ void get(float (&values)[N], index_t column) const {
        x.get(values, column);
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] *= param::scale;
        }
        if constexpr (Mask::present) {
            float biases[N];
            if constexpr (N > 1) {
                load_floats(biases, mask + column);
            } else {
                biases[0] = to_float(mask[column * Mask::stride(last)]);
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] += biases[i];
            }
        }
    }
};

template <int N, bool logarithm>
__device__ __forceinline__ void normalize(float (&values)[N], const ExpSum &sum) {
    const Share<logarithm> share(sum);
#pragma unroll
    for (int i = 0; i < N; i++) {
        values[i] = share.of(values[i]);
    }
}

// `Target` has `put<N>`, which takes the elements from a column on.
template <bool logarithm, typename Source, typename Target>
__device__ __forceinline__ void softmax_row(const Logits<Source> &logits, const Target &out, Place place) {
    constexpr index_t packs = width / pack;
    ExpSum sum;
    float held[held_packs][pack];
#pragma unroll
    for (int turn = 0; turn < held_packs; turn++) {
        const index_t i = turn * Place::threads() + place.thread();
        if (i < packs) {
            logits.get(held[turn], i * pack);
            sum.add(held[turn]);
        }
    }
    for (index_t i = held_packs * Place::threads() + place.thread(); i < packs; i += Place::threads()) {
        float values[pack];
        logits.get(values, i * pack);
        sum.add(values);
    }
    for (index_t i = packs * pack + place.thread(); i < width; i += Place::threads()) {
        float value[1];
        logits.get(value, i);
        sum.add(value);
    }
    sum.rescale(reduce_team<Max>(sum.largest, -FLOAT_MAX, place));
    sum.total = reduce_sum(sum.total, place);
#pragma unroll
    for (int turn = 0; turn < held_packs; turn++) {
        const index_t i = turn * Place::threads() + place.thread();
        if (i < packs) {
            normalize<pack, logarithm>(held[turn], sum);
            out.put(held[turn], i * pack);
        }
    }
    for (index_t i = held_packs * Place::threads() + place.thread(); i < packs; i += Place::threads()) {
        float values[pack];
        logits.get(values, i * pack);
        normalize<pack, logarithm>(values, sum);
        out.put(values, i * pack);
    }
    for (index_t i = packs * pack + place.thread(); i < width; i += Place::threads()) {
        float value[1];
        logits.get(value, i);
        normalize<1, logarithm>(value, sum);
        out.put(value, i);
    }
}

// `Sources` and `Targets` have `row(number)`, a row's source or target.
template <bool logarithm, typename Sources, typename Targets>
__device__ __forceinline__ void softmax(const Sources &sources, const Mask::type *mask, const Targets &targets) {
    const Place place;
    if (place.row >= Out::numel / width) {
        return;
    }
    using Source = decltype(sources.row(0));
    Logits<Source> logits{sources.row(place.row), mask};
    if constexpr (Mask::present) {
        logits.mask += leading_offset<Mask, last>(place.row);
    }
    softmax_row<logarithm>(logits, targets.row(place.row), place);
}

#if !defined(PROLOGUE)
struct StoredRow {
    const X::type *x;

    template <int N>
    __device__ __forceinline__ void get(float (&values)[N], index_t column) const {
        if constexpr (N > 1) {
            load_floats(values, x + column);
        } else {
            values[0] = to_float(x[column * X::stride(last)]);
        }
    }
};

struct Stored {
    const X::type *x;
    __device__ __forceinline__ StoredRow row(index_t number) const { return {x + leading_offset<X, last>(number)}; }
};
#define PROLOGUE Stored{x}
#endif

#if !defined(EPILOGUE)
struct ResultRow {
    Out::type *out;

    template <int N>
    __device__ __forceinline__ void put(const float (&values)[N], index_t column) const {
        if constexpr (N > 1) {
            store_floats(out + column, values);
        } else {
            out[column * Out::stride(last)] = from<Out::type>(values[0]);
        }
    }
};

struct Result {
    Out::type *out;
    __device__ __forceinline__ ResultRow row(index_t number) const {
        return {out + leading_offset<Out, last>(number)};
    }
};
#define EPILOGUE Result{out}
#endif

#kernel softmax_kernel
KERNEL(softmax_kernel) { softmax<false>(PROLOGUE, mask, EPILOGUE); }

#kernel masked_softmax_kernel
KERNEL(masked_softmax_kernel) { softmax<false>(PROLOGUE, mask, EPILOGUE); }

#kernel log_softmax_kernel
KERNEL(log_softmax_kernel) { softmax<true>(PROLOGUE, mask, EPILOGUE); }

#kernel fused_softmax_kernel
KERNEL(fused_softmax_kernel) { softmax<false>(PROLOGUE, mask, EPILOGUE); }

#kernel fused_masked_softmax_kernel
KERNEL(fused_masked_softmax_kernel) { softmax<false>(PROLOGUE, mask, EPILOGUE); }

#kernel fused_log_softmax_kernel
KERNEL(fused_log_softmax_kernel) { softmax<true>(PROLOGUE, mask, EPILOGUE); }
