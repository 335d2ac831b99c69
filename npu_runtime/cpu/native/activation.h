// Activation functions on vectors, in float32.
#pragma once

#include "vec.h"

namespace npu {

// Numbered as ACTIVATIONS in numbers.py: first those that only limit their argument.
enum class Activation : int64_t { none, relu, relu6, gelu, gelu_tanh, silu, hardswish, hardsigmoid, sigmoid };

// x Φ(x) for the normal distribution's Φ, as relu(x) - |x| Φ(-|x|): nothing cancels, whatever the sign. The polynomial
// is our minimax fit of log2 Φ(-t) up to t = 5.2, where t Φ(-t) is 5e-7, and falls faster than that beyond.
NPU_INLINE Vec gelu(Vec x) {
  const Vec t = min(abs(x), splat(9.0f));
  Vec p = t * -9.499382759e-7f + 1.573665555e-5f;
  p = p * t + -6.879630710e-5f;
  p = p * t + -4.325961433e-4f;
  p = p * t + 7.465074380e-3f;
  p = p * t + -5.278391145e-2f;
  p = p * t + -4.591111044e-1f;
  p = p * t + -1.151116337f;
  p = p * t + -1.0f;
  return (x < 0.0f ? Vec{} : x) - t * exp2_normal(p);
}

template <Activation kind>
NPU_INLINE Vec activate(Vec x) {
  const Vec zero{};
  if constexpr (kind == Activation::relu) {
    return max(zero, x);  // in this order NaN passes through
  } else if constexpr (kind == Activation::relu6) {
    return min(splat(6.0f), max(zero, x));
  } else if constexpr (kind == Activation::gelu) {
    return gelu(x);
  } else if constexpr (kind == Activation::gelu_tanh) {
    // (1 + tanh u) / 2 = sigmoid(2 u)
    return times_sigmoid(x, x * (1.59576912160573f + 0.0713548162726f * x * x));
  } else if constexpr (kind == Activation::silu) {
    return times_sigmoid(x, x);
  } else if constexpr (kind == Activation::hardswish || kind == Activation::hardsigmoid) {
    const Vec clamped = min(splat(6.0f), max(zero, x + 3.0f));
    return clamped * (kind == Activation::hardswish ? x : splat(1.0f)) * (1.0f / 6.0f);
  } else if constexpr (kind == Activation::sigmoid) {
    return sigmoid(x);
  } else {
    return x;
  }
}

template <Activation kind>
struct ActivationTag {
  static constexpr Activation value = kind;
};

// Calls body with the compile-time counterpart of `activation`.
template <class F>
NPU_INLINE void with_activation(Activation activation, const F& body) {
  switch (activation) {
    case Activation::none: return body(ActivationTag<Activation::none>());
    case Activation::relu: return body(ActivationTag<Activation::relu>());
    case Activation::relu6: return body(ActivationTag<Activation::relu6>());
    case Activation::gelu: return body(ActivationTag<Activation::gelu>());
    case Activation::gelu_tanh: return body(ActivationTag<Activation::gelu_tanh>());
    case Activation::silu: return body(ActivationTag<Activation::silu>());
    case Activation::hardswish: return body(ActivationTag<Activation::hardswish>());
    case Activation::hardsigmoid: return body(ActivationTag<Activation::hardsigmoid>());
    case Activation::sigmoid: return body(ActivationTag<Activation::sigmoid>());
  }
}

}  // namespace npu
