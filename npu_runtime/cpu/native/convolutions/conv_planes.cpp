// Convolution of planar images of few channels, such as a network's input, whose result has its channels innermost.
//
// The lines of the image that a row of the result reads are copied with their padding: as floats, whose products with the
// weights are then summed where the lines are, or, for the matrix unit, as bfloat16, of which windows are gathered.
#include "convolutions/channels_last.h"

namespace npu::conv {
namespace {

constexpr int kTogether = kRegisters == 32 ? 14 : 6;  // pixels, with two vectors of sums each
constexpr int64_t kBlockBytes = 64 << 10;             // of gathered windows

// The lines that a row of the result reads: per channel and kernel row, a line of the padded image, `pitch` elements apart.
// There is room for the windows of kTogether pixels more, and a vector.
struct Lines {
  int64_t count, width, pitch;

  explicit Lines(const ChannelsLastArgs& a)
      : count(a.channels * a.kernel_h),
        width((a.out_w - 1) * a.stride_w + (a.kernel_w - 1) * a.dilation_w + 1),
        pitch(round_up(width + kTogether * a.stride_w + kLanes, kLanes)) {}
};

template <class T, class To>
void copy_lines(const ChannelsLastArgs& a, const Lines& lines, int64_t row, To* to) {
  const int64_t top = row % a.out_h * a.stride_h - a.pad_top, inside = std::min(a.in_w, lines.width - a.pad_left);
  const T* image = reinterpret_cast<const T*>(a.linear.x.data) + row / a.out_h * a.x_batch_stride;
  for (int64_t line = 0; line < lines.count; ++line, to += lines.pitch) {
    const int64_t y = top + line % a.kernel_h * a.dilation_h;
    std::fill(to, to + lines.pitch, To{});
    if (y < 0 || y >= a.in_h) continue;
    const T* from = image + line / a.kernel_h * a.x_channel_stride + y * a.x_row_stride;
    for (int64_t x = 0; x < inside; x += kLanes) {
      const int64_t count = std::min<int64_t>(inside - x, kLanes);
      const Vec values = a.x_pixel_stride == 1 ? load_n(from + x, count)
                                               : load_strided<0>(from + x * a.x_pixel_stride, a.x_pixel_stride, count);
      store_n(to + a.pad_left + x, values, count);
    }
  }
}

// The sums of kTogether pixels and a panel of outputs. The first pixel's windows begin at `x`. kStride 0 stands for any.
template <int kStride>
void multiply_lines(const ChannelsLastArgs& a, const Lines& lines, const float* x, const float* panel, float* sums) {
  const int64_t stride = kStride ? kStride : a.stride_w;
  Vec sum[kTogether][2] = {};
  for (int64_t line = 0; line < lines.count; ++line, x += lines.pitch)
    for (int64_t kx = 0; kx < a.kernel_w; ++kx, panel += kPanel) {
      const Vec first = load(panel), second = load(panel + kLanes);
      const float* pixel = x + kx * a.dilation_w;
#pragma GCC unroll 14
      for (int p = 0; p < kTogether; ++p) {
        const Vec value = splat(pixel[p * stride]);
        sum[p][0] += value * first;
        sum[p][1] += value * second;
      }
    }
#pragma GCC unroll 14
  for (int p = 0; p < kTogether; ++p) {
    store(sums + p * kPanel, sum[p][0]);
    store(sums + p * kPanel + kLanes, sum[p][1]);
  }
}

template <class T>
void convolve_lines(const ChannelsLastArgs& a) {
  const int64_t rows = a.batch * a.out_h, panels = divide_up(a.linear.n, kPanel);
  const int64_t panel_size = a.channels * a.kernel_h * a.kernel_w * kPanel;
  const float* weight = static_cast<const float*>(a.linear.weight);
  const Lines lines(a);
  const Finish finish = finish_for(a.linear);
  auto* multiply = a.stride_w == 2 ? multiply_lines<2> : a.stride_w == 4 ? multiply_lines<4> : multiply_lines<0>;
  parallel_for(rows, divide_up(rows, 8 * num_threads()), [&](int64_t begin, int64_t end, int) {
    float* copied = thread_scratch().get<float>(lines.count * lines.pitch * sizeof(float));
    alignas(64) float sums[kTogether * kPanel];
    for (int64_t row = begin; row < end; ++row) {
      copy_lines<T>(a, lines, row, copied);
      for (int64_t x = 0; x < a.out_w; x += kTogether)
        for (int64_t p = 0; p < panels; ++p) {
          multiply(a, lines, copied + x * a.stride_w, weight + p * panel_size, sums);
          finish(a.linear, sums, row * a.out_w + x, std::min<int64_t>(kTogether, a.out_w - x), p * kPanel);
        }
    }
  });
}

// The windows of one row's pixels, each of a.linear.k elements; those after a window's last one stay 0. kWidth elements of a
// line are moved at once, if the kernel is not wider: the next line overwrites what is too much.
template <int kWidth>
void gather_windows(const ChannelsLastArgs& a, const Lines& lines, const bf16* x, bf16* window) {
  const int64_t used = lines.count * a.kernel_w;
  for (int64_t ox = 0; ox < a.out_w; ++ox, x += a.stride_w, window += a.linear.k) {
    bf16* to = window;
    for (int64_t line = 0; line < lines.count; ++line, to += a.kernel_w) {
      const bf16* from = x + line * lines.pitch;
      if constexpr (kWidth) {
        std::memcpy(to, from, kWidth * sizeof(bf16));
      } else {
        for (int64_t kx = 0; kx < a.kernel_w; ++kx) to[kx] = from[kx * a.dilation_w];
      }
    }
    if constexpr (kWidth)
      for (int64_t i = used; i < used + kWidth - a.kernel_w; ++i) window[i] = {};
  }
}

void convolve_by_tiles(const ChannelsLastArgs& a) {
  const Lines lines(a);
  const int64_t rows = a.batch * a.out_h, row_size = a.out_w * a.linear.k;
  const int64_t fitting = std::max<int64_t>(1, kBlockBytes / int64_t(row_size * sizeof(bf16)));
  const int64_t shares = num_threads() > 1 ? std::min<int64_t>(rows, 4 * num_threads()) : 1;
  const int64_t together = std::min(fitting, divide_up(rows, shares));
  auto* gather = a.dilation_w > 1 || a.kernel_w > 8 ? gather_windows<0>
                 : a.kernel_w > 4                   ? gather_windows<8>
                                                    : gather_windows<4>;
  parallel_for(divide_up(rows, together), 1, [&](int64_t begin, int64_t end, int) {
    // A window may be written up to seven elements beyond its end.
    const int64_t window_elements = together * row_size + kLanes, elements = window_elements + lines.count * lines.pitch;
    bf16* windows = operand_scratch().get<bf16>(elements * sizeof(bf16));
    std::memset(windows, 0, window_elements * sizeof(bf16));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * together, count = std::min(together, rows - first);
      for (int64_t row = 0; row < count; ++row) {
        copy_lines<bf16>(a, lines, first + row, windows + window_elements);
        gather(a, lines, windows + window_elements, windows + row * row_size);
      }
      LinearArgs part = a.linear;
      part.x.data = reinterpret_cast<char*>(windows);
      for (View* view : {&part.x, &part.residual, &part.out}) view->size[2] = count * a.out_w;
      for (View* view : {&part.residual, &part.out})
        if (view->data) view->data += first * a.out_w * view->stride[2] * item_size(view->dtype);
      linear(part);
    }
  });
}

void convolve(const ChannelsLastArgs& a) {
  with_type(a.linear.x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (kHasTiles && std::is_same_v<T, bf16>) {
      if (tiles_allowed()) return convolve_by_tiles(a);
    }
    convolve_lines<T>(a);
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_planes, npu::conv::ChannelsLastArgs, npu::conv::convolve)
