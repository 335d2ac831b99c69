// What happens to a finished sum: bias, residual, activation, and the one rounding to the output's type.
#pragma once

#include "convolutions/conv_args.h"

namespace npu::conv {

// A block of float sums: each row holds `columns` consecutive pixels from `pixel` on. Rows are successive channels, or
// with channel_step 0 and pixel_step out_w successive image rows of one channel.
struct Tile {
  const float* data;
  int64_t row_stride;
  int64_t rows, columns;
  int64_t channel, pixel;
  int64_t channel_step = 1, pixel_step = 0;
};

// What an activation that only limits its argument limits it to; others have infinite bounds.
struct Bounds {
  float low, high;
  // Whether sums that began with the bias and the residual are results once they are within: they need no `finish`.
  bool suffice;
};
Bounds bounds_of(const ConvArgs& args);

void finish(const ConvArgs& args, int64_t item, const Tile& tile);

}  // namespace npu::conv
