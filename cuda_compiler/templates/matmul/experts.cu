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

#kernel quantized_expert_tiles
// Products of integer codes with x in spans, as integers on tensor cores (see `quantized.cuh`). A warp makes 16 results of a row
// from its share of the terms, of which `splits` warps of a block have one each. Lane 4g + p takes rows g and g + 8 of a tile of the
// weight, and of four spans span p.
using Half = X::type;

#include "common/tensor_cores.cuh"
#include "common/quantized.cuh"
#include "common/stream_pack.cuh"

constexpr int warps = THREADS / WARP;
constexpr int tiles = warps / splits;  // of a block
constexpr index_t columns = Out::size(1);
constexpr index_t blocks = (columns + 16 * tiles - 1) / (16 * tiles);  // of a row
constexpr int spans = param::k / span;
constexpr int steps = ((spans + 3) / 4 + splits * unrolled - 1) / (splits * unrolled) * unrolled;  // of a warp
constexpr int staged = 4 * steps * splits;  // spans of x, with zeros behind the last
constexpr int group_spans = param::k / param::groups / span;

struct Shared {
    alignas(16) unsigned x[staged][span_words];
    SpanScale spans[staged];
    float sums[warps][16];
};

__device__ __forceinline__ void stage_row(Shared &shared, const Half *row) {
    for (int first = threadIdx.x / WARP * WARP; first < staged * span_packs; first += THREADS) {  // whole warps
        const int at = first + threadIdx.x % WARP;
        Pack<Half, 8> values = {};
        if (at < spans * span_packs) {
            values = load_pack<8>(row + 8 * at);
        }
        const SpanPack<Half> made(values);
        if (at < staged * span_packs) {
            made.store(shared.x[at / span_packs], shared.spans[at / span_packs], at % span_packs);
        }
    }
    __syncthreads();
}

KERNEL(quantized_expert_tiles) {
    __shared__ Shared shared;
    const index_t row = blockIdx.x / blocks;
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, p = threadIdx.x % 4;
    const index_t first_column = (blockIdx.x % blocks * tiles + warp / splits) * 16;
    const unsigned expert = unsigned(experts[Experts::offset(row)]);
    const bool exists = expert < param::e;
    stage_row(shared, x + row / shared_by * X::stride(0));
    index_t own[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const index_t column = first_column + g + 8 * half;
        own[half] = (exists ? index_t(expert) * columns : 0) + (column < columns ? column : columns - 1);
    }
    float totals[2] = {};
#pragma unroll 1
    for (int step = warp % splits * steps; step < (warp % splits + 1) * steps; step += unrolled) {
        Words read[unrolled][2];
        Scales::type scale[unrolled][2];
        OffsetValue shift[unrolled][2] = {};
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            // Behind the last span, where x is 0, any codes will do.
            const int place = smaller(4 * (step + i) + p, spans - 1);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const auto codes = stream_pack<16>(data + own[half] * Data::stride(0) + 16 * place);
                read[i][half] = *reinterpret_cast<const Words *>(&codes);
                scale[i][half] = scales[own[half] * Scales::stride(0) + place / group_spans];
                if constexpr (Offset::present) {
                    shift[i][half] = offset_value(offset[own[half] * Offset::stride(0) + place / group_spans]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < unrolled; i++) {
            const int place = 4 * (step + i) + p;
            const SpanScale of_x = shared.spans[place];
            unsigned plane[lane_words];
            load_plane(plane, shared.x[place], g % 2, g / 2 == p);
            SpanSums sums(of_x);
            sums.add(Operand(read[i][0], read[i][1]), plane);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                totals[half] = sums.scaled(half, of_x, to_float(scale[i][half]), shift[i][half], totals[half]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        totals[half] += __shfl_xor_sync(0xffffffffu, totals[half], 1);
        totals[half] += __shfl_xor_sync(0xffffffffu, totals[half], 2);
        if (p == 0) {
            shared.sums[warp][g + 8 * half] = totals[half];
        }
    }
    __syncthreads();
    for (int result = threadIdx.x; result < 16 * tiles; result += THREADS) {
        const index_t column = blockIdx.x % blocks * tiles * 16 + result;
        if (column >= columns) {
            continue;
        }
        float sum = 0.0f;
        if (exists) {
#pragma unroll
            for (int part = 0; part < splits; part++) {
                sum += shared.sums[result / 16 * splits + part][result % 16];
            }
            if constexpr (Bias::present) {
                sum += to_float(bias[index_t(expert) * Bias::stride(0) + column * Bias::stride(1)]);
            }
        }
        out[Out::offset(row * columns + column)] = from<Out::type>(sum);
    }
}
