// The micro-kernels of integer_gemm.h, compiled once for every number of rows.
#include "integer_gemm.h"

#include <array>

namespace npu::integer {
namespace {

NPU_INLINE IVec multiply_add(Pairs, IVec sum, IVec x, IVec w) {
  return add_integer_pairs(sum, bit_cast<ShortVec>(x), bit_cast<ShortVec>(w));
}
NPU_INLINE IVec multiply_add(Quads, IVec sum, IVec x, IVec w) {
  return add_byte_quads(sum, bit_cast<ByteVec>(x), bit_cast<ByteVec>(w));
}

template <class Format>
using Multiply = void (*)(const typename Format::Row*, int64_t, const typename Format::Weight*, int64_t, const int32_t*,
                          int32_t*);

template <class Format, int kRows>
void multiply_rows(const typename Format::Row* x, int64_t row_stride, const typename Format::Weight* panel,
                   int64_t steps, const int32_t* start, int32_t* sums) {
  constexpr int64_t kStep = Format::kStep;
  IVec sum[kRows][2] = {};
  if (start) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = load_bits<IVec>(start);
      sum[r][1] = load_bits<IVec>(start + kLanes);
    }
  }
  const auto step = [&](const typename Format::Row* at, const typename Format::Weight* w)
      __attribute__((always_inline)) {
    const IVec first = in_register(load_bits<IVec>(w));
    const IVec second = in_register(load_bits<IVec>(w + kStep * kLanes));
    prefetch_page_ahead<2 * sizeof(IVec)>(w);  // the first rows of a task get a panel from memory
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const IVec value = splat_bits(load_bits<int32_t>(at + r * row_stride));
      sum[r][0] = multiply_add(Format(), sum[r][0], value, first);
      sum[r][1] = multiply_add(Format(), sum[r][1], value, second);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= steps; i += 2, x += 2 * kStep, panel += 2 * kStep * kPanel) {
    step(x, panel);
    step(x + kStep, panel + kStep * kPanel);
  }
  if (i < steps) step(x, panel);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(sums + r * kPanel, &sum[r][0], sizeof(IVec));
    std::memcpy(sums + r * kPanel + kLanes, &sum[r][1], sizeof(IVec));
  }
}

template <class Format, int... i>
constexpr std::array<Multiply<Format>, sizeof...(i)> table(std::integer_sequence<int, i...>) {
  return {multiply_rows<Format, i + 1>...};
}
template <class Format>
constexpr auto kTable = table<Format>(std::make_integer_sequence<int, kMaxRows>());

}  // namespace

void multiply(int64_t rows, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums) {
  kTable<Pairs>[rows - 1](x, row_stride, panel, steps, start, sums);
}

void multiply(int64_t rows, const uint8_t* x, int64_t row_stride, const int8_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums) {
  kTable<Quads>[rows - 1](x, row_stride, panel, steps, start, sums);
}

}  // namespace npu::integer
