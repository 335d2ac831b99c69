// Products of a few rows with a weight in 16 bits on tensor cores: how its units are copied and multiplied.

using Half = X::type;

#include "matmul/streamed_layout.cuh"

constexpr int row_bytes = part_terms * 2;
constexpr int unit_bytes = unit_rows * row_bytes;

// Where 16 bytes of a row of a unit lie, so that the lanes of a warp read from different banks.
__device__ __forceinline__ int place_of(int row, int pack) { return row * row_bytes + (pack ^ row % 2 * 4) * 16; }

// A thread copies `pieces` times 16 bytes of a row of each unit.
struct Weights {
    const Weight::type *from;
    unsigned first_unit;
    int terms;  // of the block
    int warp = threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    int row = warp % unit_rows;
    int pack = warp / unit_rows * WARP * pieces + lane;

    __device__ __forceinline__ Weights(const Weight::type *weight, unsigned first_unit, int first_term, int terms)
        : from(weight + first_term), first_unit(first_unit), terms(terms) {}

    __device__ __forceinline__ void copy(unsigned turn, unsigned char *unit) const {
        const index_t column = unit_column(first_unit, turn) + row;
        const bool exists = param::n % unit_rows == 0 || column < param::n;
        const Weight::type *source = from + (column + (gated && turn % 2 ? param::n : 0)) * Weight::stride(0) + pack * 8;
        unsigned char *to = unit + place_of(row, pack);
#pragma unroll
        for (int i = 0; i < pieces; i++) {
            const bool inside = exists && (param::k == splits * part_terms || (pack + i * WARP) * 8 < terms);
            copy_words(reinterpret_cast<Half *>(to + i * WARP * 16), inside ? source + i * WARP * 8 : from, inside);
        }
    }

    __device__ __forceinline__ void prepare(Rows &) {}

    __device__ __forceinline__ void add(Sums &sums, const unsigned char *unit, const Rows &own) const {
        const int first_pack = warp * pieces * 4 + lane % 4;
#pragma unroll
        for (int i = 0; i < pieces; i++) {
            const Words words = *reinterpret_cast<const Words *>(unit + place_of(lane / 4, first_pack + 4 * i));
            multiply_piece(sums, own, i, words.at);
        }
    }
};

#define WEIGHT weight

#kernel streamed
#include "matmul/streamed_kernel.cuh"
