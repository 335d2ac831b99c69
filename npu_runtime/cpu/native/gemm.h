// The register-blocked product that linear and matmul share: rows of x times one panel of 32 packed weight columns.
//
// A weight w[N, K] is stored as panels of 32 outputs. A panel holds, for one step of K after the other, the 32 outputs'
// values of that step, so a panel is one sequential stream at any number of rows. A step is two consecutive values of k
// for bfloat16 (what vdpbf16ps multiplies) and one otherwise. N and K are padded with zeros to whole panels and steps.
//
// x is stored in blocks of up to kMaxRows rows, step by step within the block. A single row whose type and length
// already fit is its own packed form.
#pragma once

#include <utility>

#include "vec.h"

namespace npu {

constexpr int64_t kPanel = 2 * kLanes;
// 12 rows by 2 vectors are 24 accumulators, which leaves registers for the two weight vectors and the broadcast of x.
constexpr int kMaxRows = 12;

NPU_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
NPU_INLINE int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// How one step is loaded and multiplied, by the weight's storage type.
template <class W>
struct Step {
  using X = float;
  static constexpr int kWidth = 1;
  using Weights = Vec;
  using Broadcast = Vec;
  static NPU_INLINE Weights load_weights(const W* w) { return load(w); }
  static NPU_INLINE Broadcast broadcast(const X* x) { return splat(*x); }
  static NPU_INLINE Vec multiply_add(Vec sum, Broadcast x, Weights w) { return x * w + sum; }
};

template <>
struct Step<bf16> {
  using X = bf16;
  static constexpr int kWidth = 2;
#if defined(__AVX512BF16__)
  using Weights = __m512bh;
  using Broadcast = __m512bh;
  static NPU_INLINE Weights load_weights(const bf16* w) { return load_bits<__m512bh>(w); }
  static NPU_INLINE Broadcast broadcast(const bf16* x) {
    return bit_cast<__m512bh>(_mm512_set1_epi32(load_bits<int32_t>(x)));
  }
  static NPU_INLINE Vec multiply_add(Vec sum, Broadcast x, Weights w) { return _mm512_dpbf16_ps(sum, x, w); }
#else
  struct Pair {
    Vec even, odd;
  };
  using Weights = Pair;
  using Broadcast = Pair;
  static NPU_INLINE Pair widen(UVec pairs) {
    return {bit_cast<Vec>(pairs << 16), bit_cast<Vec>(pairs & 0xffff0000u)};  // little endian: even first
  }
  static NPU_INLINE Weights load_weights(const bf16* w) { return widen(load_bits<UVec>(w)); }
  static NPU_INLINE Broadcast broadcast(const bf16* x) { return widen(UVec{} + load_bits<uint32_t>(x)); }
  static NPU_INLINE Vec multiply_add(Vec sum, Broadcast x, Weights w) {
    return x.odd * w.odd + (x.even * w.even + sum);
  }
#endif
};

// tile[kRows][32] (+)= x-block · panel over `steps` steps. x is packed, or, with a kRowStride, an ordinary matrix whose
// row distance is known at compile time (and thus costs no address arithmetic).
template <class W, int kRows, int kRowStride>
void multiply_rows(const typename Step<W>::X* x, const W* w, int64_t steps, float* tile, bool accumulate) {
  using S = Step<W>;
  // Few rows are few accumulators; further independent sums then hide the multiply-add's latency.
  constexpr int kChains = kRows == 1 ? 4 : kRows <= 4 ? 2 : 1;
  constexpr int kRowOffset = kRowStride ? kRowStride : S::kWidth;
  constexpr int kStepOffset = kRowStride ? S::kWidth : kRows * S::kWidth;
  Vec sum[kChains][kRows][2] = {};
  if (accumulate) {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < 2; ++v) sum[0][r][v] = load(tile + r * kPanel + v * kLanes);
  }
  const auto step = [&](Vec(&part)[kRows][2]) __attribute__((always_inline)) {
    const auto w0 = S::load_weights(w);
    const auto w1 = S::load_weights(w + kLanes * S::kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto value = S::broadcast(x + r * kRowOffset);
      part[r][0] = S::multiply_add(part[r][0], value, w0);
      part[r][1] = S::multiply_add(part[r][1], value, w1);
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
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < 2; ++v) {
      Vec total = sum[0][r][v];
      for (int c = 1; c < kChains; ++c) total += sum[c][r][v];
      store(tile + r * kPanel + v * kLanes, total);
    }
}

// multiply_rows for a row count known at run time.
template <class W, int kRowStride = 0>
NPU_INLINE void multiply(int64_t rows, const typename Step<W>::X* x, const W* w, int64_t steps, float* tile,
                         bool accumulate) {
  using Multiply = void (*)(const typename Step<W>::X*, const W*, int64_t, float*, bool);
  static constexpr auto table = []<int... i>(std::integer_sequence<int, i...>) {
    struct Table {
      Multiply entry[kMaxRows];
    };
    return Table{{multiply_rows<W, i + 1, kRowStride>...}};
  }(std::make_integer_sequence<int, kMaxRows>());
  table.entry[rows - 1](x, w, steps, tile, accumulate);
}

// The split of m rows into blocks whose sizes differ by one at most.
struct RowBlocks {
  int64_t rows, count;
  explicit RowBlocks(int64_t m) : rows(m), count(divide_up(m, kMaxRows)) {}
  int64_t begin(int64_t block) const { return rows * block / count; }
  int64_t size(int64_t block) const { return begin(block + 1) - begin(block); }
};

NPU_INLINE void convert(const bf16* from, bf16* to) { *to = *from; }
NPU_INLINE void convert(const float* from, float* to) { *to = *from; }
NPU_INLINE void convert(const f16* from, f16* to) { *to = *from; }
NPU_INLINE void convert(const f16* from, float* to) { *to = float(*from); }

// Packs one block of x: row r is `k` consecutive values from row_at(r) on.
template <class X, int kWidth, class RowAt>
NPU_INLINE void pack_rows(const RowAt& row_at, int64_t rows, int64_t k, X* out) {
  const int64_t whole = k / kWidth * kWidth;
  for (int64_t k0 = 0; k0 < whole; k0 += kWidth)
    for (int64_t r = 0; r < rows; ++r)
      for (int i = 0; i < kWidth; ++i) convert(row_at(r) + k0 + i, out++);
  if (whole == k) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int i = 0; i < kWidth; ++i, ++out) {
      if (whole + i < k) convert(row_at(r) + whole + i, out);
      else *out = X{};
    }
}

// Packs outputs [0, columns) of w, element (n, k) at w[n * n_stride + k * k_stride], as one panel.
template <class T, int kWidth, class From>
void pack_panel(const From* w, int64_t n_stride, int64_t k_stride, int64_t columns, int64_t k, T* panel) {
  // Full steps of full panels, with each unit stride known to the compiler, become vector moves and interleaves.
  const auto pack_full_steps = [&](int64_t n_step, int64_t k_step) __attribute__((always_inline)) {
    for (int64_t k0 = 0; k0 + kWidth <= k; k0 += kWidth, panel += kPanel * kWidth)
      for (int64_t n = 0; n < kPanel; ++n)
        for (int i = 0; i < kWidth; ++i) convert(w + n * n_step + (k0 + i) * k_step, panel + n * kWidth + i);
  };
  int64_t packed = 0;
  if (columns == kPanel) {
    if (n_stride == 1) pack_full_steps(1, k_stride);
    else if (k_stride == 1) pack_full_steps(n_stride, 1);
    else pack_full_steps(n_stride, k_stride);
    packed = k / kWidth * kWidth;
  }
  for (int64_t k0 = packed; k0 < k; k0 += kWidth)
    for (int64_t n = 0; n < kPanel; ++n)
      for (int i = 0; i < kWidth; ++i, ++panel) {
        if (n < columns && k0 + i < k) convert(w + n * n_stride + (k0 + i) * k_stride, panel);
        else *panel = T{};
      }
}

}  // namespace npu
