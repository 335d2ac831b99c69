// The register-blocked product that all dense convolutions end in, and the sizes of its tiles.
#pragma once

#include "conv_vec.h"

namespace npu::conv {

constexpr int kPixelRows = 8;     // output channels per tile, pixels in the lanes
constexpr int kPixelVecs = 3;     // vectors of pixels per tile
constexpr int kChannelRows = 14;  // most pixels per tile, output channels in the lanes
constexpr int kChannelVecs = 2;

// What one element of the packed operands is: a float, or two bfloat16 of consecutive depth, the first in the low half.
// Both have four bytes, so everything that moves elements treats them as floats.
template <bool kPairs>
NPU_INLINE Vec multiply_add(Vec sum, Vec a, Vec b) {
  if constexpr (!kPairs) return a * b + sum;
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
#else
  const UVec x = bit_cast<UVec>(a), y = bit_cast<UVec>(b);
  const Vec low = bit_cast<Vec>(x << 16) * bit_cast<Vec>(y << 16) + sum;
  return bit_cast<Vec>(x & 0xffff0000u) * bit_cast<Vec>(y & 0xffff0000u) + low;
#endif
}

// out[m][v] = sum over k of rows[k][m] * vecs[k][v], where rows is packed `M` elements and vecs `N` vectors per k.
// M * N accumulators and the N vectors of one k just fit the 32 registers.
template <int M, int N, bool kPairs>
void multiply(const float* rows, const float* vecs, int64_t depth, float* out, int64_t row_stride, int64_t vec_stride) {
  Vec sum[M][N] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec b[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) b[n] = load(vecs + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#if defined(__AVX512F__)
      const Vec a = _mm512_set1_ps(rows[m]);
#else
      const Vec a = splat(rows[m]);
#endif
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[m][n] = multiply_add<kPairs>(sum[m][n], a, b[n]);
    }
    rows += M;
    vecs += N * kLanes;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(out + m * row_stride + n * vec_stride, sum[m][n]);
}

using Multiply = void (*)(const float*, const float*, int64_t, float*, int64_t, int64_t);

// multiply<m, n, pairs> for channels in the lanes: m is 1 to kChannelRows, n is 1 or 2.
Multiply channel_kernel(int64_t m, int64_t n, bool pairs = false);

}  // namespace npu::conv
