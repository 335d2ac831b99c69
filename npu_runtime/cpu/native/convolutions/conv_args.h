// The argument block that every convolution and pooling kernel takes; conv.py declares the same fields.
#pragma once

#include <cstdint>

#include "activation.h"

namespace npu::conv {

// Tensors are NCHW with dense planes: only the stride between batch items is free. `weight` is packed as the kernel at
// hand wants it, one group after the other; `bias` has a float per channel.
struct ConvArgs {
  const char* x;
  const float* weight;
  const float* bias;
  const char* residual;  // null when there is none
  char* out;
  Dtype x_type, residual_type, out_type;
  Activation activation;
  int64_t residual_before_activation;
  int64_t x_batch_stride, residual_batch_stride, out_batch_stride;
  int64_t batch, groups, in_channels, out_channels;  // the channel counts are those of one group
  int64_t in_h, in_w, out_h, out_w;
  int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  int64_t weight_group_stride;
  int64_t variant;  // which of a kernel's layouts `weight` has
  int64_t pairs;    // whether `weight`'s elements are pairs of bfloat16, as x then is too (see conv.cpp)
};

}  // namespace npu::conv
