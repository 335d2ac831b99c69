// Recurrent layers: a threadgroup takes one sequence of the batch in one direction through all steps. Its threads divide
// the hidden state; the others' parts of the step before are read back from the output.

#include "common.metal"

// An operand of the first direction and its twin of the other one are stored alike.
constant uint x_type [[function_constant(0)]];
constant uint h0_type [[function_constant(1)]];
constant uint c0_type [[function_constant(2)]];
constant uint weight_type [[function_constant(3)]];
constant uint hidden_weight_type [[function_constant(4)]];
constant uint bias_type [[function_constant(5)]];
constant uint hidden_bias_type [[function_constant(6)]];
constant uint back_weight_type [[function_constant(7)]];
constant uint back_hidden_weight_type [[function_constant(8)]];
constant uint back_bias_type [[function_constant(9)]];
constant uint back_hidden_bias_type [[function_constant(10)]];
constant uint out_type [[function_constant(11)]];
constant uint hn_type [[function_constant(12)]];
constant uint cn_type [[function_constant(13)]];
constant bool has_bias [[function_constant(14)]];
constant bool has_hidden_bias [[function_constant(15)]];
constant bool has_back_weight [[function_constant(16)]];
constant bool has_back_hidden_weight [[function_constant(17)]];
constant bool has_back_bias [[function_constant(18)]];
constant bool has_back_hidden_bias [[function_constant(19)]];
constant uint cell [[function_constant(20)]];

#define GRU 0
#define TANH 1
#define LARGEST_HIDDEN 4096  // npu_compiler/ops/recurrent.py

// A weight [G·H, K] of one direction, and its bias.
struct Weight {
    device const void *data;
    device const void *bias;
    uint type;
    uint bias_type;
    bool biased;
    uint width;
    uint stride;

    // The product of a row with `width` values, `step` elements apart.
    float times(uint row, device const void *values, uint values_type, uint start, uint step) const {
        float sum = biased ? load(bias, bias_type, row) : 0.0f;
        for (uint k = 0; k < width; k++) {
            sum += load(data, type, row * stride + k) * load(values, values_type, start + k * step);
        }
        return sum;
    }
};

// One sequence in one direction. `views` are those of x, h0, out and hn.
struct Sequence {
    Weight weight;
    Weight hidden;
    uint row;
    uint direction;
    uint size;  // of the hidden state

    uint state(constant Strided &view, uint unit) const {
        return direction * view.strides[0] + row * view.strides[1] + unit * view.strides[2];
    }

    uint result(constant Strided &out, uint step, uint unit) const {
        return step * out.strides[0] + row * out.strides[1] + (direction * size + unit) * out.strides[2];
    }

    uint input(constant Strided &x, uint step) const { return step * x.strides[0] + row * x.strides[1]; }
};

inline Sequence sequence_of(
    device const void *weight, device const void *hidden_weight, device const void *bias, device const void *hidden_bias,
    device const void *back_weight, device const void *back_hidden_weight, device const void *back_bias,
    device const void *back_hidden_bias, constant Strided *weights, uint size, uint2 position
) {
    // weights[0], [1]: of the first direction; [4], [5]: of the other one, after two biases.
    if (has_back_weight && position.y == 1) {
        return Sequence{
            Weight{back_weight, back_bias, back_weight_type, back_bias_type, has_back_bias, weights[4].shape[1],
                   weights[4].strides[0]},
            Weight{back_hidden_weight, back_hidden_bias, back_hidden_weight_type, back_hidden_bias_type,
                   has_back_hidden_bias, size, weights[5].strides[0]},
            position.x, 1, size};
    }
    return Sequence{
        Weight{weight, bias, weight_type, bias_type, has_bias, weights[0].shape[1], weights[0].strides[0]},
        Weight{hidden_weight, hidden_bias, hidden_weight_type, hidden_bias_type, has_hidden_bias, size,
               weights[1].strides[0]},
        position.x, 0, size};
}

kernel void lstm_kernel(
    device const void *x [[buffer(0)]],
    device const void *h0 [[buffer(1)]],
    device const void *c0 [[buffer(2)]],
    device const void *weight [[buffer(3)]],
    device const void *hidden_weight [[buffer(4)]],
    device const void *bias [[buffer(5), function_constant(has_bias)]],
    device const void *hidden_bias [[buffer(6), function_constant(has_hidden_bias)]],
    device const void *back_weight [[buffer(7), function_constant(has_back_weight)]],
    device const void *back_hidden_weight [[buffer(8), function_constant(has_back_hidden_weight)]],
    device const void *back_bias [[buffer(9), function_constant(has_back_bias)]],
    device const void *back_hidden_bias [[buffer(10), function_constant(has_back_hidden_bias)]],
    device void *out [[buffer(11)]],
    device void *hn [[buffer(12)]],
    device void *cn [[buffer(13)]],
    constant Strided *views [[buffer(15)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint first [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]])
{
    threadgroup float cells[LARGEST_HIDDEN];  // a thread reads and writes its own elements only
    const uint steps = views[0].shape[0];
    const uint size = views[1].shape[2];
    const Sequence own = sequence_of(
        weight, hidden_weight, bias, hidden_bias, back_weight, back_hidden_weight, back_bias, back_hidden_bias,
        views + 3, size, position);
    for (uint step = 0; step < steps; step++) {
        const uint at = own.direction ? steps - 1 - step : step;
        const uint before = own.direction ? at + 1 : at - 1;
        for (uint unit = first; unit < size; unit += threads.x) {
            float gates[4];
            for (uint gate = 0; gate < 4; gate++) {
                const uint row = gate * size + unit;
                gates[gate] = own.weight.times(row, x, x_type, own.input(views[0], at), views[0].strides[2]);
                gates[gate] += step == 0
                    ? own.hidden.times(row, h0, h0_type, own.state(views[1], 0), views[1].strides[2])
                    : own.hidden.times(row, out, out_type, own.result(views[11], before, 0), views[11].strides[2]);
            }
            const float cell_before = step == 0 ? load(c0, c0_type, own.state(views[2], unit)) : cells[unit];
            const float now = sigmoid(gates[1]) * cell_before + sigmoid(gates[0]) * precise::tanh(gates[2]);
            const float h = sigmoid(gates[3]) * precise::tanh(now);
            cells[unit] = now;
            store(out, out_type, own.result(views[11], at, unit), h);
            if (step + 1 == steps) {
                store(hn, hn_type, own.state(views[12], unit), h);
                store(cn, cn_type, own.state(views[13], unit), now);
            }
        }
        threadgroup_barrier(mem_flags::mem_device);
    }
}

kernel void rnn_kernel(
    device const void *x [[buffer(0)]],
    device const void *h0 [[buffer(1)]],
    device const void *weight [[buffer(2)]],
    device const void *hidden_weight [[buffer(3)]],
    device const void *bias [[buffer(4), function_constant(has_bias)]],
    device const void *hidden_bias [[buffer(5), function_constant(has_hidden_bias)]],
    device const void *back_weight [[buffer(6), function_constant(has_back_weight)]],
    device const void *back_hidden_weight [[buffer(7), function_constant(has_back_hidden_weight)]],
    device const void *back_bias [[buffer(8), function_constant(has_back_bias)]],
    device const void *back_hidden_bias [[buffer(9), function_constant(has_back_hidden_bias)]],
    device void *out [[buffer(10)]],
    device void *hn [[buffer(11)]],
    constant Strided *views [[buffer(13)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint first [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]])
{
    const uint steps = views[0].shape[0];
    const uint size = views[1].shape[2];
    const Sequence own = sequence_of(
        weight, hidden_weight, bias, hidden_bias, back_weight, back_hidden_weight, back_bias, back_hidden_bias,
        views + 2, size, position);
    for (uint step = 0; step < steps; step++) {
        const uint at = own.direction ? steps - 1 - step : step;
        const uint before = own.direction ? at + 1 : at - 1;
        for (uint unit = first; unit < size; unit += threads.x) {
            float given[3];
            float recalled[3];
            for (uint gate = 0; gate < (cell == GRU ? 3 : 1); gate++) {
                const uint row = gate * size + unit;
                given[gate] = own.weight.times(row, x, x_type, own.input(views[0], at), views[0].strides[2]);
                recalled[gate] = step == 0
                    ? own.hidden.times(row, h0, h0_type, own.state(views[1], 0), views[1].strides[2])
                    : own.hidden.times(row, out, out_type, own.result(views[10], before, 0), views[10].strides[2]);
            }
            float h;
            if (cell == GRU) {
                const float last = step == 0
                    ? load(h0, h0_type, own.state(views[1], unit))
                    : load(out, out_type, own.result(views[10], before, unit));
                const float keep = sigmoid(given[1] + recalled[1]);
                h = (1.0f - keep) * precise::tanh(given[2] + sigmoid(given[0] + recalled[0]) * recalled[2]) + keep * last;
            } else {
                const float total = given[0] + recalled[0];
                h = cell == TANH ? precise::tanh(total) : relu(total);
            }
            store(out, out_type, own.result(views[10], at, unit), h);
            if (step + 1 == steps) {
                store(hn, hn_type, own.state(views[11], unit), h);
            }
        }
        threadgroup_barrier(mem_flags::mem_device);
    }
}
