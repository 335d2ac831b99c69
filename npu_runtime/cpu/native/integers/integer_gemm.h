// The products that integer convolutions share: rows times one panel of packed columns, with sums in int32, which may
// become bytes while they are in registers.
//
// A panel holds kPanel output channels: for one step of a row's elements after the other, each channel's elements. A
// step is two int16 or four bytes.
#pragma once

#include "integers/integer_args.h"
#include "products/gemm.h"

namespace npu::integer {

// Rows and weights in int16, for weights with zero points and where no instruction multiplies bytes.
struct Pairs {
  using Row = int16_t;
  using Weight = int16_t;
  static constexpr int64_t kStep = 2;
};

// Rows of bytes from 0 to 255, weights of bytes from -128 to 127.
struct Quads {
  using Row = uint8_t;
  using Weight = int8_t;
  static constexpr int64_t kStep = 4;
};

// The same for a matrix unit, where kHasTiles: panels have zeros up to a multiple of kTileSteps, so what stands behind a
// row's elements does not count.
struct TiledQuads : Quads {};

// Where sums become bytes: those of row r at out + r * stride.
struct Codes {
  const float *scales, *biases;
  Rounding round;
  char* out;
  int64_t stride;
  bool is_signed;
};

// sums[r][0..kPanel) = start + x[r] . panel, for 1 to kMaxRows rows of `steps` steps, `row_stride` elements apart. Where
// `start` is null, sums begin with 0. With at most kLanes channels, only the first vector of a row's sums is made.
void multiply(int64_t rows, int64_t channels, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums);
void multiply(int64_t rows, int64_t channels, const uint8_t* x, int64_t row_stride, const int8_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums);
// The same, added to what sums[r] holds.
struct Added {
  int32_t* sums;
};
void multiply(int64_t rows, int64_t channels, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, Added sums);
// The same, and then codes of sums * scale + bias, where kMakesCodes; `channels` is kLanes or kPanel. It spares storing sums, which costs as much as two
// steps where vectors are long. With 16 registers there is no room for what rows share.
inline constexpr bool kMakesCodes = kLanes == 16;
void multiply(int64_t rows, int64_t channels, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, const Codes& codes);
void multiply(int64_t rows, int64_t channels, const uint8_t* x, int64_t row_stride, const int8_t* panel, int64_t steps,
              const int32_t* start, const Codes& codes);

}  // namespace npu::integer
