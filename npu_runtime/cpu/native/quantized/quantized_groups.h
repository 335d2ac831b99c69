// What kernels over packed panels of codes share (see quantized.h for the layout): scales of a group, and formats as types.
#pragma once

#include "quantized/quantized.h"

namespace npu {

// What turns the codes of a group into numbers, for the outputs of a panel.
template <Codes kCodes, Offsets kOffsets>
struct GroupScales {
  // Without a minimum, and where all outputs have the same zero point, that is a constant for the compiler.
  Vec scale[2], minimum[2] = {};
  IVec zero[2] = {};

  NPU_INLINE GroupScales(const QuantizedFormat& f, const char* group) {
    const char* offsets = group + kPanel * item_size(f.scales);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      scale[v] = load_any(group, f.scales, v * kLanes, kLanes);
      if constexpr (kOffsets == Offsets::minimum) {
        minimum[v] = load_any(offsets, f.scales, v * kLanes, kLanes);
      } else if constexpr (kOffsets == Offsets::zero_point) {
        using Zero = std::conditional_t<kCodes == Codes::int8, int8_t, uint8_t>;
        zero[v] = load_bytes(reinterpret_cast<const Zero*>(offsets + v * kLanes));
      } else if constexpr (kCodes == Codes::int4) {
        zero[v] += 8;
      }
    }
  }
};

// Calls body with compile-time counterparts of a format's codes and offsets.
template <class F>
void with_format(const QuantizedFormat& f, const F& body) {
  const auto with_offsets = [&](auto codes) {
    switch (f.offsets) {
      case Offsets::none: return body(codes, std::integral_constant<Offsets, Offsets::none>());
      case Offsets::minimum: return body(codes, std::integral_constant<Offsets, Offsets::minimum>());
      case Offsets::zero_point: return body(codes, std::integral_constant<Offsets, Offsets::zero_point>());
    }
  };
  switch (f.codes) {
    case Codes::int4: return with_offsets(std::integral_constant<Codes, Codes::int4>());
    case Codes::int8: return with_offsets(std::integral_constant<Codes, Codes::int8>());
    case Codes::float8_e4m3:
      return body(std::integral_constant<Codes, Codes::float8_e4m3>(), std::integral_constant<Offsets, Offsets::none>());
  }
}

constexpr int64_t kUnitBytes = 4 * kPanel;

template <Codes kCodes>
constexpr int kUnit = 32 / code_bits(kCodes);

}  // namespace npu
