// From int32 sums to results: scale, bias, residual, activation, rounding.
#include "integer_args.h"

namespace npu::integer {
namespace {

template <Activation kind, bool kHasResidual, class Out>
NPU_INLINE void finish_as(const Args& a, const Block& block) {
  const Rounding round(a);
  const int64_t total = a.groups * a.out_channels;
  for (int64_t c = 0; c < block.channels; c += kLanes) {
    const int64_t channel = block.channel + c, count = block.channels - c;
    const Vec scale = load(a.scales + channel), bias = load(a.bias + channel);
    for (int64_t p = 0; p < block.pixels; ++p) {
      const int64_t index = (block.pixel + p) * total + channel;
      Vec y = to_floats(load_bits<IVec>(block.sums + p * block.row_stride + c)) * scale + bias;
      if constexpr (kHasResidual)
        y += load_stored(a.residual, a.residual_type, index, count, a.residual_scale, a.residual_zero_point);
      y = conv::activate<kind>(y);
      if constexpr (std::is_same_v<Out, float>) store_result(a, round, index, y, count);
      else store_bytes(reinterpret_cast<Out*>(a.out) + index, round(y), count);
    }
  }
}

template <Activation kind, bool kHasResidual>
void finish_to(const Args& a, const Block& block) {
  if (a.out_type == Stored::u8) return finish_as<kind, kHasResidual, uint8_t>(a, block);
  if (a.out_type == Stored::i8) return finish_as<kind, kHasResidual, int8_t>(a, block);
  finish_as<kind, kHasResidual, float>(a, block);
}

}  // namespace

void finish(const Args& a, const Block& block) {
  with_activation(a.activation, [&](auto tag) {
    if (a.residual) finish_to<decltype(tag)::value, true>(a, block);
    else finish_to<decltype(tag)::value, false>(a, block);
  });
}

}  // namespace npu::integer
