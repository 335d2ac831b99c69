// Codes of a byte (RowFormat in row_rounding.h) as storage types: loading them gives the numbers that they stand for.
#pragma once

#include "quantized/row_rounding.h"

namespace npu {

struct int8_code {
  int8_t bits;
};
struct float8_code {
  int8_t bits;
};

template <class T>
inline constexpr bool kIsCode = std::is_same_v<T, int8_code> || std::is_same_v<T, float8_code>;

NPU_INLINE Vec load(const int8_code* p) { return to_floats(load_bytes(&p->bits)); }
NPU_INLINE Vec load(const float8_code* p) {
  // The sign stays at the top, exponent and fraction go to where a float has them; the bias grows from 7 to 127.
  return bit_cast<Vec>(load_bytes(&p->bits) << 20 & int32_t(0x87f00000)) * 0x1p120f;
}
template <class Code>
NPU_INLINE Vec load_codes(const Code* p, int64_t count) {
  if (count >= kLanes) return load(p);
  Code buffer[kLanes] = {};
  copy_bytes(p, buffer, count);
  return load(buffer);
}
NPU_INLINE Vec load_n(const int8_code* p, int64_t count) { return load_codes(p, count); }
NPU_INLINE Vec load_n(const float8_code* p, int64_t count) { return load_codes(p, count); }

// Calls body with a null pointer of the type that `format` names, or of T where it names none.
template <class T, class F>
NPU_INLINE void with_codes(RowFormat format, const F& body) {
  switch (format) {
    case RowFormat::none: return body(static_cast<T*>(nullptr));
    case RowFormat::int8: return body(static_cast<int8_code*>(nullptr));
    case RowFormat::float8_e4m3: return body(static_cast<float8_code*>(nullptr));
  }
}

}  // namespace npu
