// The register-blocked product that linear layers, matrix products, attention and convolutions share: rows of x times one
// panel of packed columns.
//
// A matrix w[N, K] is stored as panels of kPanel outputs. A panel holds, for one step of K after the other, the outputs'
// values of that step, so a panel is one sequential stream at any number of rows. A step is two consecutive values of k
// for bfloat16 where the machine multiplies pairs of them, and one otherwise. N and K are padded with zeros to whole
// panels and steps.
//
// x is stored in blocks of up to kMaxRows rows, step by step within the block.
#pragma once

#include "vec.h"

namespace npu {

inline constexpr int64_t kPanel = 2 * kLanes;
// Two accumulators a row, and registers for the panel's two vectors and the broadcast of x.
inline constexpr int kMaxRows = kRegisters == 32 ? 12 : 6;

// What a panel's share of a product over many rows may occupy: of L1, or of a large L2 where vectors are long.
inline constexpr int64_t kSliceBytes = kLanes == 16 ? 128 << 10 : 16 << 10;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// How one step is loaded and multiplied, by the panel's storage type: 16-bit floats are widened in registers, or
// multiplied in pairs. X is the type of the other operand.
template <class W>
struct FloatStep {
  using X = float;
  static constexpr int kWidth = 1;
  static NPU_INLINE Vec load_panel(const W* w) { return load(w); }
  static NPU_INLINE Vec broadcast(const float* x) { return splat(*x); }
  static NPU_INLINE Vec multiply_add(Vec sum, Vec x, Vec w) { return x * w + sum; }
};
template <class W>
struct PairStep {
  using X = W;
  static constexpr int kWidth = 2;
  static NPU_INLINE Vec load_panel(const W* w) { return load_bits<Vec>(w); }
  static NPU_INLINE Vec broadcast(const W* x) { return splat(load_bits<float>(x)); }
  static NPU_INLINE Vec multiply_add(Vec sum, Vec x, Vec w) { return add_pairs(sum, x, w); }
};
template <class W>
using Step = std::conditional_t<kHasPairs && std::is_same_v<W, bf16>, PairStep<W>, FloatStep<W>>;

// Where sums go: vector v of row r at data + r * row_stride + v * vec_stride.
struct Sums {
  float* data;
  int64_t row_stride = kPanel, vec_stride = kLanes;
};

// sums (+)= x · panel over `steps` steps, for 1 to kMaxRows rows of x and the first `vecs` (1 or 2) vectors of a panel.
template <class W>
void multiply(int64_t rows, const typename Step<W>::X* x, const W* panel, int64_t steps, Sums sums, bool accumulate,
              int64_t vecs = 2);

// The same for an x that is an ordinary matrix with rows kRowStride values apart.
inline constexpr int kRowStride = 8 * kPanel;
template <class W>
void multiply_unpacked(int64_t rows, const typename Step<W>::X* x, const W* panel, int64_t steps, Sums sums,
                       bool accumulate);

// The split of m rows into blocks whose sizes differ by one at most.
struct RowBlocks {
  int64_t rows, count;
  explicit RowBlocks(int64_t m) : rows(m), count(divide_up(m, kMaxRows)) {}
  int64_t begin(int64_t block) const { return rows * block / count; }
  int64_t size(int64_t block) const { return begin(block + 1) - begin(block); }
};

// out[c * pitch + r] = row_at(r)[c] for rows below `rows`, and zero for those from there to `pitch`.
template <class From, class To, class RowAt>
void interleave(const RowAt& row_at, int64_t rows, int64_t pitch, int64_t columns, To* out) {
  const auto turn = [&](int64_t c0, int64_t count) __attribute__((always_inline)) {
    for (int64_t r0 = 0; r0 < pitch; r0 += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes; ++r) block[r] = r0 + r < rows ? load_n(row_at(r0 + r) + c0, count) : Vec{};
      transpose(block);
#pragma GCC unroll 16
      for (int64_t c = 0; c < kLanes; ++c)
        if (c < count) store_n(out + (c0 + c) * pitch + r0, block[c], pitch - r0);
    }
  };
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) turn(c, kLanes);
  if (c < columns) turn(c, columns - c);
}

// Packs rows of k values for `multiply`, each beginning at row_at(r), and as many rows of zeros as make `pitch` rows.
template <class From, class To, int kWidth, class RowAt>
void pack_rows(const RowAt& row_at, int64_t rows, int64_t pitch, int64_t k, To* out) {
  if constexpr (kWidth == 1) return interleave<From>(row_at, rows, pitch, k, out);
  const auto pairs_at = [&](int64_t r) { return reinterpret_cast<const float*>(row_at(r)); };
  interleave<float>(pairs_at, rows, pitch, k / 2, reinterpret_cast<float*>(out));
  if (k % 2 == 0) return;
  for (int64_t r = 0; r < pitch; ++r) {
    out[(k - 1) * pitch + 2 * r] = r < rows ? load_bits<To>(row_at(r) + k - 1) : To{};
    out[(k - 1) * pitch + 2 * r + 1] = To{};
  }
}

// Packs outputs [0, columns) of w, element (n, k) at w[n * n_stride + k * k_stride], as one panel.
template <class From, class To, int kWidth>
void pack_panel(const From* w, int64_t n_stride, int64_t k_stride, int64_t columns, int64_t k, To* panel) {
  if (k_stride == 1) {
    const auto row_at = [&](int64_t n) { return w + n * n_stride; };
    return pack_rows<From, To, kWidth>(row_at, columns, kPanel, k, panel);
  }
  for (int64_t k0 = 0; k0 < k; k0 += kWidth, w += kWidth * k_stride)
    for (int64_t n = 0; n < kPanel; n += kLanes, panel += kLanes * kWidth) {
      const auto values = [&](int64_t i) __attribute__((always_inline)) {
        if (n >= columns || k0 + i >= k) return Vec{};
        const From* first = w + n * n_stride + i * k_stride;
        return n_stride == 1 ? load_n(first, columns - n) : load_strided<0>(first, n_stride, columns - n);
      };
      if constexpr (kWidth == 1) store(panel, values(0));
      else store(reinterpret_cast<float*>(panel),
                 bit_cast<Vec>(bit_cast<UVec>(values(0)) >> 16 | bit_cast<UVec>(values(1))));
    }
}

}  // namespace npu
