// Attention of one query of one head by a threadgroup: every eight lanes follow a stream of keys of their own, and in the end
// the streams are merged. A `Problem` says where the rows of queries, keys and values are, which keys a query attends to, what
// weight belongs to no key, and where the result goes.

#include "common.metal"

constant uint q_type [[function_constant(0)]];
constant uint k_type [[function_constant(1)]];
constant uint v_type [[function_constant(2)]];
constant bool vectorized [[function_constant(7)]];

// Lanes that share a key: each takes every eighth float4 of it.
#define KEY_LANES 8
#define KEY_STEP (4 * KEY_LANES)
#define STREAMS (SIMD_WIDTH / KEY_LANES)
#define DECODE_GROUPS 8
#define HELD_WIDTH 128  // a query up to this long is held in registers
#define WIDE_WIDTH 256  // of longer values, what a threadgroup makes

// Four elements of a row of `width`; zeros beyond its end.
inline float4 load_dims(device const void *data, uint type, uint row, uint dim, uint width) {
    float4 values = float4(0.0f);
    if (vectorized && dim + 4 <= width) {
        values = load4(data, type, row + dim);
    } else {
        for (uint i = 0; i < 4; i++) {
            if (dim + i < width) {
                values[i] = load(data, type, row + dim + i);
            }
        }
    }
    return values;
}

// A query in registers, KEY_LANES lanes holding it together.
struct HeldQuery {
    float4 slices[HELD_WIDTH / KEY_STEP];

    template <typename Problem>
    void read(Problem problem, uint query, uint dim) {
#pragma unroll
        for (uint i = 0; i < HELD_WIDTH / KEY_STEP; i++) {
            slices[i] = load_dims(problem.q, q_type, problem.q_row(query), dim + i * KEY_STEP, problem.width());
        }
    }

    template <typename Problem>
    float dot_key(Problem problem, uint key, uint dim) const {
        const uint row = problem.k_row(key);
        float4 products = float4(0.0f);
#pragma unroll
        for (uint i = 0; i < HELD_WIDTH / KEY_STEP; i++) {
            products += slices[i] * load_dims(problem.k, k_type, row, dim + i * KEY_STEP, problem.width());
        }
        return (products.x + products.y) + (products.z + products.w);
    }
};

// A query of any width, read again for each key.
struct ReadQuery {
    uint row;

    template <typename Problem>
    void read(Problem problem, uint query, uint) {
        row = problem.q_row(query);
    }

    template <typename Problem>
    float dot_key(Problem problem, uint key, uint dim) const {
        const uint key_row = problem.k_row(key);
        const uint width = problem.width();
        float4 products = float4(0.0f);
        for (uint i = dim; i < width; i += KEY_STEP) {
            products += load_dims(problem.q, q_type, row, i, width) * load_dims(problem.k, k_type, key_row, i, width);
        }
        return (products.x + products.y) + (products.z + products.w);
    }
};

// One query of one head; WIDTH dimensions of the values from `first_dim` on. `sums` has DECODE_GROUPS · WIDTH elements,
// `largest_of` and `total_of` DECODE_GROUPS.
template <typename Query, uint WIDTH, typename Problem>
inline void attend(
    Problem problem, uint query, uint first_dim, threadgroup float *sums, threadgroup float *largest_of,
    threadgroup float *total_of, Place place
) {
    const uint stream = place.lane / KEY_LANES;
    const uint dim = place.lane % KEY_LANES * 4;
    const uint keys = problem.key_count(query);
    const uint width = problem.value_width();
    Query held;
    held.read(problem, query, dim);
    float largest = -FLT_MAX;
    float total = 0.0f;
    float4 values[WIDTH / KEY_STEP];
#pragma unroll
    for (uint i = 0; i < WIDTH / KEY_STEP; i++) {
        values[i] = float4(0.0f);
    }
    for (uint first = place.group * STREAMS; first < keys; first += place.groups * STREAMS) {
        const uint key = first + stream;
        const float bias = problem.bias(query, key);
        const bool attended = bias != -INFINITY;
        if (!simd_any(attended)) {
            continue;
        }
        float score = attended ? held.dot_key(problem, key, dim) : 0.0f;
        score += simd_shuffle_xor(score, 4);
        score += simd_shuffle_xor(score, 2);
        score += simd_shuffle_xor(score, 1);
        if (attended) {
            score = problem.capped(score * problem.scale) + bias;
            const float before = largest;
            largest = max(largest, score);
            const float shrink = exp(before - largest);
            const float weight = exp(score - largest);
            total = total * shrink + weight;
            const uint row = problem.v_row(key);
#pragma unroll
            for (uint i = 0; i < WIDTH / KEY_STEP; i++) {
                const float4 value = load_dims(problem.v, v_type, row, first_dim + dim + i * KEY_STEP, width);
                values[i] = values[i] * shrink + weight * value;
            }
        }
    }

    // The lanes of a stream agree on its maximum and total; lanes of different streams hold the same dimensions.
    const float largest_here = simd_max(largest);
    const float factor = exp(largest - largest_here);
    total *= factor;
    for (uint other = KEY_LANES; other < SIMD_WIDTH; other *= 2) {
        total += simd_shuffle_xor(total, other);
    }
#pragma unroll
    for (uint i = 0; i < WIDTH / KEY_STEP; i++) {
        values[i] *= factor;
        for (uint other = KEY_LANES; other < SIMD_WIDTH; other *= 2) {
            values[i] += simd_shuffle_xor(values[i], other);
        }
        if (stream == 0) {
            for (uint j = 0; j < 4; j++) {
                sums[place.group * WIDTH + i * KEY_STEP + dim + j] = values[i][j];
            }
        }
    }
    if (place.lane == 0) {
        largest_of[place.group] = largest_here;
        total_of[place.group] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    largest = -FLT_MAX;
    for (uint group = 0; group < place.groups; group++) {
        largest = max(largest, largest_of[group]);
    }
    total = 0.0f;
    for (uint group = 0; group < place.groups; group++) {
        total += total_of[group] * exp(largest_of[group] - largest);
    }
    total += problem.sink_weight(largest);
    for (uint i = place.thread_index(); i < min(WIDTH, width - first_dim); i += place.thread_count()) {
        float value = 0.0f;
        for (uint group = 0; group < place.groups; group++) {
            value += sums[group * WIDTH + i] * exp(largest_of[group] - largest);
        }
        // A query that attends to no key at all gets zeros, as in PyTorch.
        problem.put(query, first_dim + i, total == 0.0f ? 0.0f : value / total);
    }
}
