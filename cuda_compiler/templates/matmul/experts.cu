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
#include "common/stream_pack.cuh"

KERNEL(quantized_expert_matmul_kernel) {
    const index_t number = (index_t(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (number >= Out::numel) {
        return;
    }
    const index_t row = number / Out::size(1), column = number % Out::size(1);
    const unsigned expert = unsigned(experts[Experts::offset(row)]);
    const index_t own = index_t(expert) * Out::size(1) + column;
    constexpr int side_by_side = smaller(smaller(pack, X::vector), 16 / sizeof(X::type));
    float sum = 0.0f;
    if (expert < param::e) {
        const X::type *left = x + row / shared_by * X::stride(0);
        for (index_t k = lane * pack; k < param::k; k += WARP * pack) {
            float codes[pack];
            to_codes(codes, stream_pack<pack_bytes>(codes_at(data, own, k)));
            if constexpr (!in_one_group) {
                to_elements(codes, scales, offset, own, k);
            }
            float product = 0.0f;
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < pack; i += side_by_side) {
                float few[side_by_side];
                if constexpr (side_by_side == 1) {
                    few[0] = to_float(left[(k + i) * X::stride(1)]);
                } else {
                    load_floats(few, left + k + i);
                }
#pragma unroll
                for (int j = 0; j < side_by_side; j++) {
                    product = fmaf(few[j], codes[i + j], product);
                    total += few[j];
                }
            }
            if constexpr (in_one_group) {
                const Group whole(scales, offset, own, k);
                const float shift = has_minimum ? whole.minimum * total : 0.0f;
                sum += fmaf(whole.scale, is_shifted ? fmaf(-whole.zero, total, product) : product, shift);
            } else {
                sum += product;
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
