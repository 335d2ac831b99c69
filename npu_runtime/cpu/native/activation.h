// Activation functions on vectors, in float32.
#pragma once

#include "vec.h"

namespace npu {

enum class Activation : int64_t { none = 0, relu = 1, gelu = 2, gelu_tanh = 3, silu = 4 };

template <Activation kind>
NPU_INLINE Vec activate(Vec x) {
  if constexpr (kind == Activation::relu) {
    return x < 0.0f ? Vec{} : x;  // in this order NaN passes through
  } else if constexpr (kind == Activation::gelu) {
    return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  } else if constexpr (kind == Activation::gelu_tanh) {
    return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  } else if constexpr (kind == Activation::silu) {
    return x / (1.0f + exp(-x));
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
    case Activation::gelu: return body(ActivationTag<Activation::gelu>());
    case Activation::gelu_tanh: return body(ActivationTag<Activation::gelu_tanh>());
    case Activation::silu: return body(ActivationTag<Activation::silu>());
  }
}

}  // namespace npu
