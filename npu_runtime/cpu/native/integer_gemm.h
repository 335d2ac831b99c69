// The product of int16 that integer convolutions share: rows times one panel of packed columns, with sums in int32.
//
// A panel holds kPanel output channels: for one pair of a row's elements after the other, each channel's two int16.
#pragma once

#include "gemm.h"

namespace npu::integer {

// sums[r][0..kPanel) = x[r] . panel, for 1 to kMaxRows rows of `pairs` pairs, `row_stride` elements apart.
void multiply(int64_t rows, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t pairs, int32_t* sums);

}  // namespace npu::integer
