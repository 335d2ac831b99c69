// Products of rows with the matrices of the experts that they are routed to; a thread per output element.

#include "common.metal"

constant uint x_type [[function_constant(0)]];
constant uint weight_type [[function_constant(1)]];
constant uint bias_type [[function_constant(2)]];
constant uint out_type [[function_constant(3)]];
constant bool has_bias [[function_constant(4)]];

struct ExpertMatmulParams {
    uint e;
    uint k;
};

kernel void expert_matmul_kernel(
    device const void *x [[buffer(0)]],
    device const void *weight [[buffer(1)]],
    device const int *experts [[buffer(2)]],
    device const void *bias [[buffer(3), function_constant(has_bias)]],
    device void *out [[buffer(4)]],
    constant ExpertMatmulParams &params [[buffer(5)]],
    constant Strided *views [[buffer(6)]],
    uint2 position [[thread_position_in_grid]])
{
    constant Strided &target = views[4];
    const uint column = position.x;
    const uint row = position.y;
    if (column >= target.shape[1] || row >= target.shape[0]) {
        return;
    }
    const uint expert = uint(experts[row]);
    float sum = 0.0f;
    if (expert < params.e) {
        const uint shared_by = target.shape[0] / views[0].shape[0];
        const uint from_x = row / shared_by * views[0].strides[0];
        const uint from_weight = expert * views[1].strides[0] + column * views[1].strides[1];
        for (uint k = 0; k < params.k; k++) {
            sum += load(x, x_type, from_x + k) * load(weight, weight_type, from_weight + k * views[1].strides[2]);
        }
        if (has_bias) {
            sum += load(bias, bias_type, expert * views[3].strides[0] + column);
        }
    }
    store(out, out_type, row * target.strides[0] + column * target.strides[1], sum);
}
