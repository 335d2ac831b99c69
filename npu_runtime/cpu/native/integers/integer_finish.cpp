// From int32 sums to results: scale, bias, residual, activation, rounding.
#include "integers/integer_args.h"

namespace npu::integer {
namespace {

enum class Residual { none, i8, u8, floats };

template <Residual kind>
NPU_INLINE Vec load_residual(const char* data, Stored stored, int64_t index, int64_t count, Vec scale, IVec zero) {
  if constexpr (kind == Residual::none) return Vec{};
  else if constexpr (kind == Residual::i8)
    return to_floats(load_bytes(reinterpret_cast<const int8_t*>(data) + index, count) - zero) * scale;
  else if constexpr (kind == Residual::u8)
    return to_floats(load_bytes(reinterpret_cast<const uint8_t*>(data) + index, count) - zero) * scale;
  else return load_any(data, static_cast<Dtype>(stored), index, count);
}

// kLimits: whether the activation only limits its argument. Then its limits and those of bytes are taken together, in
// steps of the output. Stored bytes may alias anything, so what the loops need is in local variables.
template <class Out, Residual residual, bool kLimits>
void finish(const Args& a, const Block& b) {
  constexpr bool kBytes = !std::is_same_v<Out, float>;
  const int64_t total = a.groups * a.out_channels, stride = b.row_stride, pixels = b.pixels;
  const Rounding round = kLimits ? Rounding::limited(a) : Rounding(a);
  const Vec residual_scale = splat(a.residual_scale);
  const IVec residual_zero = splat_bits(a.residual_zero_point);
  const char* added = a.residual;
  const Stored added_type = a.residual_type, out_type = a.out_type;
  const Activation activation = a.activation;
  char* out = a.out;
  const auto result = [&](const int32_t* sums, Vec scale, Vec bias, int64_t index, int64_t count)
      __attribute__((always_inline)) {
    Vec y = to_floats(load_bits<IVec>(sums)) * scale + bias;
    if constexpr (residual != Residual::none)
      y += load_residual<residual>(added, added_type, index, count, residual_scale, residual_zero);
    if constexpr (!kLimits || !kBytes) y = apply(activation, y);
    return y;
  };
  int64_t c = 0;
  for (; kBytes && c + 2 * kLanes <= b.channels; c += 2 * kLanes) {
    const float *scales = a.scales + b.channel + c, *biases = a.bias + b.channel + c;
    const Vec scale = load(scales), other_scale = load(scales + kLanes);
    const Vec bias = load(biases), other_bias = load(biases + kLanes);
    const int32_t* sums = b.sums + c;
    int64_t index = b.pixel * total + b.channel + c;
    for (int64_t p = 0; p < pixels; ++p, sums += stride, index += total) {
      const IVec first = round.numbers(result(sums, scale, bias, index, kLanes));
      const IVec second = round.numbers(result(sums + kLanes, other_scale, other_bias, index + kLanes, kLanes));
      if constexpr (kBytes) store_bytes(reinterpret_cast<Out*>(out) + index, first, second, round.codes);
    }
  }
  for (; c < b.channels; c += kLanes) {
    const int64_t channel = b.channel + c, count = b.channels - c;
    const Vec scale = load(a.scales + channel), bias = load(a.bias + channel);
    const int32_t* sums = b.sums + c;
    int64_t index = b.pixel * total + channel;
    for (int64_t p = 0; p < pixels; ++p, sums += stride, index += total) {
      const Vec y = result(sums, scale, bias, index, count);
      if constexpr (kBytes) store_bytes(reinterpret_cast<Out*>(out) + index, round(y), count);
      else store_any(out, static_cast<Dtype>(out_type), index, y, count);
    }
  }
}

template <class Out, Residual residual>
Finish finish_to(const Args& a) {
  const bool limits = a.activation <= Activation::relu6;
  return limits ? finish<Out, residual, true> : finish<Out, residual, false>;
}

template <class Out>
Finish finish_with(const Args& a) {
  if (!a.residual) return finish_to<Out, Residual::none>(a);
  if (a.residual_type == Stored::i8) return finish_to<Out, Residual::i8>(a);
  if (a.residual_type == Stored::u8) return finish_to<Out, Residual::u8>(a);
  return finish_to<Out, Residual::floats>(a);
}

}  // namespace

Finish finish_of(const Args& a) {
  if (a.out_type == Stored::i8) return finish_with<int8_t>(a);
  if (a.out_type == Stored::u8) return finish_with<uint8_t>(a);
  return finish_with<float>(a);
}

Vec apply(Activation activation, Vec y) {
  with_activation(activation, [&](auto tag) { y = activate<decltype(tag)::value>(y); });
  return y;
}

}  // namespace npu::integer
