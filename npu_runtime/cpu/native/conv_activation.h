// The activations that convolutions apply, on vectors.
#pragma once

#include "activation.h"
#include "conv_args.h"

namespace npu::conv {

template <Activation kind>
NPU_INLINE Vec activate(Vec x) {
  const Vec zero{};
  if constexpr (kind == Activation::relu) return x < zero ? zero : x;  // as torch: NaN stays NaN
  if constexpr (kind == Activation::relu6) return x < zero ? zero : x > 6.0f ? splat(6.0f) : x;
  if constexpr (kind == Activation::hardsigmoid || kind == Activation::hardswish) {
    const Vec shifted = x + 3.0f;
    const Vec clamped = shifted < zero ? zero : shifted > 6.0f ? splat(6.0f) : shifted;
    return clamped * (1.0f / 6.0f) * (kind == Activation::hardswish ? x : splat(1.0f));
  }
  if constexpr (kind == Activation::sigmoid) return sigmoid(x);
  if constexpr (kind == Activation::silu) return npu::activate<npu::Activation::silu>(x);
  if constexpr (kind == Activation::gelu) return npu::activate<npu::Activation::gelu>(x);
  return x;
}

}  // namespace npu::conv
