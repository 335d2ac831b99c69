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

struct PutSums {
  int32_t* sums;
  NPU_INLINE void operator()(int r, IVec first, IVec second) const {
    std::memcpy(sums + r * kPanel, &first, sizeof(IVec));
    std::memcpy(sums + r * kPanel + kLanes, &second, sizeof(IVec));
  }
};

// Stored bytes may alias anything, so what rows share is in local variables.
struct PutCodes {
  const Codes to;
  Vec scales[2], biases[2];
  NPU_INLINE explicit PutCodes(const Codes& codes)
      : to(codes), scales{load(to.scales), load(to.scales + kLanes)}, biases{load(to.biases), load(to.biases + kLanes)} {}
  NPU_INLINE void operator()(int r, IVec first, IVec second) const {
    const IVec low = to.round.numbers(to_floats(first) * scales[0] + biases[0]);
    const IVec high = to.round.numbers(to_floats(second) * scales[1] + biases[1]);
    char* out = to.out + r * to.stride;
    if (to.is_signed) store_bytes(reinterpret_cast<int8_t*>(out), low, high, to.round.codes);
    else store_bytes(reinterpret_cast<uint8_t*>(out), low, high, to.round.codes);
  }
};
NPU_INLINE PutSums putter(int32_t* sums) { return {sums}; }
NPU_INLINE PutCodes putter(const Codes& codes) { return PutCodes(codes); }

template <class Format, class To>
using Multiply = void (*)(const typename Format::Row*, int64_t, const typename Format::Weight*, int64_t, const int32_t*,
                          To);

template <class Format, class To, int kRows>
void multiply_rows(const typename Format::Row* x, int64_t row_stride, const typename Format::Weight* panel,
                   int64_t steps, const int32_t* start, To to) {
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
  const auto put = putter(to);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) put(r, sum[r][0], sum[r][1]);
}

template <class Format, class To, int... i>
constexpr std::array<Multiply<Format, To>, sizeof...(i)> table(std::integer_sequence<int, i...>) {
  return {multiply_rows<Format, To, i + 1>...};
}
template <class Format, class To>
constexpr auto kTable = table<Format, To>(std::make_integer_sequence<int, kMaxRows>());

}  // namespace

void multiply(int64_t rows, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums) {
  kTable<Pairs, int32_t*>[rows - 1](x, row_stride, panel, steps, start, sums);
}

void multiply(int64_t rows, const uint8_t* x, int64_t row_stride, const int8_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums) {
  kTable<Quads, int32_t*>[rows - 1](x, row_stride, panel, steps, start, sums);
}

#if defined(NPU_AVX512)
void multiply(int64_t rows, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, const Codes& codes) {
  kTable<Pairs, const Codes&>[rows - 1](x, row_stride, panel, steps, start, codes);
}

void multiply(int64_t rows, const uint8_t* x, int64_t row_stride, const int8_t* panel, int64_t steps,
              const int32_t* start, const Codes& codes) {
  kTable<Quads, const Codes&>[rows - 1](x, row_stride, panel, steps, start, codes);
}
#endif

}  // namespace npu::integer
