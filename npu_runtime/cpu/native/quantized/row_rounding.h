// Rows rounded to bytes with a scale of their own: `quantize_rows` in npu_compiler/graph/quantization.py, bit for bit.
#pragma once

#include "products/gemm.h"

namespace npu {

enum class RowFormat : int64_t { none = 0, int8 = 1, float8_e4m3 = 2 };

// What the elements of a row are multiplied with before they are rounded, and the scale, which turns codes into numbers again:
// NaN for a row with an element that is not finite, whose codes are 0.
struct RowScale {
  float factor, scale;
  bool finite;
};

template <class T>
RowScale row_scale(const T* x, int64_t k, RowFormat format) {
  IVec bits = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    const IVec next = bit_cast<IVec>(abs(load_n(x + i, k - i)));
    bits = next > bits ? next : bits;  // which NaN is greater than anything
  }
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, bits[i]);
  if (largest >= 0x7f800000) return {0.0f, std::numeric_limits<float>::quiet_NaN(), false};
  const float scale = bit_cast<float>(largest) / (format == RowFormat::int8 ? 127.0f : 448.0f);
  if (scale < std::numeric_limits<float>::min()) return {0.0f, 0.0f, true};
  return {1.0f / scale, scale, true};
}

// Elements [i, i + kLanes) of a row as multiples of its scale; zeros beyond k. They may exceed the format's largest number by a
// rounding error, which rounding them to it removes. In a register, they are not multiplied and added to in one step.
template <class T>
NPU_INLINE Vec in_scale(const T* x, int64_t i, int64_t k, const RowScale& row) {
  return i < k && row.finite ? in_register(load_n(x + i, k - i) * row.factor) : Vec{};
}

// The nearest float8 e4m3 numbers, ties to even, of floats between -464 and 464.
NPU_INLINE Vec to_float8(Vec v) {
  const UVec bits = bit_cast<UVec>(v);
  const Vec normal = bit_cast<Vec>((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
  constexpr float kRound = 24576.0f;  // 1.5 * 2^14: a sum with it is a multiple of 2^-9
  const Vec subnormal = v + kRound - kRound;
  return abs(v) < 0x1p-6f ? subnormal : normal;
}

// The numbers that stand for elements [i, i + kLanes): with 8 significant bits at most, so bfloat16 holds them.
template <class T>
NPU_INLINE Vec rounded_numbers(const T* x, int64_t i, int64_t k, const RowScale& row, RowFormat format) {
  const Vec v = in_scale(x, i, k, row);
  return format == RowFormat::int8 ? to_floats(to_nearest(v)) : to_float8(v);
}

// Their codes, as integers: signed for int8, and from 0 to 255 for float8.
template <class T>
NPU_INLINE IVec rounded_codes(const T* x, int64_t i, int64_t k, const RowScale& row, RowFormat format) {
  const Vec v = in_scale(x, i, k, row);
  if (format == RowFormat::int8) return to_nearest(v);
  // Multiplied so, a number has float8's bias in its exponent, and a subnormal one is a subnormal float.
  const UVec magnitude = bit_cast<UVec>(abs(to_float8(v)) * 0x1p-120f) >> 20;
  return bit_cast<IVec>(magnitude | (bit_cast<UVec>(v) >> 24 & 0x80u));
}

}  // namespace npu
