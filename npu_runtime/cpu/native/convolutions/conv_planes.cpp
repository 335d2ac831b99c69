// Convolution of planar images of few channels, such as a network's input, whose result has its channels innermost.
//
// The lines of the image that a row of the result reads are copied with their padding: as floats, whose products with the
// weights are then summed where the lines are, or, for the matrix unit, as bfloat16, of which windows are gathered. Where pairs
// of bfloat16 are multiplied, a pair is of two neighbouring lines, which then take the place of one.
#include "convolutions/channels_last.h"

namespace npu::conv {
namespace {

constexpr int kTogether = kRegisters == 32 ? 14 : 6;  // pixels, with two vectors of sums each
constexpr int64_t kBlockBytes = 64 << 10;             // of gathered windows

template <class T>
inline constexpr bool kPairsLines = Step<T>::kWidth == 2;

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

// The lines in pairs, each of which is a line of pairs. Where their number is odd, the last one is paired with zeros.
void copy_pairs(const ChannelsLastArgs& a, const Lines& lines, int64_t row, bf16* memory, float* to) {
  if (lines.count % 2) std::fill_n(memory + lines.count * lines.pitch, lines.pitch, bf16{});
  copy_lines<bf16>(a, lines, row, memory);
  for (int64_t line = 0; line < lines.count; line += 2, memory += 2 * lines.pitch)
    for (int64_t x = 0; x < lines.pitch; x += kLanes, to += kLanes) {
      const UVec first = bit_cast<UVec>(load(memory + x)), second = bit_cast<UVec>(load(memory + lines.pitch + x));
      store(to, bit_cast<Vec>(first >> 16 | second));
    }
}

// The sums of kTogether pixels and a panel of outputs. The first pixel's windows begin at `x`, of `count` lines of floats, or
// of pairs. kStride 0 stands for any.
template <bool kPairs, int kStride, class Out>
void multiply_lines(const ChannelsLastArgs& a, int64_t count, int64_t pitch, const float* x, const float* panel,
                    const Results<Out>& results, const Range& range) {
  const int64_t stride = kStride ? kStride : a.stride_w;
  Vec sum[kTogether][2];
  begin_sums(sum, results, range);
  for (int64_t line = 0; line < count; ++line, x += pitch)
    for (int64_t kx = 0; kx < a.kernel_w; ++kx, panel += kPanel) {
      const Vec weight[2] = {load(panel), load(panel + kLanes)};
      const float* pixel = x + kx * a.dilation_w;
#pragma GCC unroll 14
      for (int p = 0; p < kTogether; ++p) {
        const Vec value = splat(pixel[p * stride]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          if constexpr (kPairs) sum[p][v] = add_pairs(sum[p][v], value, weight[v]);
          else sum[p][v] += value * weight[v];
        }
      }
    }
  finish_sums<kPairs && kPairsFlush>(sum, results, range);
}

template <class T>
void convolve_lines(const ChannelsLastArgs& a) {
  constexpr bool kPairs = kPairsLines<T>;
  using Out = std::conditional_t<kPairs, T, float>;
  const Lines lines(a);
  const int64_t rows = a.batch * a.out_h, panels = divide_up(a.linear.n, kPanel);
  const int64_t count = divide_up(lines.count, Step<T>::kWidth), panel_size = count * a.kernel_w * kPanel;
  const float* weight = static_cast<const float*>(a.linear.weight);
  const Finish finish = finish_for(a.linear);
  const DirectResult<Out> direct(a.linear);
  const auto multiply = [&](const float* x, const float* panel, const auto& results, const Range& range) {
    if (a.stride_w == 2) multiply_lines<kPairs, 2>(a, count, lines.pitch, x, panel, results, range);
    else if (a.stride_w == 4) multiply_lines<kPairs, 4>(a, count, lines.pitch, x, panel, results, range);
    else multiply_lines<kPairs, 0>(a, count, lines.pitch, x, panel, results, range);
  };
  parallel_for(rows, divide_up(rows, 8 * num_threads()), [&](int64_t begin, int64_t end, int) {
    const int64_t floats = count * lines.pitch;
    float* copied = thread_scratch().get<float>((kPairs ? 2 : 1) * floats * sizeof(float));
    alignas(64) float sums[kTogether * kPanel], start[kPanel];
    for (int64_t row = begin; row < end; ++row) {
      if constexpr (kPairs) copy_pairs(a, lines, row, reinterpret_cast<bf16*>(copied + floats), copied);
      else copy_lines<T>(a, lines, row, copied);
      for (int64_t x = 0; x < a.out_w; x += kTogether)
        for (int64_t p = 0; p < panels; ++p) {
          const float *first = copied + x * a.stride_w, *panel = weight + p * panel_size;
          const int64_t pixel = row * a.out_w + x, pixels = std::min<int64_t>(kTogether, a.out_w - x);
          if (direct.out && pixels == kTogether) {
            Range range = direct.begin(p * kPanel, start);
            range.low = direct.low, range.high = direct.high;
            multiply(first, panel, direct.at(pixel, p * kPanel), range);
          } else {
            multiply(first, panel, Sums{sums}, {});
            finish(a.linear, sums, pixel, pixels, p * kPanel);
          }
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
