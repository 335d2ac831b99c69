// Products of a few rows (up to eight) with a weight [N, K] in few bits, bound by the bandwidth of reading it once; and such a
// weight widened, for products of many rows.

#include "common/stored_codes.cuh"

#kernel quantized_matvec
constexpr int rows = param::m;

#include "matmul/matvec_warps.cuh"

struct Sums {
    float of[terms][rows];

    // The products of `count` packs of each weight row, a step apart, with the others on their way before the first is used.
    template <int count>
    __device__ __forceinline__ void add(
        const X::type *x, const Data::type *data, const Scales::type *scales, const Offset::type *offset,
        const index_t (&weight_rows)[terms], index_t first
    ) {
        Codes read[count][terms];
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int term = 0; term < terms; term++) {
                read[i][term] = stream_pack<pack_bytes>(codes_at(data, weight_rows[term], first + i * step));
            }
        }
#pragma unroll
        for (int i = 0; i < count; i++) {
            add_pack(x, scales, offset, weight_rows, first + i * step, read[i]);
        }
    }

    __device__ __forceinline__ void add_pack(
        const X::type *x, const Scales::type *scales, const Offset::type *offset, const index_t (&weight_rows)[terms],
        index_t at, const Codes (&read)[terms]
    ) {
        float codes[terms][pack];
#pragma unroll
        for (int term = 0; term < terms; term++) {
            to_codes(codes[term], read[term]);
            if constexpr (!in_one_group) {
                to_elements(codes[term], scales, offset, weight_rows[term], at);
            }
        }
#pragma unroll
        for (int row = 0; row < rows; row++) {
            float values[pack];
            constexpr int side_by_side = smaller(smaller(pack, X::vector), 16 / sizeof(X::type));
#pragma unroll
            for (int i = 0; i < pack; i += side_by_side) {
                float few[side_by_side];
                load_floats(few, x + row * X::stride(0) + at + i);
#pragma unroll
                for (int j = 0; j < side_by_side; j++) {
                    values[i + j] = few[j];
                }
            }
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < pack; i++) {
                total += values[i];
            }
#pragma unroll
            for (int term = 0; term < terms; term++) {
                const Group whole(scales, offset, weight_rows[term], at);
                float product = in_one_group && is_shifted ? -whole.zero * total : 0.0f;
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    product = fmaf(values[i], codes[term][i], product);
                }
                const float shift = is_shifted ? whole.minimum * total : 0.0f;
                of[term][row] += in_one_group ? fmaf(whole.scale, product, shift) : product;
            }
        }
    }
};

KERNEL(quantized_matvec) {
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const index_t first_column = (index_t(blockIdx.x) * teams + warp / splits) * columns;
    index_t weight_rows[terms];
#pragma unroll
    for (int i = 0; i < columns; i++) {
        weight_rows[i] = first_column + i < param::n ? first_column + i : param::n - 1;
        if constexpr (gated) {
            weight_rows[columns + i] = weight_rows[i] + param::n;
        }
    }
    Sums sums{};
    index_t at = index_t(warp % splits * WARP + lane) * pack;
#pragma unroll 1
    for (index_t turn = 0; turn < steps / unrolled; turn++) {
        sums.add<unrolled>(x, data, scales, offset, weight_rows, at);
        at += unrolled * step;
    }
    if constexpr (steps % unrolled != 0) {
        sums.add<steps % unrolled>(x, data, scales, offset, weight_rows, at);
        at += steps % unrolled * step;
    }
    if (param::k % step != 0 && at < param::k) {
        sums.add<1>(x, data, scales, offset, weight_rows, at);
    }
    finish_columns(sums.of, warp, lane, bias, residual, out);
}

#kernel dequantize
KERNEL(dequantize) {
    const index_t at = (index_t(blockIdx.x) * THREADS + threadIdx.x) * pack;
    if (at < Out::numel) {
        float values[pack];
        load_elements(values, data, scales, offset, at / param::k, at % param::k);
        constexpr int side_by_side = smaller(smaller(pack, Out::vector), 16 / sizeof(Out::type));
#pragma unroll
        for (int i = 0; i < pack; i += side_by_side) {
            float few[side_by_side];
#pragma unroll
            for (int j = 0; j < side_by_side; j++) {
                few[j] = values[i + j];
            }
            store_floats(out + at + i, few);
        }
    }
}

#kernel quantized_embedding_kernel
// A thread per pack of an id's row.
KERNEL(quantized_embedding_kernel) {
    constexpr index_t columns = param::k / pack;
    const index_t number = index_t(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= Ids::numel * columns) {
        return;
    }
    const index_t column = number % columns * pack;
    const index_t id = number / columns;
    const index_t row = unsigned(ids[Ids::offset(id)]);
    Out::type *to = out + leading_offset<Out, Out::rank - 1>(id) + column * Out::stride(Out::rank - 1);
    float values[pack];
    if (param::checked || row < param::rows) {
        load_elements(values, data, scales, offset, row, column);
    }
#pragma unroll
    for (int i = 0; i < pack; i++) {
        const bool found = param::checked || row < param::rows;
        to[i * Out::stride(Out::rank - 1)] = found ? from<Out::type>(values[i]) : missing<Out::type>();
    }
}
