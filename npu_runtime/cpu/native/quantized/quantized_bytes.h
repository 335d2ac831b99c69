// Products of weights in int4 and int8 with rows that were rounded to int8: codes are multiplied as bytes, where they lie
// in the packed panel, and the sums of a group are exact in 32 bits.
#pragma once

#include "quantized/quantized.h"
#include "quantized/row_rounding.h"

namespace npu {

// Two accumulators a row besides the panel's two vectors, the broadcast of x, and a product.
inline constexpr int kMaxByteRows = kRegisters == 32 ? 12 : 6;
inline constexpr int64_t kMaxByteGroup = 1 << 16;  // elements of a group: 2^16 * 255 * 127 is below 2^31

// A block of rows of x as bytes, for one group after the other: quads of codes in the order of the panel's units (see
// quantized.h), row by row for each quad, with zeros up to a whole block; and per row the sum of the group's codes, as a
// float where the weight has minimums.
struct ByteRows {
  int32_t* quads;
  int32_t* sums;

  static int64_t group_quads(const QuantizedFormat& f) { return f.group_blocks() * f.block / 4; }
  static int64_t bytes(const QuantizedFormat& f, int64_t rows) {
    return rows * f.groups * (group_quads(f) + 1) * int64_t(sizeof(int32_t));
  }
  ByteRows(const QuantizedFormat& f, int64_t rows, void* memory)
      : quads(static_cast<int32_t*>(memory)), sums(quads + rows * f.groups * group_quads(f)) {}
  // The block of rows that begins at `row`.
  ByteRows from(const QuantizedFormat& f, int64_t row) const {
    ByteRows result = *this;
    result.quads += row * f.groups * group_quads(f);
    result.sums += row * f.groups;
    return result;
  }
};

// Makes row `row` of a block of `rows` from floats, and returns its scale.
float make_bytes(const QuantizedFormat& f, const char* x, Dtype dtype, int64_t rows, int64_t row, const ByteRows& out);

// sums[rows][kPanel] = 1 to kMaxByteRows rows times a packed panel, without the rows' scales.
void multiply_bytes(const QuantizedFormat& f, int64_t rows, const ByteRows& x, const char* panel, float* sums);

}  // namespace npu
