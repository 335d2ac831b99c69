// Reductions over a view's last dimensions: a threadgroup per output element, whatever the strides.

#include "reduction.metal"

constant uint x_type [[function_constant(0)]];
constant uint out_type [[function_constant(1)]];
constant bool vectorized [[function_constant(2)]];

struct ReduceParams {
    uint reduce_dims;
    float correction;
    float order;
};

inline bool is_whole() {
    return x_type == TYPE_INT || x_type == TYPE_BOOL;
}

inline void fetch(device const void *x, uint index, thread float &value) {
    value = load(x, x_type, index);
}

inline void fetch(device const void *x, uint index, thread int &value) {
    value = load_int(x, x_type, index);
}

inline uint reduced_size(constant Strided &view, uint reduce_dims) {
    uint size = 1;
    for (uint dim = view.rank - reduce_dims; dim < view.rank; dim++) {
        size *= view.shape[dim];
    }
    return size;
}

// Hands this thread's share of the elements to `into.add(value, index)`, each a T. `row` counts the output elements,
// `index` the elements that are reduced into it.
template <typename T, typename Accumulator>
inline void accumulate(
    thread Accumulator &into, device const void *x, constant Strided &view, uint reduce_dims, uint row, Place place
) {
    const uint kept = view.rank - reduce_dims;
    const uint size = reduced_size(view, reduce_dims);
    const uint base = offset_of(view, row, kept);
    if (!steps_evenly(view, kept)) {
        for (uint i = place.thread_index(); i < size; i += place.thread_count()) {
            T value;
            fetch(x, offset_of(view, row * size + i), value);
            into.add(value, i);
        }
        return;
    }
    const uint step = view.strides[max(view.rank, 1u) - 1];
    const uint wide = vectorized && step == 1 && x_type <= TYPE_FLOAT ? size / 4 : 0;  // not a guard
    for (uint i = place.thread_index(); i < wide; i += place.thread_count()) {
        const float4 values = load4(x, x_type, base + 4 * i);
        for (uint j = 0; j < 4; j++) {
            into.add(T(values[j]), 4 * i + j);
        }
    }
    for (uint i = 4 * wide + place.thread_index(); i < size; i += place.thread_count()) {
        T value;
        fetch(x, base + i * step, value);
        into.add(value, i);
    }
}

struct Total {
    float value = 0.0f;
    void add(float x, uint) { value += x; }
};

// Integers wrap around, as PyTorch's do when they are stored in 32 bits.
struct WholeTotal {
    uint value = 0;
    void add(int x, uint) { value += uint(x); }
};

struct Factors {
    float value = 1.0f;
    void add(float x, uint) { value *= x; }
};

struct WholeFactors {
    uint value = 1;
    void add(int x, uint) { value *= uint(x); }
};

struct Squares {
    float mean;
    float value = 0.0f;
    void add(float x, uint) { value = fma(x - mean, x - mean, value); }
};

struct Powers {
    float order;
    float value = 0.0f;
    void add(float x, uint) { value += order == 1.0f ? fabs(x) : order == 2.0f ? x * x : pow(fabs(x), order); }
};

struct NonZeros {
    uint count = 0;
    void add(float x, uint) { count += x != 0.0f; }
};

// The logarithm of a sum of exponentials keeps its maximum finite at both ends, so that +inf makes the sum +inf.
struct Exponentials {
    ExpSum sum;
    void add(float x, uint) {
        sum.rescale(min(max(sum.largest, x), FLT_MAX));
        sum.total += exp(x - sum.largest);
    }
};

// Values as integers in the same order, so that one exact comparison serves all types. Both zeros are equal; NaN comes
// above everything, or below everything where the least is sought (a NaN among the values is the result).
inline int key_of(float value, bool least) {
    const int bits = as_type<int>(value);
    const int magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {  // not a guard
        return least ? -0x7fffffff : 0x7fffffff;
    }
    return bits < 0 ? -magnitude : magnitude;  // not a guard
}

inline int key_of(int value, bool) {
    return value;
}

inline float value_of(int key) {
    return as_type<float>(key < 0 ? -key | int(0x80000000) : key);  // not a guard
}

// The greatest key, or with `least` the least, and the first index that has it. The keys' complements are in reverse
// order, so that only the greatest is ever sought.
struct Extreme {
    bool least;
    int best = int(0x80000000);
    uint index = 0xffffffff;

    template <typename T>
    void add(T value, uint i) {
        const int key = key_of(value, least);
        const int rank = least ? ~key : key;
        if (rank > best || index == 0xffffffff) {  // not a guard
            best = rank;
            index = i;
        }
    }

    void reduce(threadgroup uint *ranks, threadgroup uint *indices, Place place) {
        const int greatest = reduce_threadgroup<Max>(best, int(0x80000000), ranks, place);
        index = reduce_threadgroup<Min>(best == greatest ? index : 0xffffffff, 0xffffffffu, indices, place);
        best = greatest;
    }

    int key() const { return least ? ~best : best; }
};

struct Magnitudes {
    Extreme extreme;
    void add(float x, uint i) { extreme.add(fabs(x), i); }
};

inline Extreme extreme_of(
    device const void *x, constant Strided &view, uint reduce_dims, uint row, bool least, threadgroup uint *ranks,
    threadgroup uint *indices, Place place
) {
    Extreme extreme;
    extreme.least = least;
    if (is_whole()) {
        accumulate<int>(extreme, x, view, reduce_dims, row, place);
    } else {
        accumulate<float>(extreme, x, view, reduce_dims, row, place);
    }
    extreme.reduce(ranks, indices, place);
    return extreme;
}

inline void store_extreme(device void *out, uint index, Extreme extreme) {
    if (is_whole()) {
        store_int(out, out_type, index, extreme.key());
    } else {
        store(out, out_type, index, value_of(extreme.key()));
    }
}

inline float mean_of(
    device const void *x, constant Strided &view, uint reduce_dims, uint row, threadgroup uint *partial, Place place
) {
    Total total;
    accumulate<float>(total, x, view, reduce_dims, row, place);
    return reduce_sum(total.value, partial, place) / float(reduced_size(view, reduce_dims));
}

inline float variance_of(
    device const void *x, constant Strided &view, ReduceParams params, uint row, threadgroup uint *sums,
    threadgroup uint *squared, Place place
) {
    Squares squares;
    squares.mean = mean_of(x, view, params.reduce_dims, row, sums, place);
    accumulate<float>(squares, x, view, params.reduce_dims, row, place);
    const float degrees = max(float(reduced_size(view, params.reduce_dims)) - params.correction, 0.0f);
    return reduce_sum(squares.value, squared, place) / degrees;
}

inline float norm_of(
    device const void *x, constant Strided &view, ReduceParams params, uint row, threadgroup uint *partial,
    threadgroup uint *indices, Place place
) {
    if (isinf(params.order)) {
        Magnitudes magnitudes;
        magnitudes.extreme.least = params.order < 0.0f;
        accumulate<float>(magnitudes, x, view, params.reduce_dims, row, place);
        magnitudes.extreme.reduce(partial, indices, place);
        return value_of(magnitudes.extreme.key());
    }
    if (params.order == 0.0f) {
        NonZeros nonzeros;
        accumulate<float>(nonzeros, x, view, params.reduce_dims, row, place);
        return float(reduce_threadgroup<Sum>(nonzeros.count, 0u, partial, place));
    }
    Powers powers;
    powers.order = params.order;
    accumulate<float>(powers, x, view, params.reduce_dims, row, place);
    const float total = reduce_sum(powers.value, partial, place);
    return params.order == 1.0f ? total : params.order == 2.0f ? sqrt(total) : pow(total, 1.0f / params.order);
}

kernel void sum_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint partial[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    if (is_whole()) {
        WholeTotal whole;
        accumulate<int>(whole, x, views[0], params.reduce_dims, row, place);
        const uint result = reduce_threadgroup<Sum>(whole.value, 0u, partial, place);
        if (place.thread_index() == 0) {
            store_int(out, out_type, offset_of(views[1], row), int(result));
        }
        return;
    }
    Total floating;
    accumulate<float>(floating, x, views[0], params.reduce_dims, row, place);
    const float result = reduce_threadgroup<Sum>(floating.value, 0.0f, partial, place);
    if (place.thread_index() == 0) {
        store(out, out_type, offset_of(views[1], row), result);
    }
}

kernel void mean_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint partial[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const float result = mean_of(x, views[0], params.reduce_dims, row, partial, place);
    if (place.thread_index() == 0) {
        store(out, out_type, offset_of(views[1], row), result);
    }
}

kernel void max_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint ranks[MAX_SIMDGROUPS];
    threadgroup uint indices[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const Extreme extreme =
        extreme_of(x, views[0], params.reduce_dims, row, false, ranks, indices, place);
    if (place.thread_index() == 0) {
        store_extreme(out, offset_of(views[1], row), extreme);
    }
}

kernel void min_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint ranks[MAX_SIMDGROUPS];
    threadgroup uint indices[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const Extreme extreme =
        extreme_of(x, views[0], params.reduce_dims, row, true, ranks, indices, place);
    if (place.thread_index() == 0) {
        store_extreme(out, offset_of(views[1], row), extreme);
    }
}

kernel void prod_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint partial[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    if (is_whole()) {
        WholeFactors whole;
        accumulate<int>(whole, x, views[0], params.reduce_dims, row, place);
        const uint result = reduce_threadgroup<Product>(whole.value, 1u, partial, place);
        if (place.thread_index() == 0) {
            store_int(out, out_type, offset_of(views[1], row), int(result));
        }
        return;
    }
    Factors floating;
    accumulate<float>(floating, x, views[0], params.reduce_dims, row, place);
    const float result = reduce_threadgroup<Product>(floating.value, 1.0f, partial, place);
    if (place.thread_index() == 0) {
        store(out, out_type, offset_of(views[1], row), result);
    }
}

kernel void var_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint sums[MAX_SIMDGROUPS];
    threadgroup uint squared[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const float result = variance_of(x, views[0], params, row, sums, squared, place);
    if (place.thread_index() == 0) {
        store(out, out_type, offset_of(views[1], row), result);
    }
}

kernel void std_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint sums[MAX_SIMDGROUPS];
    threadgroup uint squared[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const float result = sqrt(variance_of(x, views[0], params, row, sums, squared, place));
    if (place.thread_index() == 0) {
        store(out, out_type, offset_of(views[1], row), result);
    }
}

kernel void any_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint partial[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    NonZeros nonzeros;
    accumulate<float>(nonzeros, x, views[0], params.reduce_dims, row, place);
    const uint found = reduce_threadgroup<Sum>(nonzeros.count, 0u, partial, place);
    if (place.thread_index() == 0) {
        store_int(out, out_type, offset_of(views[1], row), found != 0);
    }
}

kernel void all_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint partial[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    NonZeros nonzeros;
    accumulate<float>(nonzeros, x, views[0], params.reduce_dims, row, place);
    const uint found = reduce_threadgroup<Sum>(nonzeros.count, 0u, partial, place);
    if (place.thread_index() == 0) {
        store_int(out, out_type, offset_of(views[1], row), found == reduced_size(views[0], params.reduce_dims));
    }
}

kernel void argmax_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint ranks[MAX_SIMDGROUPS];
    threadgroup uint indices[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const Extreme extreme =
        extreme_of(x, views[0], params.reduce_dims, row, false, ranks, indices, place);
    if (place.thread_index() == 0) {
        store_int(out, out_type, offset_of(views[1], row), int(extreme.index));
    }
}

kernel void argmin_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint ranks[MAX_SIMDGROUPS];
    threadgroup uint indices[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const Extreme extreme =
        extreme_of(x, views[0], params.reduce_dims, row, true, ranks, indices, place);
    if (place.thread_index() == 0) {
        store_int(out, out_type, offset_of(views[1], row), int(extreme.index));
    }
}

kernel void norm_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint partial[MAX_SIMDGROUPS];
    threadgroup uint indices[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    const float result = norm_of(x, views[0], params, row, partial, indices, place);
    if (place.thread_index() == 0) {
        store(out, out_type, offset_of(views[1], row), result);
    }
}

kernel void logsumexp_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant ReduceParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint maxima[MAX_SIMDGROUPS];
    threadgroup uint totals[MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    Exponentials exponentials;
    accumulate<float>(exponentials, x, views[0], params.reduce_dims, row, place);
    exponentials.sum.reduce(maxima, totals, place);
    const float result = exponentials.sum.largest + log(exponentials.sum.total);
    if (place.thread_index() == 0) {
        store(out, out_type, offset_of(views[1], row), result);
    }
}
