// Rows replaced in place: out[…, index[i], …] = source[…, i, …]. It is how a KV cache takes in new tokens.

#include "common.metal"

constant uint source_type [[function_constant(0)]];
constant uint out_type [[function_constant(1)]];
constant uint source0_type [[function_constant(2)]];
constant uint source1_type [[function_constant(3)]];
constant uint out0_type [[function_constant(4)]];
constant uint out1_type [[function_constant(5)]];
constant bool checked [[function_constant(6)]];

struct IndexCopyParams {
    uint dim;
};

// The place in a source and in its target of the source's element number `element`.
struct Row {
    uint from;
    uint to;
};

inline Row find_row(constant Strided &source, constant Strided &target, uint element, uint dim, uint picked) {
    Row row = {0, 0};
    for (uint axis = source.rank; axis-- > 0;) {
        const uint rest = element / source.shape[axis];
        const uint position = element - rest * source.shape[axis];
        row.from += position * source.strides[axis];
        row.to += (axis == dim ? picked : position) * target.strides[axis];
        element = rest;
    }
    return row;
}

// The row that an element of a source replaces.
inline uint picked_row(
    device const int *index, constant Strided &view, constant Strided &source, uint element, uint dim
) {
    uint inner = 1;
    for (uint axis = dim + 1; axis < source.rank; axis++) {
        inner *= source.shape[axis];
    }
    return uint(index[element / inner % source.shape[dim] * view.strides[0]]);
}

kernel void index_copy_kernel(
    device const int *index [[buffer(0)]],
    device const void *source [[buffer(1)]],
    device void *out [[buffer(2)]],
    constant IndexCopyParams &params [[buffer(3)]],
    constant Strided *views [[buffer(4)]],
    uint element [[thread_position_in_grid]])
{
    if (element >= numel(views[1])) {
        return;
    }
    const uint picked = picked_row(index, views[0], views[1], element, params.dim);
    if (!checked && picked >= views[2].shape[params.dim]) {
        return;
    }
    const Row row = find_row(views[1], views[2], element, params.dim, picked);
    move_element(out, out_type, row.to, source, source_type, row.from);
}

// The same rows of two targets, each from a source of its own: keys and values in one dispatch.
kernel void index_copy_pair_kernel(
    device const int *index [[buffer(0)]],
    device const void *source0 [[buffer(1)]],
    device const void *source1 [[buffer(2)]],
    device void *out0 [[buffer(3)]],
    device void *out1 [[buffer(4)]],
    constant IndexCopyParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint element [[thread_position_in_grid]])
{
    if (element >= numel(views[1])) {
        return;
    }
    const uint picked = picked_row(index, views[0], views[1], element, params.dim);
    if (!checked && picked >= views[3].shape[params.dim]) {
        return;
    }
    const Row first = find_row(views[1], views[3], element, params.dim, picked);
    move_element(out0, out0_type, first.to, source0, source0_type, first.from);
    const Row second = find_row(views[2], views[4], element, params.dim, picked);
    move_element(out1, out1_type, second.to, source1, source1_type, second.from);
}
