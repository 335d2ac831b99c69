// Running sums along the last dimension: a threadgroup per row, walked in blocks of as many elements as threads.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint out_type [[function_constant(1)]];

inline void fetch(device const void *x, uint index, thread float &value) {
    value = load(x, x_type, index);
}

inline void fetch(device const void *x, uint index, thread uint &value) {
    value = uint(load_int(x, x_type, index));
}

inline void put(device void *out, uint index, float value) {
    store(out, out_type, index, value);
}

inline void put(device void *out, uint index, uint value) {
    store_int(out, out_type, index, int(value));
}

// `totals` holds the sums of the SIMD groups, in two halves that take turns: while a slow thread still reads those of
// one block, others write those of the next.
template <typename T>
inline void running_sum(
    device const void *x, device void *out, constant Strided *views, uint row, threadgroup uint *totals, Place place
) {
    const uint last = views[0].rank - 1;
    const uint width = views[0].shape[last];
    const uint x_base = offset_of(views[0], row, last);
    const uint out_base = offset_of(views[1], row, last);
    T before = T(0);
    uint turn = 0;
    for (uint start = 0; start < width; start += place.thread_count()) {
        const uint i = start + place.thread_index();
        T value = T(0);
        if (i < width) {
            fetch(x, x_base + i * views[0].strides[last], value);
        }
        T sum = simd_prefix_inclusive_sum(value);
        if (place.lane == SIMD_WIDTH - 1) {
            totals[turn + place.group] = as_type<uint>(sum);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        T block = T(0);
        for (uint group = 0; group < place.groups; group++) {
            if (group == place.group) {
                sum += block;
            }
            block += as_type<T>(totals[turn + group]);
        }
        if (i < width) {
            put(out, out_base + i * views[1].strides[last], before + sum);
        }
        before += block;
        turn = MAX_SIMDGROUPS - turn;
    }
}

kernel void cumsum_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant Strided *views [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup uint totals[2 * MAX_SIMDGROUPS];
    const Place place{lane, group, groups};
    if (x_type == TYPE_INT || x_type == TYPE_BOOL) {
        running_sum<uint>(x, out, views, row, totals, place);
    } else {
        running_sum<float>(x, out, views, row, totals, place);
    }
}
