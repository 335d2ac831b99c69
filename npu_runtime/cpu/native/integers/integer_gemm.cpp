// The micro-kernels of integer_gemm.h, compiled once for every number of rows.
#include "integers/integer_gemm.h"

#include <array>

namespace npu::integer {
namespace {

NPU_INLINE IVec multiply_add(Pairs, IVec sum, IVec x, IVec w) {
  return add_integer_pairs(sum, bit_cast<ShortVec>(x), bit_cast<ShortVec>(w));
}
NPU_INLINE IVec multiply_add(Quads, IVec sum, IVec x, IVec w) {
  return add_byte_quads(sum, bit_cast<ByteVec>(x), bit_cast<ByteVec>(w));
}

// What becomes of a row's sums, kVecs vectors of them.
template <int kVecs>
struct PutSums {
  int32_t* sums;
  NPU_INLINE explicit PutSums(int32_t* to) : sums(to) {}
  NPU_INLINE void operator()(int r, const IVec* sum) const {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) std::memcpy(sums + r * kPanel + v * kLanes, sum + v, sizeof(IVec));
  }
};

template <int kVecs>
struct PutAdded {
  int32_t* sums;
  NPU_INLINE explicit PutAdded(Added to) : sums(to.sums) {}
  NPU_INLINE void operator()(int r, const IVec* sum) const {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      int32_t* to = sums + r * kPanel + v * kLanes;
      const UVec added = bit_cast<UVec>(sum[v]) + load_bits<UVec>(to);  // which may wrap
      std::memcpy(to, &added, sizeof(added));
    }
  }
};

// Stored bytes may alias anything, so what rows share is in local variables.
template <int kVecs>
struct PutCodes {
  const Codes to;
  Vec scales[kVecs], biases[kVecs];
  NPU_INLINE explicit PutCodes(const Codes& codes) : to(codes) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) scales[v] = load(to.scales + v * kLanes), biases[v] = load(to.biases + v * kLanes);
  }
  template <class T>
  NPU_INLINE void put(T* out, const IVec* sum) const {
    Vec results[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) results[v] = to_floats(sum[v]) * scales[v] + biases[v];
    if constexpr (kVecs == 1) store_bytes(out, to.round(results[0]), kLanes);
    else store_bytes(out, to.round.numbers(results[0]), to.round.numbers(results[1]), to.round.codes);
  }
  NPU_INLINE void operator()(int r, const IVec* sum) const {
    char* out = to.out + r * to.stride;
    if (to.is_signed) put(reinterpret_cast<int8_t*>(out), sum);
    else put(reinterpret_cast<uint8_t*>(out), sum);
  }
};
template <class To, int kVecs>
using Put = std::conditional_t<
    std::is_same_v<To, int32_t*>, PutSums<kVecs>,
    std::conditional_t<std::is_same_v<To, Added>, PutAdded<kVecs>, PutCodes<kVecs>>>;

template <class Format, class To>
using Multiply = void (*)(const typename Format::Row*, int64_t, const typename Format::Weight*, int64_t, const int32_t*,
                          To);

template <class Format, class To, int kVecs, int kRows>
void multiply_rows(const typename Format::Row* x, int64_t row_stride, const typename Format::Weight* panel,
                   int64_t steps, const int32_t* start, To to) {
  constexpr int64_t kStep = Format::kStep;
  IVec sum[kRows][kVecs] = {};
  if (start) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[r][v] = load_bits<IVec>(start + v * kLanes);
  }
  const auto step = [&](const typename Format::Row* at, const typename Format::Weight* w)
      __attribute__((always_inline)) {
    IVec weights[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) weights[v] = in_register(load_bits<IVec>(w + v * kStep * kLanes));
    prefetch_page_ahead<2 * sizeof(IVec)>(w);  // the first rows of a task get a panel from memory
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const IVec value = splat_bits(load_bits<int32_t>(at + r * row_stride));
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[r][v] = multiply_add(Format(), sum[r][v], value, weights[v]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= steps; i += 2, x += 2 * kStep, panel += 2 * kStep * kPanel) {
    step(x, panel);
    step(x + kStep, panel + kStep * kPanel);
  }
  if (i < steps) step(x, panel);
  const Put<To, kVecs> put(to);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) put(r, sum[r]);
}

template <class Format, class To, int kVecs, int... i>
constexpr std::array<Multiply<Format, To>, sizeof...(i)> table(std::integer_sequence<int, i...>) {
  return {multiply_rows<Format, To, kVecs, i + 1>...};
}
template <class Format, class To, int kVecs>
constexpr auto kTable = table<Format, To, kVecs>(std::make_integer_sequence<int, kMaxRows>());

template <class Format, class To>
Multiply<Format, To> kernel_for(int64_t rows, int64_t channels) {
  return (channels > kLanes ? kTable<Format, To, 2> : kTable<Format, To, 1>)[rows - 1];
}

}  // namespace

void multiply(int64_t rows, int64_t channels, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums) {
  kernel_for<Pairs, int32_t*>(rows, channels)(x, row_stride, panel, steps, start, sums);
}

void multiply(int64_t rows, int64_t channels, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, Added sums) {
  kernel_for<Pairs, Added>(rows, channels)(x, row_stride, panel, steps, start, sums);
}

void multiply(int64_t rows, int64_t channels, const uint8_t* x, int64_t row_stride, const int8_t* panel, int64_t steps,
              const int32_t* start, int32_t* sums) {
  kernel_for<Quads, int32_t*>(rows, channels)(x, row_stride, panel, steps, start, sums);
}

void multiply(int64_t rows, int64_t channels, const int16_t* x, int64_t row_stride, const int16_t* panel, int64_t steps,
              const int32_t* start, const Codes& codes) {
  if constexpr (kMakesCodes)
    kernel_for<Pairs, const Codes&>(rows, channels)(x, row_stride, panel, steps, start, codes);
}

void multiply(int64_t rows, int64_t channels, const uint8_t* x, int64_t row_stride, const int8_t* panel, int64_t steps,
              const int32_t* start, const Codes& codes) {
  if constexpr (kMakesCodes)
    kernel_for<Quads, const Codes&>(rows, channels)(x, row_stride, panel, steps, start, codes);
}

}  // namespace npu::integer
