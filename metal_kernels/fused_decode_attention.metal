// softmax(scale · q·kᵀ + mask) · v in one pass over the keys, with a running maximum and no memory for the scores.
//
// For few queries a threadgroup takes one query: every eight lanes follow a stream of keys of their own, and in the end
// the streams are merged. For many queries a threadgroup takes a tile of them, so that it reads keys and values once
// for all, and multiplies with SIMD-group matrices. Keys that the mask excludes are not read (in the tiled form: blocks
// of keys that it excludes for all of the tile's queries).

#include "attention_query.metal"

constant uint mask_type [[function_constant(3)]];
constant uint sinks_type [[function_constant(4)]];
constant uint out_type [[function_constant(5)]];
constant bool has_mask [[function_constant(6)]];
constant bool has_sinks [[function_constant(8)]];
constant bool causal [[function_constant(9)]];

struct AttentionParams {
    float scale;
    float soft_cap;  // 0: none
};

struct Problem {
    device const void *q;
    device const void *k;
    device const void *v;
    device const void *mask;
    device const void *sinks;
    device void *out;
    constant Strided *views;  // q, k, v, mask, sinks, out
    float scale;
    float soft_cap;
    uint batch;
    uint head;

    uint queries() const { return views[0].shape[2]; }
    uint keys() const { return views[1].shape[2]; }
    uint width() const { return views[0].shape[3]; }
    uint value_width() const { return views[2].shape[3]; }

    uint base(constant Strided &view, uint view_head) const {
        return batch * view.strides[0] + view_head * view.strides[1];
    }
    uint kv_head() const { return head / (views[0].shape[1] / views[1].shape[1]); }
    uint q_row(uint query) const { return base(views[0], head) + query * views[0].strides[2]; }
    uint k_row(uint key) const { return base(views[1], kv_head()) + key * views[1].strides[2]; }
    uint v_row(uint key) const { return base(views[2], kv_head()) + key * views[2].strides[2]; }

    // Keys that `query`, or any before it, may attend to.
    uint key_count(uint query) const { return causal ? min(keys(), query + 1) : keys(); }

    // What is added to a score; -inf for a key that the query does not attend to.
    float bias(uint query, uint key) const {
        if (query >= queries() || key >= key_count(query)) {
            return -INFINITY;
        }
        if (!has_mask) {
            return 0.0f;
        }
        const uint index = base(views[3], head) + query * views[3].strides[2] + key * views[3].strides[3];
        if (mask_type == TYPE_BOOL) {
            return load_int(mask, mask_type, index) != 0 ? 0.0f : -INFINITY;
        }
        return load(mask, mask_type, index);
    }

    float capped(float score) const {
        return soft_cap == 0.0f ? score : soft_cap * precise::tanh(score / soft_cap);
    }
    float sink_weight(float largest) const {
        return has_sinks ? exp(load(sinks, sinks_type, head * views[4].strides[0]) - largest) : 0.0f;
    }

    void put(uint query, uint dim, float value) const {
        const uint index = base(views[5], head) + query * views[5].strides[2] + dim * views[5].strides[3];
        store(out, out_type, index, value);
    }
};

inline Problem problem_of(
    device const void *q, device const void *k, device const void *v, device const void *mask, device const void *sinks,
    device void *out, constant Strided *views, AttentionParams params, uint3 position
) {
    return Problem{q, k, v, mask, sinks, out, views, params.scale, params.soft_cap, position.z, position.y};
}

kernel void attention_kernel(
    device const void *q [[buffer(0)]],
    device const void *k [[buffer(1)]],
    device const void *v [[buffer(2)]],
    device const void *mask [[buffer(3), function_constant(has_mask)]],
    device const void *sinks [[buffer(4), function_constant(has_sinks)]],
    device void *out [[buffer(5)]],
    constant AttentionParams &params [[buffer(6)]],
    constant Strided *views [[buffer(7)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup float sums[DECODE_GROUPS * HELD_WIDTH];
    threadgroup float largest_of[DECODE_GROUPS];
    threadgroup float total_of[DECODE_GROUPS];
    const Problem problem
        = problem_of(q, k, v, has_mask ? mask : q, has_sinks ? sinks : q, out, views, params, position);
    attend<HeldQuery, HELD_WIDTH>(problem, position.x, 0, sums, largest_of, total_of, Place{lane, group, groups});
}

// For heads wider than HELD_WIDTH; WIDE_WIDTH dimensions of the values to a threadgroup.
kernel void attention_wide_kernel(
    device const void *q [[buffer(0)]],
    device const void *k [[buffer(1)]],
    device const void *v [[buffer(2)]],
    device const void *mask [[buffer(3), function_constant(has_mask)]],
    device const void *sinks [[buffer(4), function_constant(has_sinks)]],
    device void *out [[buffer(5)]],
    constant AttentionParams &params [[buffer(6)]],
    constant Strided *views [[buffer(7)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup float sums[DECODE_GROUPS * WIDE_WIDTH];
    threadgroup float largest_of[DECODE_GROUPS];
    threadgroup float total_of[DECODE_GROUPS];
    const Problem problem
        = problem_of(q, k, v, has_mask ? mask : q, has_sinks ? sinks : q, out, views, params, position);
    const uint slice = position.x / problem.queries();
    const uint query = position.x - slice * problem.queries();
    attend<ReadQuery, WIDE_WIDTH>(
        problem, query, slice * WIDE_WIDTH, sums, largest_of, total_of, Place{lane, group, groups});
}

// The tiled form: TILE_QUERIES queries of one head to a threadgroup, a matrix's height of them to a SIMD group.
#define PREFILL_GROUPS 4
#define PREFILL_THREADS (PREFILL_GROUPS * SIMD_WIDTH)
#define TILE_QUERIES (8 * PREFILL_GROUPS)
#define TILE_KEYS 32
#define PIECES (HELD_WIDTH / 8)
// Rows are staged a little further apart than they are long, so that a column's elements lie in different banks.
#define TILE_STRIDE (HELD_WIDTH + 4)
#define SCORE_STRIDE (TILE_KEYS + 4)
#define ROW_LANES 4
#define ROW_KEYS (TILE_KEYS / ROW_LANES)

// Puts 32 rows of a matrix into threadgroup memory, as wide as whole 8 × 8 pieces; zeros beyond its edges.
template <typename T>
inline void stage(
    threadgroup T *tile, device const void *data, uint type, uint base, uint stride, uint first, uint rows, uint width,
    uint thread_index
) {
    const uint padded = (width + 7) / 8 * 8;
    for (uint row = thread_index / KEY_LANES; row < TILE_KEYS; row += PREFILL_THREADS / KEY_LANES) {
        for (uint dim = thread_index % KEY_LANES * 4; dim < padded; dim += KEY_STEP) {
            float4 values = float4(0.0f);
            if (first + row < rows) {
                values = load_dims(data, type, base + (first + row) * stride, dim, width);
            }
            for (uint i = 0; i < 4; i++) {
                tile[row * TILE_STRIDE + dim + i] = T(values[i]);
            }
        }
    }
}

// Threadgroup memory of the tiled form. `votes` says for each SIMD group whether it needs the next keys, in two halves
// that take turns; `shrink` holds a diagonal matrix for each, zeros aside from the diagonal.
struct PrefillMemory {
    threadgroup float *scores;
    threadgroup float *shrink;
    threadgroup uint *votes;
};

// A query's NaN must not reach the other queries of its SIMD group, where products multiply it by 0; its total keeps it.
inline float zero_for_nan(float value) {
    return isnan(value) ? 0.0f : value;
}

template <typename T>
inline void attend_tile(Problem problem, uint tile_index, threadgroup T *tile, PrefillMemory memory, Place place) {
    const uint row = place.lane / ROW_LANES;
    const uint part = place.lane % ROW_LANES;
    const uint first_query = tile_index * TILE_QUERIES;
    const uint query = first_query + place.group * 8 + row;
    const uint width = problem.width();
    const uint value_width = problem.value_width();
    const uint pieces = (width + 7) / 8;
    const uint value_pieces = (value_width + 7) / 8;
    const uint thread_index = place.thread_index();
    threadgroup float *scores = memory.scores + place.group * 8 * SCORE_STRIDE;
    threadgroup float *shrink_matrix = memory.shrink + place.group * 64;

    stage(
        tile, problem.q, q_type, problem.q_row(0), problem.views[0].strides[2], first_query, problem.queries(), width,
        thread_index);
    shrink_matrix[2 * place.lane] = 0.0f;
    shrink_matrix[2 * place.lane + 1] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<T, 8, 8> queries[PIECES];
    simdgroup_matrix<float, 8, 8> sums[PIECES];
#pragma unroll
    for (uint i = 0; i < PIECES; i++) {
        if (i == pieces) {
            break;
        }
        simdgroup_load(queries[i], tile + place.group * 8 * TILE_STRIDE + i * 8, TILE_STRIDE);
    }
#pragma unroll
    for (uint i = 0; i < PIECES; i++) {
        sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    float largest = -FLT_MAX;
    float total = 0.0f;
    uint turn = 0;
    const uint keys = problem.key_count(first_query + TILE_QUERIES - 1);
    for (uint first = 0; first < keys; first += TILE_KEYS) {
        float logits[ROW_KEYS];
        bool attended = false;
        for (uint i = 0; i < ROW_KEYS; i++) {
            logits[i] = problem.bias(query, first + part + i * ROW_LANES);
            attended = attended || logits[i] != -INFINITY;
        }
        const bool vote = simd_any(attended);
        if (place.lane == 0) {
            memory.votes[turn + place.group] = vote;
        }
        // Also: nobody reads the tile any more.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bool needed = false;
        for (uint group = 0; group < PREFILL_GROUPS; group++) {
            needed = needed || memory.votes[turn + group] != 0;
        }
        turn = PREFILL_GROUPS - turn;
        if (!needed) {
            continue;
        }

        stage(
            tile, problem.k, k_type, problem.k_row(0), problem.views[1].strides[2], first, problem.keys(), width,
            thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint block = 0; block < TILE_KEYS; block += 8) {
            simdgroup_matrix<float, 8, 8> products = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma unroll
            for (uint i = 0; i < PIECES; i++) {
                if (i == pieces) {
                    break;
                }
                simdgroup_matrix<T, 8, 8> of_keys;
                simdgroup_load(of_keys, tile + block * TILE_STRIDE + i * 8, TILE_STRIDE, ulong2(0), true);
                simdgroup_multiply_accumulate(products, queries[i], of_keys, products);
            }
            simdgroup_store(products, scores + block, SCORE_STRIDE);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);

        const float before = largest;
        for (uint i = 0; i < ROW_KEYS; i++) {
            logits[i] += problem.capped(scores[row * SCORE_STRIDE + part + i * ROW_LANES] * problem.scale);
            largest = max(largest, logits[i]);
        }
        largest = max(largest, simd_shuffle_xor(largest, 1));
        largest = max(largest, simd_shuffle_xor(largest, 2));
        const float shrink = exp(before - largest);
        float weight_sum = 0.0f;
        for (uint i = 0; i < ROW_KEYS; i++) {
            const float weight = exp(logits[i] - largest);
            scores[row * SCORE_STRIDE + part + i * ROW_LANES] = zero_for_nan(weight);
            weight_sum += weight;
        }
        weight_sum += simd_shuffle_xor(weight_sum, 1);
        weight_sum += simd_shuffle_xor(weight_sum, 2);
        total = total * shrink + weight_sum;
        if (part == 0) {
            shrink_matrix[row * 9] = zero_for_nan(shrink);
        }
        // The keys have been read, the weights written.
        threadgroup_barrier(mem_flags::mem_threadgroup);

        stage(
            tile, problem.v, v_type, problem.v_row(0), problem.views[2].strides[2], first, problem.keys(), value_width,
            thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd_any(shrink != 1.0f)) {
            simdgroup_matrix<float, 8, 8> diagonal;
            simdgroup_load(diagonal, shrink_matrix, 8);
#pragma unroll
            for (uint i = 0; i < PIECES; i++) {
                simdgroup_multiply(sums[i], diagonal, sums[i]);
            }
        }
        for (uint block = 0; block < TILE_KEYS; block += 8) {
            simdgroup_matrix<float, 8, 8> weights;
            simdgroup_load(weights, scores + block, SCORE_STRIDE);
#pragma unroll
            for (uint i = 0; i < PIECES; i++) {
                if (i == value_pieces) {
                    break;
                }
                simdgroup_matrix<T, 8, 8> of_values;
                simdgroup_load(of_values, tile + block * TILE_STRIDE + i * 8, TILE_STRIDE);
                simdgroup_multiply_accumulate(sums[i], weights, of_values, sums[i]);
            }
        }
    }

    // Pieces go out through `scores`, in two places by turns, so that one is read while the next is written. The first
    // two replace weights that each lane has loaded itself.
    total += problem.sink_weight(largest);
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (uint i = 0; i < PIECES; i++) {
        if (i == value_pieces) {
            break;
        }
        threadgroup float *piece = scores + i % 2 * 8;
        simdgroup_store(sums[i], piece, SCORE_STRIDE);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint column = part; column < 8; column += ROW_LANES) {
            if (query < problem.queries() && i * 8 + column < value_width) {
                problem.put(query, i * 8 + column, piece[row * SCORE_STRIDE + column] * factor);
            }
        }
    }
}

kernel void attention_prefill_kernel(
    device const void *q [[buffer(0)]],
    device const void *k [[buffer(1)]],
    device const void *v [[buffer(2)]],
    device const void *mask [[buffer(3), function_constant(has_mask)]],
    device const void *sinks [[buffer(4), function_constant(has_sinks)]],
    device void *out [[buffer(5)]],
    constant AttentionParams &params [[buffer(6)]],
    constant Strided *views [[buffer(7)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup compute_t tile[TILE_KEYS * TILE_STRIDE];
    threadgroup float scores[PREFILL_GROUPS * 8 * SCORE_STRIDE];
    threadgroup float shrink[PREFILL_GROUPS * 64];
    threadgroup uint votes[2 * PREFILL_GROUPS];
    const Problem problem
        = problem_of(q, k, v, has_mask ? mask : q, has_sinks ? sinks : q, out, views, params, position);
    attend_tile<compute_t>(problem, position.x, tile, PrefillMemory{scores, shrink, votes}, Place{lane, group, groups});
}

// For operands in float32.
kernel void attention_prefill_float_kernel(
    device const void *q [[buffer(0)]],
    device const void *k [[buffer(1)]],
    device const void *v [[buffer(2)]],
    device const void *mask [[buffer(3), function_constant(has_mask)]],
    device const void *sinks [[buffer(4), function_constant(has_sinks)]],
    device void *out [[buffer(5)]],
    constant AttentionParams &params [[buffer(6)]],
    constant Strided *views [[buffer(7)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint groups [[simdgroups_per_threadgroup]]
) {
    threadgroup float tile[TILE_KEYS * TILE_STRIDE];
    threadgroup float scores[PREFILL_GROUPS * 8 * SCORE_STRIDE];
    threadgroup float shrink[PREFILL_GROUPS * 64];
    threadgroup uint votes[2 * PREFILL_GROUPS];
    const Problem problem
        = problem_of(q, k, v, has_mask ? mask : q, has_sinks ? sinks : q, out, views, params, position);
    attend_tile<float>(problem, position.x, tile, PrefillMemory{scores, shrink, votes}, Place{lane, group, groups});
}
