// Products of a few rows with a weight [N, K] in few bits on tensor cores: how units of its codes, scales and offsets are copied and
// multiplied. Codes become 16-bit integers (or float8 values) in registers, exactly. The scale of a group multiplies the sum of its
// products, and a minimum the sum of the group's terms of x.

using Half = X::type;

#include "matmul/streamed_layout.cuh"
#include "common/code_factors.cuh"

constexpr int row_bytes = in_nibbles ? part_terms / 2 : part_terms;
constexpr int row_packs = row_bytes / 16;
constexpr int groups = int(param::groups);
constexpr int parts = pieces / scaled_pieces;  // of a warp's terms, each with one scale

// All rows of a unit lie side by side in a part of the weight: what a block copies of it at a time.
template <class Operand>
struct Side {
    using type = typename Operand::type;
    static constexpr int bytes = Operand::present ? unit_rows * groups * int(sizeof(type)) : 0;
    static constexpr int pack = bytes % 16 == 0 ? 16 : 8;
    static constexpr int room = (bytes + 15) / 16 * 16;

    __device__ __forceinline__ static void copy(unsigned char *target, const type *source, index_t column) {
        if constexpr (Operand::present) {
            const type *first = source + column * groups;
            for (int i = threadIdx.x; i < bytes / pack; i += THREADS) {
                const type *from = first + i * (pack / int(sizeof(type)));
                copy_words<pack>(reinterpret_cast<type *>(target + i * pack), from, true);
            }
        }
    }
};

constexpr int scales_place = unit_rows * row_bytes;
constexpr int offsets_place = scales_place + Side<Scales>::room;
constexpr int unit_bytes = offsets_place + Side<Offset>::room;

static_assert(group % 32 == 0 && param::n % unit_rows == 0 && row_packs % 8 == 0 && pieces % scaled_pieces == 0, "");

// Where 16 bytes of codes of a row of a unit lie, so that the lanes of a warp read from different banks.
__device__ __forceinline__ int place_of(int row, int pack) {
    return row * row_bytes + (pack ^ (in_nibbles ? row : row % 4 * 2)) * 16;
}

struct Weights {
    const unsigned char *data;
    const Scales::type *scales;
    const Offset::type *offset;
    unsigned first_unit;
    int bytes;  // of a row of codes, in the block
    int first_piece;  // of the warp, of a row
    int warp = threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    float x_sums[has_minimum ? m_fragments : 1][2][has_minimum ? parts : 1];

    __device__ __forceinline__ Weights(
        const unsigned char *data, const Scales::type *scales, const Offset::type *offset, unsigned first_unit,
        int first_term, int terms
    )
        : data(data + (in_nibbles ? first_term / 2 : first_term)),
          scales(scales),
          offset(offset),
          first_unit(first_unit),
          bytes(in_nibbles ? terms / 2 : terms),
          first_piece(first_term / 32 + int(threadIdx.x) / WARP * pieces) {}

    __device__ __forceinline__ void copy(unsigned turn, unsigned char *unit) const {
        const index_t column = unit_column(first_unit, turn) + (gated && turn % 2 ? param::n : 0);
#pragma unroll
        for (int first = 0; first < unit_rows * row_packs; first += THREADS) {
            const int i = first + threadIdx.x;
            if (unit_rows * row_packs % THREADS == 0 || i < unit_rows * row_packs) {
                const int row = i / row_packs;
                const int pack = i % row_packs;
                const bool inside = pack * 16 < bytes;
                const unsigned char *from = data + (inside ? (column + row) * Data::stride(0) + pack * 16 : 0);
                copy_words(unit + place_of(row, pack), from, inside);
            }
        }
        Side<Scales>::copy(unit + scales_place, scales, column);
        Side<Offset>::copy(unit + offsets_place, offset, column);
    }

    __device__ __forceinline__ void prepare(Rows &own) {
        if constexpr (has_minimum) {
            const unsigned ones[4] = {one, one, one, one};
#pragma unroll
            for (int part = 0; part < parts; part++) {
                Sums found = {};
#pragma unroll
                for (int i = part * scaled_pieces; i < (part + 1) * scaled_pieces; i++) {
                    multiply_piece(found, own, i, ones);
                }
#pragma unroll
                for (int m = 0; m < m_fragments; m++) {
                    x_sums[m][0][part] = found[m][0];
                    x_sums[m][1][part] = found[m][2];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < m_fragments; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < pieces; i++) {
                    own[m][half][i] = in_order_of_factors(own[m][half][i]);
                }
            }
        }
    }

    __device__ __forceinline__ void add(Sums &sums, const unsigned char *unit, const Rows &own) const {
        const Scales::type *unit_scales = reinterpret_cast<const Scales::type *>(unit + scales_place);
        const Offset::type *unit_offsets = reinterpret_cast<const Offset::type *>(unit + offsets_place);
#pragma unroll
        for (int part = 0; part < parts; part++) {
            // Behind the last term, where x is 0, any group will do.
            const int number = groups == 1 ? 0 : smaller((first_piece + part * scaled_pieces) * 32 / int(group), groups - 1);
            const unsigned zero = less_zero_of(unit_offsets, lane / 4 * groups + number);
            Sums partial = {};
#pragma unroll
            for (int i = part * scaled_pieces; i < (part + 1) * scaled_pieces; i++) {
                const int byte = (warp * pieces + i) * (in_nibbles ? 16 : 32) + lane % 4 * (in_nibbles ? 4 : 8);
                const Factors weight(unit + place_of(lane / 4, byte / 16) + byte % 16, zero);
                multiply_piece(partial, own, i, weight.pair);
            }
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const int at = (lane % 4 * 2 + side) * groups + number;
                const float scale = to_float(unit_scales[at]);
#pragma unroll
                for (int m = 0; m < m_fragments; m++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float &sum = sums[m][2 * half + side];
                        sum = fmaf(partial[m][2 * half + side], scale, sum);
                        if constexpr (has_minimum) {
                            sum = fmaf(x_sums[m][half][part], to_float(unit_offsets[at]), sum);
                        }
                    }
                }
            }
        }
    }
};

#define WEIGHT data, scales, offset

#kernel streamed
#include "matmul/streamed_kernel.cuh"
