// The micro-kernels of integer_gemm.h, compiled once for every number of rows.
#include "integer_gemm.h"

#include <array>

namespace npu::integer {
namespace {

template <int kRows>
void multiply_rows(const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t pairs, int32_t* sums) {
  IVec sum[kRows][2] = {};
  const auto step = [&](const int16_t* at, const int16_t* w) __attribute__((always_inline)) {
    const ShortVec first = in_register(load_bits<ShortVec>(w));
    const ShortVec second = in_register(load_bits<ShortVec>(w + 2 * kLanes));
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const ShortVec value = bit_cast<ShortVec>(splat_bits(load_bits<int32_t>(at + r * row_stride)));
      sum[r][0] = add_integer_pairs(sum[r][0], value, first);
      sum[r][1] = add_integer_pairs(sum[r][1], value, second);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= pairs; i += 2, x += 4, panel += 4 * kPanel) {
    step(x, panel);
    step(x + 2, panel + 2 * kPanel);
  }
  if (i < pairs) step(x, panel);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(sums + r * kPanel, &sum[r][0], sizeof(IVec));
    std::memcpy(sums + r * kPanel + kLanes, &sum[r][1], sizeof(IVec));
  }
}

using Multiply = void (*)(const int16_t*, int64_t, const int16_t*, int64_t, int32_t*);
template <int... i>
constexpr std::array<Multiply, sizeof...(i)> table(std::integer_sequence<int, i...>) {
  return {multiply_rows<i + 1>...};
}
constexpr auto kTable = table(std::make_integer_sequence<int, kMaxRows>());

}  // namespace

void multiply(int64_t rows, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t pairs, int32_t* sums) {
  kTable[rows - 1](x, row_stride, panel, pairs, sums);
}

}  // namespace npu::integer
