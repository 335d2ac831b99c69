// Weights in few bits: how they are packed, and what the products with them are made of.
//
// Each group of consecutive elements of a row of w[N, K] has a scale and maybe an offset
// (npu_compiler/graph/quantization.py). Packed, the rows stand in panels of kPanel outputs, as in gemm.h. A panel holds
// for one group after the other the outputs' scales, their offsets, and the codes; so it is one sequential stream. A
// group's codes are divided into blocks of the same length, a multiple of 8; the last one is filled up with zeros.
//
// Codes are in units of 32 bits for each output: of consecutive k, eight 4-bit codes or four 8-bit ones. The low half has
// those of even k and the high half those of odd k, both from the lowest bits on: a shift makes pairs of 16-bit integers.
//
// Rows of 16-bit floats are multiplied as integers: each block of x becomes 16-bit integers with a power of two as scale,
// so that what is within a factor of 2^7 of the block's largest bfloat16 (of 2^4 for float16) is not rounded at all. The
// sums of a block are exact in 32 bits. Rows of float32, and all products with float8, are sums of floats.
#pragma once

#include "products/gemm.h"

namespace npu {

enum class Codes : int64_t { int4 = 0, int8 = 1, float8_e4m3 = 2, float4_e2m1 = 3, iq4_nl = 4 };
enum class Offsets : int64_t { none = 0, minimum = 1, zero_point = 2 };

// Bits of a code.
constexpr int64_t code_bits(Codes codes) {
  switch (codes) {
    case Codes::int4:
    case Codes::float4_e2m1:
    case Codes::iq4_nl: return 4;
    case Codes::int8:
    case Codes::float8_e4m3: return 8;
  }
  throw std::invalid_argument("unknown codes");
}

// Whether codes stand for integers, offsets aside.
constexpr bool are_integers(Codes codes) { return codes != Codes::float8_e4m3; }

// Whether codes of 4 bits choose their number from a table.
constexpr bool have_table(Codes codes) { return codes == Codes::float4_e2m1 || codes == Codes::iq4_nl; }

// Rows that are multiplied at once as integers: besides two accumulators a row, registers hold the panel's two vectors, the
// broadcast of x and a product.
inline constexpr int kMaxIntegerRows = kRegisters == 32 ? 12 : 6;

// Rows for which a panel's codes are made integers in registers, instead of once in memory for all rows: besides two
// accumulators a row, registers hold two vectors of codes and the integers of both.
inline constexpr int kMaxStreamRows = kRegisters == 32 ? 12 : 4;
static_assert(kMaxStreamRows <= kMaxIntegerRows);

inline constexpr int64_t kMaxBlock = 64;  // the most elements of a block: 64 * 255 * 2^15 is below 2^31

struct QuantizedFormat {
  Codes codes;
  Dtype scales;  // and minimums
  Offsets offsets;
  int64_t group, groups;  // elements of a group, and groups of a row
  int64_t block;

  int64_t bits() const { return code_bits(codes); }
  int64_t unit() const { return 32 / bits(); }
  int64_t group_blocks() const { return divide_up(group, block); }
  int64_t blocks() const { return groups * group_blocks(); }
  // The first element of block b of a row, and how many it has.
  int64_t begin(int64_t b) const { return b / group_blocks() * group + b % group_blocks() * block; }
  int64_t length(int64_t b) const { return std::min(block, group - b % group_blocks() * block); }

  int64_t offset_size() const {
    return offsets == Offsets::none ? 0 : offsets == Offsets::minimum ? item_size(scales) : 1;
  }
  int64_t header_bytes() const { return kPanel * (item_size(scales) + offset_size()); }
  int64_t block_bytes() const { return kPanel * block * bits() / 8; }
  int64_t group_bytes() const { return header_bytes() + group_blocks() * block_bytes(); }
  int64_t panel_bytes() const { return groups * group_bytes(); }
};

// A weight as checkpoints have it: contiguous rows of codes, of scales and of offsets.
struct QuantizedRows {
  const uint8_t* codes;
  const char* scales;
  const char* offsets;
};

void pack_quantized_panel(const QuantizedFormat& f, const QuantizedRows& w, int64_t columns, char* panel);

// A block of rows of x as integers, for one block of K after the other: pairs of neighbours in k, row by row for each
// pair, with zeros up to a whole block of K; and per row the scale of its block, and the sum of the block's integers.
struct IntegerRows {
  struct Block {
    float scale, sum;
  };
  int16_t* values;
  Block* blocks;

  static int64_t bytes(const QuantizedFormat& f, int64_t rows) {
    return rows * f.blocks() * (f.block * int64_t(sizeof(int16_t)) + int64_t(sizeof(Block)));
  }
  IntegerRows(const QuantizedFormat& f, int64_t rows, void* memory)
      : values(static_cast<int16_t*>(memory)),
        blocks(reinterpret_cast<Block*>(values + rows * f.blocks() * f.block)) {}
  // The block of rows that begins at `row`.
  IntegerRows from(const QuantizedFormat& f, int64_t row) const {
    IntegerRows result = *this;
    result.values += row * f.blocks() * f.block;
    result.blocks += row * f.blocks();
    return result;
  }
};

// Makes row `row` of a block of `rows` from 16-bit floats.
void make_integers(const QuantizedFormat& f, const char* x, Dtype dtype, int64_t rows, int64_t row, const IntegerRows& out);

// sums[rows][kPanel] = 1 to kMaxStreamRows rows times a packed panel, whose codes stay in registers.
void stream_rows(const QuantizedFormat& f, int64_t rows, const IntegerRows& x, const char* panel, float* sums);

// Blocks of a panel as 16-bit integers with zero points subtracted, in pairs of neighbours in k, and per block the
// outputs' scales and minimums.
struct IntegerPanel {
  int16_t* values;
  float *scales, *minimums;

  static int64_t bytes(const QuantizedFormat& f, int64_t blocks) {
    return blocks * kPanel * (f.block * int64_t(sizeof(int16_t)) + 2 * int64_t(sizeof(float)));
  }
  IntegerPanel(const QuantizedFormat& f, int64_t blocks, void* memory)
      : values(static_cast<int16_t*>(memory)),
        scales(reinterpret_cast<float*>(values + blocks * f.block * kPanel)),
        minimums(scales + blocks * kPanel) {}
};

void unpack_blocks(const QuantizedFormat& f, const char* panel, int64_t first, int64_t count, IntegerPanel& out);

// sums[rows][kPanel] += 1 to kMaxIntegerRows rows times blocks [first, first + count), which `panel` holds.
void multiply_blocks(const QuantizedFormat& f, int64_t rows, const IntegerRows& x, const IntegerPanel& panel,
                     int64_t first, int64_t count, float* sums);

// Blocks of a panel as numbers, in the steps of gemm.h.
template <class W>
void dequantize_blocks(const QuantizedFormat& f, const char* panel, int64_t first, int64_t count, W* out);

}  // namespace npu
