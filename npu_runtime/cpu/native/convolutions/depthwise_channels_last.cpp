// Depthwise convolution of images whose channels are innermost: a few neighbouring pixels together, which share weights and
// columns of the image, for a panel of channels at a time, whose sums are then finished like those of a product.
#include "convolutions/channels_last.h"

namespace npu::conv {
namespace {

constexpr int kTogether = 7;                     // pixels: the width of most maps is a multiple of it
constexpr int kVecs = kRegisters == 32 ? 2 : 1;  // of channels: sums, weights and a column of the image fit into registers

// Where the input of kTogether pixels is, per kernel row from `first` to `last`: the first column, if all columns are inside
// the image; else a pointer for each column of the image; in windows of no constant size, one for each kernel column and
// pixel. Columns outside the image are zeros.
template <class T>
struct Columns {
  int64_t first, last;
  const T** x;
};

// Sums of kVectors vectors of channels from `channel` on, `count` channels. A kSize of 0 stands for a window of any size.
template <class T, int kSize, int kStride, int kVectors, bool kInside, class Out>
NPU_INLINE void multiply_taps(const ChannelsLastArgs& a, const Columns<T>& columns, int64_t channel, int64_t count,
                              const Results<Out>& results, const Range& range) {
  constexpr int kWidth = (kTogether - 1) * kStride + kSize;
  Vec sum[kTogether][kVectors];
  const T* const* x = columns.x;
  const auto load_vecs = [&](const auto* from, Vec* to) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) to[v] = load_n(from + channel + v * kLanes, count - v * kLanes);
  };
  begin_sums(sum, results, range);
  for (int64_t ky = columns.first; ky < columns.last; ++ky) {
    const float* taps = a.taps + ky * a.kernel_w * a.channels;
    if constexpr (kSize) {
      Vec weight[kSize][kVectors];
#pragma GCC unroll 7
      for (int kx = 0; kx < kSize; ++kx) load_vecs(taps + kx * a.channels, weight[kx]);
      const T* next = *x;
#pragma GCC unroll 20
      for (int c = 0; c < kWidth; ++c) {
        Vec column[kVectors];
        load_vecs(kInside ? next : x[c], column);
        next += a.x_pixel_stride;
#pragma GCC unroll 7
        for (int p = 0; p < kTogether; ++p) {
          const int kx = c - p * kStride;
          if (kx < 0 || kx >= kSize) continue;
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[p][v] += column[v] * weight[kx][v];
        }
      }
      x += kInside ? 1 : kWidth;
    } else {
      for (int64_t kx = 0; kx < a.kernel_w; ++kx, x += kTogether) {
        Vec weight[kVectors], column[kVectors];
        load_vecs(taps + kx * a.channels, weight);
#pragma GCC unroll 7
        for (int p = 0; p < kTogether; ++p) {
          load_vecs(x[p], column);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[p][v] += column[v] * weight[v];
        }
      }
    }
  }
  finish_sums<false>(sum, results, range);
}

// One row of the result. `pointers` has room for those of Columns.
template <class T, int kSize, int kStride>
void convolve_row(const ChannelsLastArgs& a, Finish finish, const DirectResult<T>& direct, int64_t row, const T** pointers) {
  constexpr int64_t kWhole = kVecs * kLanes, kWidth = (kTogether - 1) * kStride + kSize;
  const int64_t item = row / a.out_h, top = row % a.out_h * a.stride_h - a.pad_top;
  const T* image = reinterpret_cast<const T*>(a.linear.x.data) + item * a.x_batch_stride;
  const T* zeros = reinterpret_cast<const T*>(a.taps + a.kernel_h * a.kernel_w * a.channels);
  Columns<T> columns{0, a.kernel_h, pointers};
  while (columns.first < columns.last && top + columns.first * a.dilation_h < 0) ++columns.first;
  while (columns.first < columns.last && top + (columns.last - 1) * a.dilation_h >= a.in_h) --columns.last;
  for (int64_t ox = 0; ox < a.out_w; ox += kTogether) {
    const int64_t left = ox * a.stride_w - a.pad_left;
    const bool inside = kSize && left >= 0 && left + kWidth <= a.in_w;
    const T** x = pointers;
    const auto add = [&](const T* line, int64_t column) __attribute__((always_inline)) {
      *x++ = column >= 0 && column < a.in_w ? line + column * a.x_pixel_stride : zeros;
    };
    for (int64_t ky = columns.first; ky < columns.last; ++ky) {
      const T* line = image + (top + ky * a.dilation_h) * a.x_row_stride;
      if constexpr (kSize) {
        for (int64_t c = 0; c < (inside ? 1 : kWidth); ++c) add(line, left + c);
      } else {
        for (int64_t kx = 0; kx < a.kernel_w; ++kx)
          for (int64_t p = 0; p < kTogether; ++p) add(line, left + kx * a.dilation_w + p * a.stride_w);
      }
    }
    alignas(64) float tile[kTogether * kPanel];
    const int64_t pixel = row * a.out_w + ox, pixels = std::min<int64_t>(kTogether, a.out_w - ox);
    for (int64_t c = 0; c < a.channels; c += kPanel) {
      const bool is_direct = direct.out && pixels == kTogether;
      for (int64_t part = c; part < std::min(c + kPanel, a.channels); part += kWhole) {
        const int64_t count = a.channels - part;
        const auto multiply = [&]<bool kInside, class Out>(std::bool_constant<kInside>, const Results<Out>& results,
                                                           const Range& range) {
          if (count >= kWhole)
            multiply_taps<T, kSize, kStride, kVecs, kInside>(a, columns, part, kWhole, results, range);
          else if (count > kLanes)
            multiply_taps<T, kSize, kStride, kVecs, kInside>(a, columns, part, count, results, range);
          else multiply_taps<T, kSize, kStride, 1, kInside>(a, columns, part, count, results, range);
        };
        const auto multiply_into = [&](const auto& results, const Range& range) {
          if (inside) multiply(std::bool_constant<kSize != 0>(), results, range);
          else multiply(std::false_type(), results, range);
        };
        if (is_direct) {
          alignas(64) float start[kPanel];
          Range range = direct.begin(part, start);
          range.low = direct.low, range.high = direct.high;
          multiply_into(direct.at(pixel, part), range);
        } else {
          multiply_into(Sums{tile + part - c}, {});
        }
      }
      if (!is_direct) finish(a.linear, tile, pixel, pixels, c);
    }
  }
}

template <class T>
auto* row_kernel(const ChannelsLastArgs& a) {
  const int64_t step = a.dilation_w == 1 && a.stride_w <= 2 ? a.stride_w : 0;
  switch (100 * step + a.kernel_w) {
    case 103: return convolve_row<T, 3, 1>;
    case 105: return convolve_row<T, 5, 1>;
    case 107: return convolve_row<T, 7, 1>;
    case 203: return convolve_row<T, 3, 2>;
    case 205: return convolve_row<T, 5, 2>;
    default: return convolve_row<T, 0, 0>;
  }
}

void convolve(const ChannelsLastArgs& a) {
  const int64_t rows = a.batch * a.out_h;
  const Finish finish = finish_for(a.linear);
  with_type(a.linear.x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const DirectResult<T> direct(a.linear);
    auto* convolve_row = row_kernel<T>(a);
    // A window of any size has a pointer per tap and pixel; of the others none has more columns than 3 a tap and pixel.
    const int64_t pointers = a.kernel_h * a.kernel_w * 3 * kTogether;
    parallel_for(rows, divide_up(rows, 8 * num_threads()), [&](int64_t begin, int64_t end, int) {
      const T** columns = thread_scratch().get<const T*>(pointers * sizeof(const T*));
      for (int64_t row = begin; row < end; ++row) convolve_row(a, finish, direct, row, columns);
    });
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_depthwise_channels_last, npu::conv::ChannelsLastArgs, npu::conv::convolve)
