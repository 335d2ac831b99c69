// Products of rows with the matrices of the experts that they are routed to; a warp per output element.

constexpr index_t shared_by = Out::size(0) / X::size(0);

#kernel expert_matmul_kernel
KERNEL(expert_matmul_kernel) {
    const index_t number = (index_t(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (number >= Out::numel) {
        return;
    }
    const index_t row = number / Out::size(1), column = number % Out::size(1);
    const unsigned expert = unsigned(experts[Experts::offset(row)]);
    float sum = 0.0f;
    if (expert < param::e) {
        const X::type *left = x + row / shared_by * X::stride(0);
        const Weight::type *right = weight + index_t(expert) * Weight::stride(0) + column * Weight::stride(1);
        for (index_t k = lane * pack; k < param::k; k += WARP * pack) {
            if constexpr (pack == 1) {
                sum = fmaf(to_float(left[k * X::stride(1)]), to_float(right[k * Weight::stride(2)]), sum);
            } else {
                float values[pack], factors[pack];
                load_floats(values, left + k);
                load_floats(factors, right + k);
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    sum = fmaf(values[i], factors[i], sum);
                }
            }
        }
        sum = warp_sum(sum);
        if constexpr (Bias::present) {
            sum += to_float(bias[index_t(expert) * Bias::stride(0) + column * Bias::stride(1)]);
        }
    }
    if (lane == 0) {
        out[Out::offset(number)] = from<Out::type>(sum);
    }
}

#kernel quantized_expert_matmul_kernel
#include "common/stored_codes.cuh"

KERNEL(quantized_expert_matmul_kernel) {
    const index_t number = (index_t(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (number >= Out::numel) {
        return;
    }
    const index_t row = number / Out::size(1), column = number % Out::size(1);
    const unsigned expert = unsigned(experts[Experts::offset(row)]);
    float sum = 0.0f;
    if (expert < param::e) {
        const X::type *left = x + row / shared_by * X::stride(0);
        for (index_t k = lane * pack; k < param::k; k += WARP * pack) {
            float right[pack];
            load_elements(right, data, scales, offset, index_t(expert) * Out::size(1) + column, k);
#pragma unroll
            for (int i = 0; i < pack; i++) {
                sum = fmaf(to_float(left[(k + i) * X::stride(1)]), right[i], sum);
            }
        }
        sum = warp_sum(sum);
        if constexpr (Bias::present) {
            sum += to_float(bias[index_t(expert) * Bias::stride(0) + column * Bias::stride(1)]);
        }
    }
    if (lane == 0) {
        out[Out::offset(number)] = from<Out::type>(sum);
    }
}
