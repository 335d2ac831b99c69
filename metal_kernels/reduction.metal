// Reductions over a threadgroup: SIMD groups first, then their results through threadgroup memory.

#include "common.metal"

struct Sum {
    template <typename T>
    static T across_lanes(T value) { return simd_sum(value); }
};

struct Product {
    template <typename T>
    static T across_lanes(T value) { return simd_product(value); }
};

struct Max {
    template <typename T>
    static T across_lanes(T value) { return simd_max(value); }
};

struct Min {
    template <typename T>
    static T across_lanes(T value) { return simd_min(value); }
};

// The reduction of every thread's 4-byte value, in every thread. `partial` has MAX_SIMDGROUPS elements; a kernel that
// reduces more than once takes another array each time, so that nothing has to wait until all threads have read.
template <typename Op, typename T>
inline T reduce_threadgroup(T value, T identity, threadgroup uint *partial, Place place) {
    const T of_group = Op::across_lanes(value);
    if (place.lane == 0) {
        partial[place.group] = as_type<uint>(of_group);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return Op::across_lanes(place.lane < place.groups ? as_type<T>(partial[place.lane]) : identity);
}

inline float reduce_sum(float value, threadgroup uint *partial, Place place) {
    return reduce_threadgroup<Sum>(value, 0.0f, partial, place);
}

// The running maximum of some values and the sum of exp(value - maximum), in one pass. The maximum starts finite, so
// that -inf contributes 0 and not NaN; a maximum of +inf makes the sum NaN, as do NaN values.
struct ExpSum {
    float largest = -FLT_MAX;
    float total = 0.0f;

    void add(float value) {
        rescale(max(largest, value));
        total += exp(value - largest);
    }

    void add(float4 values) {
        rescale(max(largest, max(max(values.x, values.y), max(values.z, values.w))));
        const float4 terms = exp(values - largest);
        total += (terms.x + terms.y) + (terms.z + terms.w);
    }

    void rescale(float reference) {
        total *= exp(largest - reference);
        largest = reference;
    }

    // Over all threads, in every thread.
    void reduce(threadgroup uint *maxima, threadgroup uint *totals, Place place) {
        rescale(reduce_threadgroup<Max>(largest, -FLT_MAX, maxima, place));
        total = reduce_sum(total, totals, place);
    }
};

// Whether a view's dimensions from `first` on can be walked as one, by the last one's stride.
inline bool steps_evenly(constant Strided &view, uint first) {
    bool even = true;
    for (uint dim = first + 1; dim < view.rank; dim++) {
        even = even && view.strides[dim - 1] == view.shape[dim] * view.strides[dim];
    }
    return even;
}
