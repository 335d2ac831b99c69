// How a product of a few rows is divided, for the kernels that include `streamed_kernel.cuh`: that says what it does.

#include "common/tensor_cores.cuh"
#include "common/cluster.cuh"
#include "matmul/linear_result.cuh"

constexpr int warps = THREADS / WARP;
constexpr int unit_rows = 8;
constexpr int part_terms = warps * pieces * 32;  // room for a block's terms
constexpr int m_fragments = tile_m / 16;
constexpr int results = tile_m * unit_rows;  // of a unit
constexpr int share = (int(param::k + 31) / 32 + splits - 1) / splits * 32;  // terms of a block
constexpr unsigned all_units = (unsigned(param::n) + unit_rows - 1) / unit_rows;  // of the result
constexpr unsigned most_units = (all_units + clusters - 1) / clusters;  // of a cluster
constexpr int turns = (results + THREADS - 1) / THREADS;

static_assert(sizeof(Half) == 2 && (!normed || IsBrain<Half>::value), "");
static_assert(warps % unit_rows == 0 && share <= part_terms && param::k % 8 == 0 && int(param::m) <= tile_m, "");

using Rows = Words[m_fragments][2][pieces];  // of x, a warp's terms: rows 16m + 8h + g, eight terms of each piece
using Sums = float[m_fragments][4];  // of a unit, in the fragments of `multiply`

// Adds the products of a piece of x with eight terms of a row of the weight.
__device__ __forceinline__ void multiply_piece(Sums &sums, const Rows &own, int piece, const unsigned (&weight)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
#pragma unroll
        for (int m = 0; m < m_fragments; m++) {
            const Words &top = own[m][0][piece];
            const Words &bottom = own[m][1][piece];
            multiply(sums[m], top.at[j], bottom.at[j], top.at[j + 1], bottom.at[j + 1], weight[j], weight[j + 1]);
        }
    }
}

// The first row of the weight of a turn's unit.
__device__ __forceinline__ index_t unit_column(unsigned first_unit, unsigned turn) {
    return index_t(first_unit + (gated ? turn / 2 : turn)) * unit_rows;
}
