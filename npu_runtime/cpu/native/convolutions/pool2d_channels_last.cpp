// Pooling of images whose channels are innermost: vectors of channels of several neighbouring pixels together.
#include "convolutions/channels_last.h"

namespace npu::conv {
namespace {

constexpr int kTogether = kRegisters == 32 ? 8 : 4;  // pixels
constexpr int64_t kMostTaps = 1024;                  // MOST_TAPS in arguments.py

struct Maximum {
  static constexpr float kFill = -kInfinity;
  static constexpr bool kScales = false;
  static NPU_INLINE Vec step(Vec most, Vec x) { return (x > most) | (x != x) ? x : most; }  // a NaN wins
};
struct Average {
  static constexpr float kFill = 0.0f;
  static constexpr bool kScales = true;
  static NPU_INLINE Vec step(Vec sum, Vec x) { return sum + x; }
};

// Where the first pixel's taps inside the image are.
template <class T>
struct Taps {
  int64_t count = 0;
  const T* x[kMostTaps];
};

// Neighbouring pixels whose windows have the same taps.
template <class T>
struct Pixels {
  const Taps<T>* taps;
  int64_t x_step;
  const float* scale;
  T* out;
  int64_t out_step;
};

// One vector of channels of kPixels pixels.
template <class Reduce, int kPixels, class T>
NPU_INLINE void reduce_vector(const Pixels<T>& p, int64_t channel, int64_t count) {
  Vec sum[kPixels];
#pragma GCC unroll 8
  for (int i = 0; i < kPixels; ++i) sum[i] = splat(Reduce::kFill);
  for (int64_t t = 0; t < p.taps->count; ++t) {
    const T* x = p.taps->x[t] + channel;
#pragma GCC unroll 8
    for (int i = 0; i < kPixels; ++i) sum[i] = Reduce::step(sum[i], load_n(x + i * p.x_step, count));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kPixels; ++i) {
    if constexpr (Reduce::kScales) sum[i] *= p.scale[i];
    store_n(p.out + i * p.out_step + channel, sum[i], count);
  }
}

template <class Reduce, int kPixels, class T>
void reduce_pixels(int64_t channels, const Pixels<T>& pixels) {
  const int64_t whole = channels / kLanes * kLanes;
  for (int64_t c = 0; c < whole; c += kLanes) reduce_vector<Reduce, kPixels>(pixels, c, kLanes);
  if (whole < channels) reduce_vector<Reduce, kPixels>(pixels, whole, channels - whole);
}

// The range of taps along one axis that are inside the image for a window that begins at `start`.
struct Range {
  int64_t begin, end;
};
Range taps_inside(int64_t start, int64_t size, int64_t taps, int64_t apart) {
  const int64_t begin = start < 0 ? divide_up(-start, apart) : 0;
  return {std::min(begin, taps), std::max(begin, std::min(taps, size > start ? divide_up(size - start, apart) : 0))};
}

template <class Reduce, class T>
void reduce_row(const ChannelsLastArgs& a, int64_t row, Taps<T>& taps, T* out, int64_t out_step) {
  const int64_t item = row / a.out_h, oy = row % a.out_h, top = oy * a.stride_h - a.pad_top;
  const Range down = taps_inside(top, a.in_h, a.kernel_h, a.dilation_h);
  const T* image = reinterpret_cast<const T*>(a.linear.x.data) + item * a.x_batch_stride;
  // The pixels [first, last) have all taps inside the image's width.
  const int64_t span = (a.kernel_w - 1) * a.dilation_w + 1, room = a.in_w + a.pad_left - span;
  const int64_t first = divide_up(a.pad_left, a.stride_w), last = room < 0 ? 0 : std::min(a.out_w, room / a.stride_w + 1);
  const auto reduce = [&]<int kPixels>(std::integral_constant<int, kPixels>, int64_t ox) {
    const int64_t left = ox * a.stride_w - a.pad_left;
    const Range right = taps_inside(left, a.in_w, a.kernel_w, a.dilation_w);
    taps.count = 0;
    for (int64_t ky = down.begin; ky < down.end; ++ky)
      for (int64_t kx = right.begin; kx < right.end; ++kx)
        taps.x[taps.count++] =
            image + (top + ky * a.dilation_h) * a.x_row_stride + (left + kx * a.dilation_w) * a.x_pixel_stride;
    const float* scale = Reduce::kScales ? a.taps + oy * a.out_w + ox : nullptr;
    reduce_pixels<Reduce, kPixels, T>(a.channels,
                                      {&taps, a.stride_w * a.x_pixel_stride, scale, out + ox * out_step, out_step});
  };
  for (int64_t ox = 0; ox < a.out_w;) {
    const int64_t alike = ox >= first ? last - ox : 0;
    if (alike >= kTogether) {
      reduce(std::integral_constant<int, kTogether>(), ox);
      ox += kTogether;
    } else {
      reduce(std::integral_constant<int, 1>(), ox++);
    }
  }
}

template <class Reduce, class T>
void reduce_rows(const ChannelsLastArgs& a) {
  const View& out = a.linear.out;
  const int64_t rows = a.batch * a.out_h;
  parallel_for(rows, divide_up(rows, 8 * num_threads()), [&](int64_t begin, int64_t end, int) {
    Taps<T>& taps = *thread_scratch().get<Taps<T>>(sizeof(Taps<T>));
    for (int64_t row = begin; row < end; ++row) {
      T* to = reinterpret_cast<T*>(out.data) + row * a.out_w * out.stride[2];
      reduce_row<Reduce, T>(a, row, taps, to, out.stride[2]);
    }
  });
}

void pool_maximum(const ChannelsLastArgs& a) {
  with_type(a.linear.x.dtype, [&](auto* type) { reduce_rows<Maximum, std::remove_pointer_t<decltype(type)>>(a); });
}

// One window that is the whole map: a few vectors of channels at a time, over all pixels.
template <class T>
void average_maps(const ChannelsLastArgs& a) {
  constexpr int64_t kVecs = 4;
  const int64_t pixels = a.in_h * a.in_w, blocks = divide_up(a.channels, kVecs * kLanes);
  const View& out = a.linear.out;
  parallel_for(a.batch * blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t item = task / blocks, channel = task % blocks * kVecs * kLanes;
      const T* x = reinterpret_cast<const T*>(a.linear.x.data) + item * a.x_batch_stride + channel;
      T* to = reinterpret_cast<T*>(out.data) + item * out.stride[2] + channel;
      Vec sum[4][kVecs] = {};  // of pixels in turns: shorter sums are more precise
      const int64_t count = a.channels - channel;
      const auto add = [&](int64_t pixel, Vec* part) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < kVecs; ++v)
          if (v * kLanes < count) part[v] += load_n(x + pixel * a.x_pixel_stride + v * kLanes, count - v * kLanes);
      };
      int64_t pixel = 0;
      for (; pixel + 4 <= pixels; pixel += 4)
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) add(pixel + i, sum[i]);
      for (; pixel < pixels; ++pixel) add(pixel, sum[0]);
      for (int64_t v = 0; v < kVecs && v * kLanes < count; ++v)
        store_n(to + v * kLanes, ((sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v])) * a.taps[0], count - v * kLanes);
    }
  });
}

void pool_average(const ChannelsLastArgs& a) {
  const bool whole = a.kernel_h == a.in_h && a.kernel_w == a.in_w && !a.pad_top && !a.pad_left;
  with_type(a.linear.x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (whole && a.out_h * a.out_w == 1) average_maps<T>(a);
    else reduce_rows<Average, T>(a);
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(max_pool2d_channels_last, npu::conv::ChannelsLastArgs, npu::conv::pool_maximum)
NPU_KERNEL(avg_pool2d_channels_last, npu::conv::ChannelsLastArgs, npu::conv::pool_average)
