// Elements put to, or joined with, the places of a row that indices name. A thread per place looks through the row's
// indices, so that no two write one place and a sum has one order. An index out of range names none.

#include "common.metal"

constant uint base_type [[function_constant(0)]];
constant uint source_type [[function_constant(1)]];
constant uint out_type [[function_constant(2)]];
constant uint reduce [[function_constant(3)]];
constant bool include_self [[function_constant(4)]];

enum Reduce : uint { LAST, SUM, PROD, MEAN, AMAX, AMIN };

inline void fetch(device const void *data, uint type, uint index, thread float &value) {
    value = load(data, type, index);
}

inline void fetch(device const void *data, uint type, uint index, thread int &value) {
    value = load_int(data, type, index);
}

inline void put(device void *out, uint index, float value) {
    store(out, out_type, index, value);
}

inline void put(device void *out, uint index, int value) {
    store_int(out, out_type, index, value);
}

// NaN counts as the largest and the smallest.
template <typename T>
inline T joined(T total, T value) {
    switch (reduce) {
        case LAST: return value;
        case PROD: return total * value;
        case AMAX: return value > total || value != value ? value : total;
        case AMIN: return value < total || value != value ? value : total;
        default: return total + value;
    }
}

template <typename T>
inline void scatter(
    device const void *base,
    device const int *index,
    device const void *source,
    device void *out,
    constant Strided *views,
    uint element)
{
    const uint last = views[0].rank - 1;
    const uint size = views[0].shape[last];
    const uint row = element / size;
    const uint place = element - row * size;
    T total;
    fetch(base, base_type, offset_of(views[0], row, last) + place * views[0].strides[last], total);
    const uint indices = offset_of(views[1], row, last);
    const uint elements = offset_of(views[2], row, last);
    uint count = include_self ? 1 : 0;
    for (uint k = 0; k < views[1].shape[last]; k++) {
        if (uint(index[indices + k * views[1].strides[last]]) == place) {  // not a guard of memory
            T value;
            fetch(source, source_type, elements + k * views[2].strides[last], value);
            total = count == 0 ? value : joined(total, value);
            count++;
        }
    }
    if (reduce == MEAN && count > 1) {
        total = total / T(count);
    }
    put(out, offset_of(views[3], row, last) + place * views[3].strides[last], total);
}

kernel void scatter_kernel(
    device const void *base [[buffer(0)]],
    device const int *index [[buffer(1)]],
    device const void *source [[buffer(2)]],
    device void *out [[buffer(3)]],
    constant Strided *views [[buffer(5)]],
    uint element [[thread_position_in_grid]])
{
    if (element >= numel(views[3])) {
        return;
    }
    if (is_float(base_type) || is_float(source_type)) {
        scatter<float>(base, index, source, out, views, element);
    } else {
        scatter<int>(base, index, source, out, views, element);
    }
}
