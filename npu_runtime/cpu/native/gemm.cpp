// The micro-kernels of gemm.h, compiled once for every number of rows.
#include "gemm.h"

namespace npu {
namespace {

template <class W, int kRows, int kVecs, int kRowOffset, int kStepOffset>
void multiply_rows(const typename Step<W>::X* x, const W* w, int64_t steps, Sums sums, bool accumulate) {
  using S = Step<W>;
  // Few rows are few accumulators; further independent sums then hide the multiply-add's latency.
  constexpr int kChains = kRows == 1 ? 4 : 2 * kRows * kVecs + 3 <= kRegisters ? 2 : 1;
  Vec sum[kChains][kRows][kVecs] = {};
  if (accumulate) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[0][r][v] = load(sums.data + r * sums.row_stride + v * sums.vec_stride);
  }
  const auto step = [&](Vec(&part)[kRows][kVecs]) __attribute__((always_inline)) {
    Vec panel[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) panel[v] = S::load_panel(w + v * kLanes * S::kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec value = S::broadcast(x + r * kRowOffset);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) part[r][v] = S::multiply_add(part[r][v], value, panel[v]);
    }
    w += kPanel * S::kWidth;
    x += kStepOffset;
  };
  int64_t s = 0;
  for (; s + kChains <= steps; s += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) step(sum[c]);
  }
  for (; s < steps; ++s) step(sum[0]);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      Vec total = sum[0][r][v];
#pragma GCC unroll 4
      for (int c = 1; c < kChains; ++c) total += sum[c][r][v];
      store(sums.data + r * sums.row_stride + v * sums.vec_stride, total);
    }
}

template <class W>
using Multiply = void (*)(const typename Step<W>::X*, const W*, int64_t, Sums, bool);

template <class W>
struct Table {
  Multiply<W> packed[2][kMaxRows], unpacked[kMaxRows];
};

template <class W, int... i>
constexpr Table<W> make_table(std::integer_sequence<int, i...>) {
  constexpr int kWidth = Step<W>::kWidth;
  return {{{multiply_rows<W, i + 1, 1, kWidth, (i + 1) * kWidth>...},
           {multiply_rows<W, i + 1, 2, kWidth, (i + 1) * kWidth>...}},
          {multiply_rows<W, i + 1, 2, kRowStride, kWidth>...}};
}

template <class W>
constexpr Table<W> kTable = make_table<W>(std::make_integer_sequence<int, kMaxRows>());

}  // namespace

template <class W>
void multiply(int64_t rows, const typename Step<W>::X* x, const W* panel, int64_t steps, Sums sums, bool accumulate,
              int64_t vecs) {
  kTable<W>.packed[vecs - 1][rows - 1](x, panel, steps, sums, accumulate);
}
template void multiply<float>(int64_t, const float*, const float*, int64_t, Sums, bool, int64_t);
template void multiply<bf16>(int64_t, const Step<bf16>::X*, const bf16*, int64_t, Sums, bool, int64_t);
template void multiply<f16>(int64_t, const float*, const f16*, int64_t, Sums, bool, int64_t);

template <class W>
void multiply_unpacked(int64_t rows, const typename Step<W>::X* x, const W* panel, int64_t steps, Sums sums,
                       bool accumulate) {
  kTable<W>.unpacked[rows - 1](x, panel, steps, sums, accumulate);
}
template void multiply_unpacked<float>(int64_t, const float*, const float*, int64_t, Sums, bool);
template void multiply_unpacked<bf16>(int64_t, const Step<bf16>::X*, const bf16*, int64_t, Sums, bool);

}  // namespace npu
