// The argument block of the integer kernels, and how their sums become results; integer.py declares the same fields.
#pragma once

#include "activation.h"

namespace npu::integer {

// How an operand is stored: the floats as in Dtype.
enum class Stored : int64_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, u8 = 4 };

inline bool is_bytes(Stored stored) { return stored == Stored::i8 || stored == Stored::u8; }

// Images are [batch, height, width, channels] without gaps; those of x are bytes. `scales`, `bias` and `offsets` have an
// element for each channel, and a vector more than there are. `weight` is packed as the kernel at hand wants it.
struct Args {
  const char* x;
  const void* weight;
  const float* scales;     // of the sums: those of x and of the weight
  const float* bias;
  const int32_t* offsets;  // what the sums begin with, where a kernel does not subtract x's zero point itself
  const char* residual;    // null where there is none
  char* out;
  Stored x_type, residual_type, out_type;
  Activation activation;
  float x_scale, residual_scale, inverse_out_scale;
  int32_t zero_point, residual_zero_point, out_zero_point, low, high;
  int64_t batch, groups, in_channels, out_channels;  // the channel counts are those of one group
  int64_t in_h, in_w, out_h, out_w;
  int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  int64_t weight_group_stride;
};

// Calls body with a null pointer of the byte type that `stored` names.
template <class F>
NPU_INLINE void with_bytes(Stored stored, const F& body) {
  if (stored == Stored::i8) return body(static_cast<int8_t*>(nullptr));
  return body(static_cast<uint8_t*>(nullptr));
}

NPU_INLINE Vec load_stored(const char* data, Stored stored, int64_t index, int64_t count, float scale, int32_t zero) {
  if (stored == Stored::i8)
    return to_floats(load_bytes(reinterpret_cast<const int8_t*>(data) + index, count) - zero) * scale;
  if (stored == Stored::u8)
    return to_floats(load_bytes(reinterpret_cast<const uint8_t*>(data) + index, count) - zero) * scale;
  return load_any(data, static_cast<Dtype>(stored), index, count);
}

// Limits of a result before it is rounded, in steps from the zero point.
struct Rounding {
  Vec inverse, low, high;
  ToCodes codes;
  Rounding(const Args& a, float least, float most)
      : inverse(splat(a.inverse_out_scale)), low(splat(least)), high(splat(most)),
        codes{a.out_zero_point, a.out_zero_point + int32_t(least)} {}
  explicit Rounding(const Args& a) : Rounding(a, a.low - a.out_zero_point, a.high - a.out_zero_point) {}
  // With the limits of relu and relu6, if the activation is one of them.
  static Rounding limited(const Args& a) {
    const bool limits = a.activation == Activation::relu || a.activation == Activation::relu6;
    const float least = a.low - a.out_zero_point, most = a.high - a.out_zero_point;
    return Rounding(a, limits ? std::max(least, 0.0f) : least,
                    a.activation == Activation::relu6 ? std::min(most, 6.0f * a.inverse_out_scale) : most);
  }
  // Codes.
  NPU_INLINE IVec operator()(Vec y) const { return to_nearest(min(high, max(y * inverse, low))) + codes.zero; }
  // Numbers from the zero point on, of which `codes` makes codes.
  NPU_INLINE IVec numbers(Vec y) const { return to_numbers(y * inverse, low, high); }
};

// Stores a vector of results, `count` elements at most, at element `index`.
NPU_INLINE void store_result(const Args& a, const Rounding& round, int64_t index, Vec y, int64_t count) {
  if (a.out_type == Stored::u8) return store_bytes(reinterpret_cast<uint8_t*>(a.out) + index, round(y), count);
  if (a.out_type == Stored::i8) return store_bytes(reinterpret_cast<int8_t*>(a.out) + index, round(y), count);
  store_any(a.out, static_cast<Dtype>(a.out_type), index, y, count);
}

// A block of sums: of each of some successive pixels, `row_stride` apart, `channels` from `channel` on.
struct Block {
  const int32_t* sums;
  int64_t row_stride;
  int64_t pixel, pixels, channel, channels;
};

// Turns a block of sums into results: scale, bias, residual, activation, rounding. Whole vectors of sums are read.
using Finish = void (*)(const Args&, const Block&);
Finish finish_of(const Args& args);

Vec apply(Activation activation, Vec y);

}  // namespace npu::integer
