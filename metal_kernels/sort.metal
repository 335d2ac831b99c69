// Sorting along the last dimension. Each element finds its own place by counting those that come before it: no thread
// waits for another, and nothing but the order is written.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint order_type [[function_constant(1)]];
constant bool descending [[function_constant(2)]];

// An element as an integer in the same order. Both zeros are equal, all NaN are, and come above everything.
inline int key_of(device const void *x, uint index) {
    if (!is_float(x_type)) {
        return load_int(x, x_type, index);
    }
    const int bits = as_type<int>(load(x, x_type, index));
    const int magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return 0x7fffffff;
    }
    return bits < 0 ? -magnitude : magnitude;
}

inline uint count_before(device const void *x, constant Strided &view, uint base, uint own) {
    const uint last = view.rank - 1;
    const int key = key_of(x, base + own * view.strides[last]);
    uint count = 0;
    for (uint i = 0; i < view.shape[last]; i++) {
        const int other = key_of(x, base + i * view.strides[last]);
        count += other == key ? i < own : descending ? other > key : other < key;
    }
    return count;
}

kernel void argsort_kernel(
    device const void *x [[buffer(0)]],
    device void *order [[buffer(1)]],
    constant Strided *views [[buffer(3)]],
    uint index [[thread_position_in_grid]])
{
    if (index >= numel(views[0])) {
        return;
    }
    const uint last = views[0].rank - 1;
    const uint row = index / views[0].shape[last];
    const uint own = index - row * views[0].shape[last];
    const uint place = count_before(x, views[0], offset_of(views[0], row, last), own);
    store_int(order, order_type, offset_of(views[1], row, last) + place * views[1].strides[last], int(own));
}
