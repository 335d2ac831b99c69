// Rows of a table by number.

#include "common.metal"

constant uint table_type [[function_constant(0)]];
constant uint out_type [[function_constant(1)]];
constant bool vectorized [[function_constant(2)]];
constant bool checked [[function_constant(3)]];

struct EmbeddingParams {
    uint rows;
    uint width;
};

// Four columns a thread; y counts the ids.
kernel void embedding_kernel(
    device const void *table [[buffer(0)]],
    device const int *ids [[buffer(1)]],
    device void *out [[buffer(2)]],
    constant EmbeddingParams &params [[buffer(3)]],
    constant Strided *views [[buffer(4)]],
    uint2 position [[thread_position_in_grid]])
{
    constant Strided &target = views[2];
    const uint first = 4 * position.x;
    const uint end = min(first + 4, params.width);
    const uint row = uint(ids[offset_of(views[1], position.y)]);
    const uint step = target.strides[target.rank - 1];
    const uint from = row * views[0].strides[0];
    const uint to = offset_of(target, position.y, target.rank - 1);
    if (!checked && row >= params.rows) {
        for (uint column = first; column < end; column++) {
            store_missing(out, out_type, to + column * step);
        }
        return;
    }
    if (vectorized && is_float(table_type) && is_float(out_type) && end == first + 4) {
        store4(out, out_type, to + first, load4(table, table_type, from + first));
        return;
    }
    for (uint column = first; column < end; column++) {
        move_element(out, out_type, to + column * step, table, table_type, from + column);
    }
}
