// Sixteen floats at a time, on any compiler with GNU vector extensions. Intrinsics appear only where the extensions
// have no efficient spelling; the portable branches give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernel.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define NPU_INLINE inline __attribute__((always_inline))

namespace npu {

// Storage types. bf16 is a struct so that it is no arithmetic type and cannot be mistaken for an integer.
struct bf16 {
  uint16_t bits;
};
using f16 = _Float16;

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef uint32_t UVec __attribute__((vector_size(64)));
typedef uint16_t HalfBits __attribute__((vector_size(32)));
typedef f16 Halves __attribute__((vector_size(32)));

NPU_INLINE Vec splat(float value) { return Vec{} + value; }
NPU_INLINE Vec lane_numbers() { return Vec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
// The second operand where they do not compare: max(limit, x) passes NaN on, max(x, limit) replaces it.
NPU_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
NPU_INLINE Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

template <class To, class From>
NPU_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

template <class T>
NPU_INLINE T load_bits(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

// Conversions of one vector; the memory need not be aligned.

NPU_INLINE Vec load(const float* p) { return load_bits<Vec>(p); }
NPU_INLINE Vec load(const bf16* p) {
  return bit_cast<Vec>(__builtin_convertvector(load_bits<HalfBits>(p), UVec) << 16);
}
NPU_INLINE Vec load(const f16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return __builtin_convertvector(load_bits<Halves>(p), Vec);
#endif
}

NPU_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
NPU_INLINE void store(bf16* p, Vec v) {
  // Round to nearest even on the integer image. AVX-512's own conversion would flush subnormals to zero.
  const UVec bits = bit_cast<UVec>(v);
  const UVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UVec quiet_nan = (bits >> 16) | 0x40u;
  const HalfBits result = __builtin_convertvector(v == v ? rounded : quiet_nan, HalfBits);
  std::memcpy(p, &result, sizeof(result));
}
NPU_INLINE void store(f16* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  const Halves result = __builtin_convertvector(v, Halves);
  std::memcpy(p, &result, sizeof(result));
#endif
}

// The first `count` (0 to 16) elements only; the other lanes load as zero.
template <class T>
NPU_INLINE Vec load_n(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  T buffer[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
NPU_INLINE void store_n(T* p, Vec v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  T buffer[kLanes];
  store(buffer, v);
  for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
}

// Calls body with a null pointer of the storage type that `dtype` names.
template <class F>
NPU_INLINE void with_type(Dtype dtype, const F& body) {
  switch (dtype) {
    case Dtype::f32: return body(static_cast<float*>(nullptr));
    case Dtype::bf16: return body(static_cast<bf16*>(nullptr));
    case Dtype::f16: return body(static_cast<f16*>(nullptr));
  }
}

// As load_n and store_n, for operands whose type is only known at run time: element `index` of `data` onwards.
NPU_INLINE Vec load_any(const char* data, Dtype dtype, int64_t index, int64_t count) {
  switch (dtype) {
    case Dtype::bf16: return load_n(reinterpret_cast<const bf16*>(data) + index, count);
    case Dtype::f16: return load_n(reinterpret_cast<const f16*>(data) + index, count);
    default: return load_n(reinterpret_cast<const float*>(data) + index, count);
  }
}
NPU_INLINE void store_any(char* data, Dtype dtype, int64_t index, Vec v, int64_t count) {
  switch (dtype) {
    case Dtype::bf16: return store_n(reinterpret_cast<bf16*>(data) + index, v, count);
    case Dtype::f16: return store_n(reinterpret_cast<f16*>(data) + index, v, count);
    default: return store_n(reinterpret_cast<float*>(data) + index, v, count);
  }
}

// Reductions over the lanes, in a fixed order.

template <class F>
NPU_INLINE float fold_lanes(Vec v, const F& combine) {
  v = combine(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}
NPU_INLINE float sum_lanes(Vec v) {
  return fold_lanes(v, [](Vec a, Vec b) __attribute__((always_inline)) { return a + b; });
}
NPU_INLINE float max_lanes(Vec v) {
  return fold_lanes(v, [](Vec a, Vec b) __attribute__((always_inline)) { return max(a, b); });
}

// Lane i of the result is the sum of rows[i]'s lanes: sixteen horizontal sums for 45 operations instead of 16 times 8.
NPU_INLINE Vec sum_rows(Vec (&rows)[kLanes]) {
  Vec eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const Vec a = rows[i], b = rows[i + 8];
    eight[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const Vec a = eight[i], b = eight[i + 4];
    four[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
              __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const Vec a = four[i], b = four[i + 2];
    two[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
             __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return __builtin_shufflevector(two[0], two[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(two[0], two[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// p * 2^k for an integral k, right below the normal range too.
NPU_INLINE Vec scale_by_power(Vec p, Vec k) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, k);
#else
  // Two exact steps: 2^k itself may be out of range.
  const IVec exponent = __builtin_convertvector(k, IVec), half = exponent >> 1;
  return p * bit_cast<Vec>((half + 127) << 23) * bit_cast<Vec>((exponent - half + 127) << 23);
#endif
}

// e^x within about 1 ulp: x = k ln2 + r and a degree-6 polynomial in r. NaN stays NaN.
NPU_INLINE Vec exp(Vec x) {
  const Vec clamped = min(splat(89.0f), max(splat(-110.0f), x));
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction bits left
  const Vec k = clamped * 1.44269504088896341f + kRound - kRound;
  Vec r = clamped - k * 0.693359375f;
  r = r + k * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return scale_by_power(p, k);
}

NPU_INLINE Vec tanh(Vec x) {
  // 1 - 2 / (e^2x + 1) cancels near zero, where a polynomial serves instead.
  const Vec square = x * x;
  Vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  const Vec small = p * square * x + x;
  const Vec large = 1.0f - 2.0f / (exp(x + x) + 1.0f);
  return square < 0.390625f ? small : large;
}

NPU_INLINE Vec abs(Vec x) { return bit_cast<Vec>(bit_cast<UVec>(x) & 0x7fffffffu); }

// The error function within about 1 ulp: an odd polynomial near zero, 1 - e^q(|x|) elsewhere.
NPU_INLINE Vec erf(Vec x) {
  const Vec t = abs(x), s = x * x;
  Vec q = t * -1.72853470e-5f + 3.83197126e-4f;
  q = q * s + (t * -3.88396438e-3f + 2.42546219e-2f);
  q = q * t + -1.06777877e-1f;
  q = q * t + -6.34846687e-1f;
  q = q * t + -1.28717512e-1f;
  const Vec magnitude = 1.0f - exp(q * t - t);
  const UVec sign = bit_cast<UVec>(x) & 0x80000000u;
  const Vec large = bit_cast<Vec>(bit_cast<UVec>(magnitude) | sign);
  Vec p = s * -5.96761703e-4f + 4.99119423e-3f;
  p = p * s + -2.67681349e-2f;
  p = p * s + 1.12819925e-1f;
  p = p * s + -3.76125336e-1f;
  p = p * s + 1.28379166e-1f;
  return t > 0.927734375f ? large : p * x + x;
}

NPU_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace npu
