// The argument block of the kernels whose images have their channels innermost; channels_last.py declares the same fields.
//
// A vector then holds the channels of one pixel: no map is too narrow for it, a strided window gathers nothing, and a
// pixel is a row of a matrix product, which the kernels of linear layers multiply where it is.
#pragma once

#include <array>

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

// The linear layer of a group, for the pixels from `pixel` on.
template <class T>
LinearArgs layer_of_group(const ChannelsLastArgs& a, int64_t group, int64_t pixel) {
  LinearArgs part = a.linear;
  const int64_t column = group * part.n;
  part.weight = static_cast<const T*>(part.weight) + group * round_up(part.n, kPanel) * part.k;
  if (part.bias.data) part.bias.data += column * sizeof(float);
  for (View* view : {&part.residual, &part.out})
    if (view->data) view->data += (pixel * view->stride[2] + column) * item_size(view->dtype);
  return part;
}

// The last chunk begins early enough to end with the range.
template <class Chunk>
NPU_INLINE void copy_chunks(const char* from, char* to, int64_t bytes) {
  constexpr int64_t kSize = sizeof(Chunk);
  const auto copy = [&](int64_t at) __attribute__((always_inline)) {
    Chunk chunk;
    std::memcpy(&chunk, from + at, kSize);
    std::memcpy(to + at, &chunk, kSize);
  };
  for (int64_t i = 0; i + kSize <= bytes; i += kSize) copy(i);
  copy(bytes - kSize);
}
template <class T>
NPU_INLINE void copy_elements(const T* from, T* to, int64_t count) {
  const int64_t bytes = count * sizeof(T);
  const char* source = reinterpret_cast<const char*>(from);
  char* target = reinterpret_cast<char*>(to);
  if (bytes >= int64_t(sizeof(Vec))) copy_chunks<Vec>(source, target, bytes);
  else if (bytes >= 16) copy_chunks<std::array<char, 16>>(source, target, bytes);
  else for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

}  // namespace npu::conv
