#include "convolutions/conv_epilogue.h"

namespace npu::conv {
namespace {

template <Activation kind>
void finish_as(const ConvArgs& args, int64_t item, const Tile& tile) {
  const int64_t plane = args.out_h * args.out_w;
  const bool before = args.residual_before_activation;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t channel = tile.channel + row * tile.channel_step;
    const int64_t index = channel * plane + tile.pixel + row * tile.pixel_step;
    const Vec bias = splat(args.bias[channel]);
    const float* sums = tile.data + row * tile.row_stride;
    const int64_t out = item * args.out_batch_stride + index;
    const int64_t residual = item * args.residual_batch_stride + index;
    if (!args.residual) {
      for_overlapping(tile.columns, [&](int64_t column) __attribute__((always_inline)) {
        const Vec v = activate<kind>(load(sums + column) + bias);
        store_any(args.out, args.out_type, out + column, v, tile.columns - column);
      });
      continue;
    }
    for (int64_t column = 0; column < tile.columns; column += kLanes) {
      const int64_t count = tile.columns - column;
      const Vec added = load_any(args.residual, args.residual_type, residual + column, count);
      Vec v = load(sums + column) + bias;
      if (before) v += added;
      v = activate<kind>(v);
      if (!before) v += added;
      store_any(args.out, args.out_type, out + column, v, count);
    }
  }
}

}  // namespace

Bounds bounds_of(const ConvArgs& args) {
  const bool limits = args.activation == Activation::relu || args.activation == Activation::relu6;
  const bool last = args.residual && limits && !args.residual_before_activation;
  const bool floats = args.out_type == Dtype::f32 && (!args.residual || args.residual_type == Dtype::f32);
  const bool suffice = floats && !last && (limits || args.activation == Activation::none);
  if (!suffice || !limits) return {-kInfinity, kInfinity, suffice};
  return {0.0f, args.activation == Activation::relu6 ? 6.0f : kInfinity, true};
}

void finish(const ConvArgs& args, int64_t item, const Tile& tile) {
  with_activation(args.activation, [&](auto tag) { finish_as<decltype(tag)::value>(args, item, tile); });
}

}  // namespace npu::conv
