// Kernels that make a tensor out of nothing, or out of another's elements in another order.
//
// Transpose, slice, expand and the like have no kernel: they are strided views, which every kernel reads. Where the
// elements must really move (cat, stack, repeat, roll, a copy of a transposed view), copy_kernel or
// copy_broadcast_kernel does it, from view to view.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint out_type [[function_constant(1)]];
constant bool contiguous [[function_constant(2)]];
constant uint mode [[function_constant(3)]];
constant bool upper [[function_constant(4)]];
constant bool has_index1 [[function_constant(5)]];
constant bool has_index2 [[function_constant(6)]];
constant bool has_index3 [[function_constant(7)]];
constant bool has_index4 [[function_constant(8)]];
constant bool has_index5 [[function_constant(9)]];
constant bool has_index6 [[function_constant(10)]];
constant bool has_index7 [[function_constant(11)]];

inline uint element_offset(constant Strided &view, uint index) {
    return contiguous ? index : offset_of(view, index);
}

struct FillParams {
    float value;
    int int_value;
};

kernel void fill_kernel(
    device void *out [[buffer(0)]],
    constant FillParams &params [[buffer(1)]],
    constant Strided *views [[buffer(2)]],
    uint index [[thread_position_in_grid]])
{
    if (index >= numel(views[0])) {
        return;
    }
    const uint to = element_offset(views[0], index);
    if (out_type == TYPE_INT) {
        store_int(out, out_type, to, params.int_value);
    } else {
        store(out, out_type, to, params.value);
    }
}

struct ArangeParams {
    float start;
    float step;
    int int_start;
    int int_step;
};

kernel void arange_kernel(
    device void *out [[buffer(0)]],
    constant ArangeParams &params [[buffer(1)]],
    constant Strided *views [[buffer(2)]],
    uint index [[thread_position_in_grid]])
{
    if (index >= numel(views[0])) {
        return;
    }
    const uint to = element_offset(views[0], index);
    if (out_type == TYPE_INT) {
        store_int(out, out_type, to, params.int_start + int(index) * params.int_step);
    } else {
        store(out, out_type, to, fma(float(index), params.step, params.start));
    }
}

enum PadMode : uint { PAD_CONSTANT, PAD_REFLECT, PAD_REPLICATE, PAD_CIRCULAR };

#define PADDED_DIMS 6

struct PadParams {
    int pads[12];
    float value;
    int int_value;
};

// Which element of a dimension of `size` a padded one shows; outside of it only in constant mode.
inline int padded_source(int position, int size) {
    switch (mode) {
        case PAD_REFLECT: return size - 1 - abs(size - 1 - abs(position));
        case PAD_REPLICATE: return clamp(position, 0, size - 1);
        case PAD_CIRCULAR: return position < 0 ? position + size : position < size ? position : position - size;
        default: return position;
    }
}

// pads[0] and pads[1] are what comes before and after the last dimension, pads[2] and pads[3] the one before it, …
kernel void pad_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant PadParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint index [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[1];
    if (index >= numel(target)) {
        return;
    }
    const uint to = element_offset(target, index);
    uint from = 0;
    bool inside = true;
    for (uint dim = target.rank, level = 0; dim-- > 0; level++) {
        const uint rest = index / target.shape[dim];
        const int before = level < PADDED_DIMS ? params.pads[2 * level] : 0;
        const int position = padded_source(int(index - rest * target.shape[dim]) - before, int(source.shape[dim]));
        if (uint(position) >= source.shape[dim]) {
            inside = false;
        }
        from += uint(position) * source.strides[dim];
        index = rest;
    }
    if (inside) {
        move_element(out, out_type, to, x, x_type, from);
    } else if (out_type == TYPE_INT) {
        store_int(out, out_type, to, params.int_value);
    } else {
        store(out, out_type, to, params.value);
    }
}

struct TriangleParams {
    int diagonal;
};

kernel void triangle_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant TriangleParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint index [[thread_position_in_grid]])
{
    constant Strided &target = views[1];
    if (index >= numel(target)) {
        return;
    }
    const uint rows = target.shape[target.rank - 2];
    const uint columns = target.shape[target.rank - 1];
    const uint line = index / columns;
    const int above = int(index - line * columns) - int(line % rows);
    const uint to = element_offset(target, index);
    if (upper ? above >= params.diagonal : above <= params.diagonal) {
        move_element(out, out_type, to, x, x_type, element_offset(views[0], index));
    } else {
        store_int(out, out_type, to, 0);
    }
}

struct FlipParams {
    uint dims[MAX_RANK];
};

kernel void flip_kernel(
    device const void *x [[buffer(0)]],
    device void *out [[buffer(1)]],
    constant FlipParams &params [[buffer(2)]],
    constant Strided *views [[buffer(3)]],
    uint index [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    if (index >= numel(source)) {
        return;
    }
    const uint to = element_offset(views[1], index);
    uint from = 0;
    for (uint dim = source.rank; dim-- > 0;) {
        const uint size = source.shape[dim];
        const uint rest = index / size;
        const uint position = index - rest * size;
        from += (params.dims[dim] != 0 ? size - 1 - position : position) * source.strides[dim];
        index = rest;
    }
    move_element(out, out_type, to, x, x_type, from);
}

struct GatherParams {
    uint dim;
};

kernel void gather_kernel(
    device const void *x [[buffer(0)]],
    device const int *index [[buffer(1)]],
    device void *out [[buffer(2)]],
    constant GatherParams &params [[buffer(3)]],
    constant Strided *views [[buffer(4)]],
    uint element [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[2];
    if (element >= numel(target)) {
        return;
    }
    const uint to = element_offset(target, element);
    const uint picked = uint(index[offset_of(views[1], element)]);
    uint from = picked * source.strides[params.dim];
    uint rest = element;
    for (uint dim = target.rank; dim-- > 0;) {
        const uint outer = rest / target.shape[dim];
        if (dim != params.dim) {
            from += (rest - outer * target.shape[dim]) * source.strides[dim];
        }
        rest = outer;
    }
    if (picked < source.shape[params.dim]) {
        move_element(out, out_type, to, x, x_type, from);
    } else {
        store_missing(out, out_type, to);
    }
}

struct IndexSelectParams {
    uint dim;
};

kernel void index_select_kernel(
    device const void *x [[buffer(0)]],
    device const int *index [[buffer(1)]],
    device void *out [[buffer(2)]],
    constant IndexSelectParams &params [[buffer(3)]],
    constant Strided *views [[buffer(4)]],
    uint element [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[2];
    if (element >= numel(target)) {
        return;
    }
    const uint to = element_offset(target, element);
    uint from = 0;
    uint picked = 0;
    uint rest = element;
    for (uint dim = target.rank; dim-- > 0;) {
        const uint outer = rest / target.shape[dim];
        uint position = rest - outer * target.shape[dim];
        if (dim == params.dim) {
            picked = uint(index[position * views[1].strides[0]]);
            position = picked;
        }
        from += position * source.strides[dim];
        rest = outer;
    }
    if (picked < source.shape[params.dim]) {
        move_element(out, out_type, to, x, x_type, from);
    } else {
        store_missing(out, out_type, to);
    }
}

struct IndexParams {
    uint first;
    uint count;
};

// What an index adds to the offset of the element that it picks.
struct Picked {
    uint offset;
    bool found;
};

// Follows the index of dimension `dim`, whose element number `at` applies; negative ones count from the back.
inline Picked pick(
    Picked picked, constant Strided &source, uint dim, device const int *index, constant Strided &view, uint at
) {
    const int size = int(source.shape[dim]);
    const int value = index[offset_of(view, at)];
    const uint position = uint(value < 0 ? value + size : value);
    picked.found = picked.found && position < uint(size);
    picked.offset += position * source.strides[dim];
    return picked;
}

// out[i…, b…, j…] = x[i…, index0[b…], index1[b…], …, j…], with the i… over dimensions 0 to `first`.
kernel void index_kernel(
    device const void *x [[buffer(0)]],
    device const int *index0 [[buffer(1)]],
    device const int *index1 [[buffer(2), function_constant(has_index1)]],
    device const int *index2 [[buffer(3), function_constant(has_index2)]],
    device const int *index3 [[buffer(4), function_constant(has_index3)]],
    device const int *index4 [[buffer(5), function_constant(has_index4)]],
    device const int *index5 [[buffer(6), function_constant(has_index5)]],
    device const int *index6 [[buffer(7), function_constant(has_index6)]],
    device const int *index7 [[buffer(8), function_constant(has_index7)]],
    device void *out [[buffer(9)]],
    constant IndexParams &params [[buffer(10)]],
    constant Strided *views [[buffer(11)]],
    uint element [[thread_position_in_grid]])
{
    constant Strided &source = views[0];
    constant Strided &target = views[9];
    if (element >= numel(target)) {
        return;
    }
    const uint to = element_offset(target, element);
    const uint first = params.first;
    const uint behind = first + views[1].rank;
    Picked picked = {0, true};
    uint at = 0;
    uint run = 1;
    uint rest = element;
    for (uint dim = target.rank; dim-- > 0;) {
        const uint outer = rest / target.shape[dim];
        const uint position = rest - outer * target.shape[dim];
        if (dim >= behind) {
            picked.offset += position * source.strides[dim - behind + first + params.count];
        } else if (dim >= first) {
            at += position * run;
            run *= target.shape[dim];
        } else {
            picked.offset += position * source.strides[dim];
        }
        rest = outer;
    }
    picked = pick(picked, source, first, index0, views[1], at);
    if (has_index1) {
        picked = pick(picked, source, first + 1, index1, views[2], at);
    }
    if (has_index2) {
        picked = pick(picked, source, first + 2, index2, views[3], at);
    }
    if (has_index3) {
        picked = pick(picked, source, first + 3, index3, views[4], at);
    }
    if (has_index4) {
        picked = pick(picked, source, first + 4, index4, views[5], at);
    }
    if (has_index5) {
        picked = pick(picked, source, first + 5, index5, views[6], at);
    }
    if (has_index6) {
        picked = pick(picked, source, first + 6, index6, views[7], at);
    }
    if (has_index7) {
        picked = pick(picked, source, first + 7, index7, views[8], at);
    }
    if (picked.found) {
        move_element(out, out_type, to, x, x_type, picked.offset);
    } else {
        store_missing(out, out_type, to);
    }
}
