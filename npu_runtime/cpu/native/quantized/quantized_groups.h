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
  const auto without_offsets = [&](auto codes) { return body(codes, std::integral_constant<Offsets, Offsets::none>()); };
  switch (f.codes) {
    case Codes::int4: return with_offsets(std::integral_constant<Codes, Codes::int4>());
    case Codes::int8: return with_offsets(std::integral_constant<Codes, Codes::int8>());
    case Codes::float8_e4m3: return without_offsets(std::integral_constant<Codes, Codes::float8_e4m3>());
    case Codes::float4_e2m1: return without_offsets(std::integral_constant<Codes, Codes::float4_e2m1>());
    case Codes::iq4_nl: return without_offsets(std::integral_constant<Codes, Codes::iq4_nl>());
  }
}

constexpr int64_t kUnitBytes = 4 * kPanel;

template <Codes kCodes>
constexpr int kUnit = 32 / code_bits(kCodes);

// The numbers that codes of 4 bits choose from: those of `CODE_FORMATS` in npu_compiler/graph/code_formats.py.
template <Codes kCodes>
constexpr int8_t kTable[16] = {};
template <>
inline constexpr int8_t kTable<Codes::float4_e2m1>[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
template <>
inline constexpr int8_t kTable<Codes::iq4_nl>[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};

// The codes of a unit whose half bytes lie at the same place, 0 or 1, in bytes; as the numbers that they choose where there
// is a table.
template <Codes kCodes>
NPU_INLINE ByteVec half_bytes(UVec unit, int place) {
  const ByteVec codes = bit_cast<ByteVec>(in_register(unit >> 4 * place & 0x0f0f0f0fu));
  if constexpr (have_table(kCodes)) return choose_bytes(kTable<kCodes>, codes);
  else return codes;
}

}  // namespace npu
