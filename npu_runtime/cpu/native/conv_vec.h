// Loads and stores of a row's last few elements, loads with a stride, and the transposition of 16 by 16 floats.
#pragma once

#include <algorithm>

#include "vec.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NPU_HAS_MASKS 1
#endif

namespace npu::conv {

#if defined(NPU_HAS_MASKS)

NPU_INLINE __mmask16 first_lanes(int64_t count) { return count >= kLanes ? 0xffff : (1u << count) - 1; }

NPU_INLINE Vec load_first(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  return _mm512_maskz_loadu_ps(first_lanes(count), p);
}
NPU_INLINE Vec load_first(const f16* p, int64_t count) {
  if (count >= kLanes) return load(p);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
NPU_INLINE Vec load_first(const bf16* p, int64_t count) {
  if (count >= kLanes) return load(p);
  const __m256i bits = _mm256_maskz_loadu_epi16(first_lanes(count), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

NPU_INLINE void store_first(float* p, Vec v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  _mm512_mask_storeu_ps(p, first_lanes(count), v);
}
NPU_INLINE void store_first(f16* p, Vec v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
NPU_INLINE void store_first(bf16* p, Vec v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  bf16 whole[kLanes];
  store(whole, v);
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(whole)));
}

NPU_INLINE uint32_t even_elements(int64_t count) {
  return count >= kLanes ? 0x7fffffffu : (1u << (2 * count - 1)) - 1;
}

// Elements 0, 2, ..., 2 * (count - 1), 16 at most; nothing after the last of them is touched.
NPU_INLINE Vec load_even(const float* p, int64_t count) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const uint32_t mask = even_elements(count);
  const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
  const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + kLanes);
  return _mm512_permutex2var_ps(low, even, high);
}
NPU_INLINE __m256i load_even_bits(const void* p, int64_t count) {
  const uint32_t mask = even_elements(count);
  return _mm512_cvtepi32_epi16(_mm512_maskz_loadu_epi16(mask, p));
}
NPU_INLINE Vec load_even(const f16* p, int64_t count) { return _mm512_cvtph_ps(load_even_bits(p, count)); }
NPU_INLINE Vec load_even(const bf16* p, int64_t count) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_even_bits(p, count)), 16));
}

// Elements 0, 4, ..., 4 * (count - 1), likewise.
NPU_INLINE uint64_t fourth_elements(int64_t count) {
  return count >= kLanes ? ~uint64_t{0} >> 3 : (uint64_t{1} << (4 * count - 3)) - 1;
}
NPU_INLINE Vec load_fourth(const float* p, int64_t count) {
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
  const uint64_t mask = fourth_elements(count);
  const auto part = [&](int i) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> (i * kLanes)), p + i * kLanes);
  };
  const __m512 low = _mm512_permutex2var_ps(part(0), first, part(1));
  const __m512 high = _mm512_permutex2var_ps(part(2), first, part(3));
  return _mm512_shuffle_f32x4(low, high, 0x44);
}
NPU_INLINE __m256i load_fourth_bits(const uint16_t* p, int64_t count) {
  const uint64_t mask = fourth_elements(count);
  const __m128i low = _mm512_cvtepi64_epi16(_mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), p));
  const __m128i high = _mm512_cvtepi64_epi16(_mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), p + 32));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
NPU_INLINE Vec load_fourth(const f16* p, int64_t count) {
  return _mm512_cvtph_ps(load_fourth_bits(reinterpret_cast<const uint16_t*>(p), count));
}
NPU_INLINE Vec load_fourth(const bf16* p, int64_t count) {
  const __m256i bits = load_fourth_bits(reinterpret_cast<const uint16_t*>(p), count);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

#else

template <class T>
NPU_INLINE Vec load_first(const T* p, int64_t count) {
  return load_n(p, count);
}
template <class T>
NPU_INLINE void store_first(T* p, Vec v, int64_t count) {
  store_n(p, v, count);
}

#endif

// Elements 0, stride, 2 * stride, ...: `count` of them, 16 at most. A stride known when compiling is kStride, else 0.
template <int kStride, class T>
NPU_INLINE Vec load_strided(const T* p, int64_t stride, int64_t count) {
  if constexpr (kStride == 1) return load_first(p, count);
#if defined(NPU_HAS_MASKS)
  if constexpr (kStride == 2) return load_even(p, count);
  if constexpr (kStride == 4) return load_fourth(p, count);
#endif
  T picked[kLanes] = {};
  for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i) picked[i] = p[i * stride];
  return load(picked);
}

// Rows of sixteen floats, `from_stride` apart, become columns `to_stride` apart.
NPU_INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(__AVX512F__)
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  const auto pairs = [](__m512 a, __m512 b, bool high) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
  };
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 4; ++j) r[i + j] = pairs(t[i + j / 2], t[i + 2 + j / 2], j % 2);
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd), d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    _mm512_storeu_ps(to + j * to_stride, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(to + (4 + j) * to_stride, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_storeu_ps(to + (8 + j) * to_stride, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(to + (12 + j) * to_stride, _mm512_shuffle_f32x4(c, d, 0xdd));
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

}  // namespace npu::conv
