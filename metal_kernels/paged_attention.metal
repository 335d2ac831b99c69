// softmax(scale · q·kᵀ) · v for tokens of many sequences, whose keys and values lie in blocks of one pool: a threadgroup per
// token and head.

#include "attention_query.metal"

constant uint sinks_type [[function_constant(3)]];
constant uint out_type [[function_constant(4)]];
constant bool has_sinks [[function_constant(5)]];

struct PagedAttentionParams {
    float scale;
    uint block_size;
    uint window;  // 0: none
    float soft_cap;  // 0: none
};

struct PagedProblem {
    device const void *q;
    device const void *k;
    device const void *v;
    device const int *table;
    device const void *sinks;
    device void *out;
    constant Strided *views;  // q, k, v, tables, sequences, positions, sinks, out
    float scale;
    uint block_size;
    uint keys;  // up to the token's own
    uint first;  // those before are outside of its window
    float soft_cap;
    uint head;

    uint width() const { return views[0].shape[2]; }
    uint value_width() const { return views[2].shape[2]; }
    uint kv_head() const { return head / (views[0].shape[1] / views[1].shape[1]); }

    // The row of the pool that holds a key; a block that there is not counts as the nearest one.
    uint pool_row(uint key) const {
        const uint place = key / block_size;
        const int blocks = int(views[1].shape[0] / block_size);
        const int block = clamp(table[place * views[3].strides[1]], 0, blocks - 1);
        return uint(block) * block_size + (key - place * block_size);
    }

    uint q_row(uint token) const { return token * views[0].strides[0] + head * views[0].strides[1]; }
    uint k_row(uint key) const { return pool_row(key) * views[1].strides[0] + kv_head() * views[1].strides[1]; }
    uint v_row(uint key) const { return pool_row(key) * views[2].strides[0] + kv_head() * views[2].strides[1]; }

    uint key_count(uint) const { return keys; }
    float bias(uint, uint key) const { return key >= first && key < keys ? 0.0f : -INFINITY; }

    float capped(float score) const {
        return soft_cap == 0.0f ? score : soft_cap * precise::tanh(score / soft_cap);
    }

    float sink_weight(float largest) const {
        return has_sinks ? exp(load(sinks, sinks_type, head * views[6].strides[0]) - largest) : 0.0f;
    }

    void put(uint token, uint dim, float value) const {
        const uint index = token * views[7].strides[0] + head * views[7].strides[1] + dim * views[7].strides[2];
        store(out, out_type, index, value);
    }
};

inline PagedProblem paged_problem(
    device const void *q, device const void *k, device const void *v, device const int *tables,
    device const int *sequences, device const int *positions, device const void *sinks, device void *out,
    constant PagedAttentionParams &params, constant Strided *views, uint token, uint head
) {
    const int sequence = clamp(sequences[token * views[4].strides[0]], 0, int(views[3].shape[0]) - 1);
    const int context = int(views[3].shape[1] * params.block_size);
    const int position = clamp(positions[token * views[5].strides[0]], 0, context - 1);
    device const int *table = tables + uint(sequence) * views[3].strides[0];
    const uint keys = uint(position) + 1;
    const uint first = params.window == 0 || keys < params.window ? 0 : keys - params.window;
    return PagedProblem{
        q, k, v, table, sinks, out, views, params.scale, params.block_size, keys, first, params.soft_cap, head
    };
}

kernel void paged_attention_kernel(
    device const void *q [[buffer(0)]],
    device const void *k [[buffer(1)]],
    device const void *v [[buffer(2)]],
    device const int *tables [[buffer(3)]],
    device const int *sequences [[buffer(4)]],
    device const int *positions [[buffer(5)]],
    device const void *sinks [[buffer(6), function_constant(has_sinks)]],
    device void *out [[buffer(7)]],
    constant PagedAttentionParams &params [[buffer(8)]],
    constant Strided *views [[buffer(9)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup float sums[DECODE_GROUPS * HELD_WIDTH];
    threadgroup float largest_of[DECODE_GROUPS];
    threadgroup float total_of[DECODE_GROUPS];
    const PagedProblem problem = paged_problem(
        q, k, v, tables, sequences, positions, has_sinks ? sinks : q, out, params, views, position.x, position.y);
    attend<HeldQuery, HELD_WIDTH>(problem, position.x, 0, sums, largest_of, total_of, Place{lane, group, groups});
}

// For heads wider than HELD_WIDTH; WIDE_WIDTH dimensions of the values to a threadgroup.
kernel void paged_attention_wide_kernel(
    device const void *q [[buffer(0)]],
    device const void *k [[buffer(1)]],
    device const void *v [[buffer(2)]],
    device const int *tables [[buffer(3)]],
    device const int *sequences [[buffer(4)]],
    device const int *positions [[buffer(5)]],
    device const void *sinks [[buffer(6), function_constant(has_sinks)]],
    device void *out [[buffer(7)]],
    constant PagedAttentionParams &params [[buffer(8)]],
    constant Strided *views [[buffer(9)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup float sums[DECODE_GROUPS * WIDE_WIDTH];
    threadgroup float largest_of[DECODE_GROUPS];
    threadgroup float total_of[DECODE_GROUPS];
    const uint tokens = views[0].shape[0];
    const uint slice = position.x / tokens;
    const uint token = position.x - slice * tokens;
    const PagedProblem problem = paged_problem(
        q, k, v, tables, sequences, positions, has_sinks ? sinks : q, out, params, views, token, position.y);
    attend<ReadQuery, WIDE_WIDTH>(
        problem, token, slice * WIDE_WIDTH, sums, largest_of, total_of, Place{lane, group, groups});
}
