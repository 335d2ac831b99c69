// The argument block of the kernels whose images have their channels innermost; channels_last.py declares the same fields.
//
// A vector then holds the channels of one pixel: no map is too narrow for it, a strided window gathers nothing, and a
// pixel is a row of a matrix product, which the kernels of linear layers multiply where it is.
#pragma once

#include "products/linear_args.h"

namespace npu::conv {

struct ChannelsLastArgs {
  // `residual` and `out` have a row per pixel. Of `x` only data and type count. A convolution's weight has a row per output
  // channel, of `k` elements: kernel rows, kernel columns, channels, and zeros up to k. Each group's rows fill whole panels.
  LinearArgs linear;
  // The weights of a depthwise convolution, per tap and channel, and of a tap of zeros. Of an average: one per output pixel.
  const float* taps;
  int64_t batch, groups, channels;  // `channels` and `linear.n` count those of one group
  int64_t in_h, in_w, out_h, out_w;
  int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  int64_t x_batch_stride, x_row_stride, x_pixel_stride, x_channel_stride;
};

}  // namespace npu::conv
