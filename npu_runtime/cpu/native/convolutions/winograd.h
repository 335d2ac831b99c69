// How Winograd's F(2, 3) and F(4, 3) transform inputs, of floats or of int16. https://arxiv.org/abs/1509.09308
#pragma once

#include "vec.h"

namespace npu {

// In one dimension, for kTile results: v[i * step] are the kTile + 2 inputs, and then the points.
template <int kTile, class V>
NPU_INLINE void transform_inputs(V* v, int step) {
  using Element = std::remove_reference_t<decltype(v[0][0])>;
  const V d0 = v[0], d1 = v[step], d2 = v[2 * step], d3 = v[3 * step];
  if constexpr (kTile == 2) {
    v[0] = d0 - d2;
    v[step] = d1 + d2;
    v[2 * step] = d2 - d1;
    v[3 * step] = d1 - d3;
  } else {
    constexpr Element two = 2, four = 4, five = 5;
    const V d4 = v[4 * step], d5 = v[5 * step];
    const V even = d4 - four * d2, odd = d3 - four * d1;
    const V even2 = d4 - d2, odd2 = two * (d3 - d1);
    v[0] = four * d0 - five * d2 + d4;
    v[step] = even + odd;
    v[2 * step] = even - odd;
    v[3 * step] = even2 + odd2;
    v[4 * step] = even2 - odd2;
    v[5 * step] = four * d1 - five * d3 + d5;
  }
}

}  // namespace npu
