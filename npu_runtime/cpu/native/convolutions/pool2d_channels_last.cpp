// Depthwise convolution and pooling of images whose channels are innermost: vectors of channels, with several neighbouring
// pixels together, which share a tap's weights.
#include "convolutions/channels_last.h"

namespace npu::conv {
namespace {

constexpr int kTogether = kRegisters == 32 ? 8 : 4;  // pixels
constexpr int64_t kMostTaps = 1024;                  // MOST_TAPS in arguments.py

// The weights of a tap: bfloat16 where two taps are multiplied at once, else floats.
template <class T>
using Weight = std::conditional_t<kHasPairs && std::is_same_v<T, bf16>, bf16, float>;

struct Multiply {
  static constexpr float kFill = 0.0f;
  static constexpr bool kHasWeights = true, kScales = false;
  static NPU_INLINE Vec step(Vec sum, Vec x, Vec weight) { return sum + x * weight; }
};
struct Maximum {
  static constexpr float kFill = -kInfinity;
  static constexpr bool kHasWeights = false, kScales = false;
  static NPU_INLINE Vec step(Vec most, Vec x, Vec) { return (x > most) | (x != x) ? x : most; }  // a NaN wins
};
struct Average {
  static constexpr float kFill = 0.0f;
  static constexpr bool kHasWeights = false, kScales = true;
  static NPU_INLINE Vec step(Vec sum, Vec x, Vec) { return sum + x; }
};

struct Bounds {
  float low = -kInfinity, high = kInfinity;
};

// Where the first pixel's taps inside the image are, and their weights.
template <class T>
struct Taps {
  int64_t count = 0;
  const T* x[kMostTaps];
  const Weight<T>* weight[kMostTaps];
  const Weight<T>* zeros;
};

// Neighbouring pixels whose windows have the same taps. The sums are brought within the bounds.
template <class T, class Out>
struct Pixels {
  const Taps<T>* taps;
  int64_t x_step;
  const float* scale;
  Out* out;
  int64_t out_step;
  Bounds bounds;
};

// One vector of channels of kPixels pixels.
template <class Reduce, int kPixels, int kTaps, class T, class Out>
NPU_INLINE void reduce_vector(const float* bias, const Pixels<T, Out>& p, int64_t channel, int64_t count) {
  const Taps<T>& taps = *p.taps;
  const int64_t n = kTaps ? kTaps : taps.count;
  const Vec start = Reduce::kHasWeights ? load_n(bias + channel, count) : splat(Reduce::kFill);
  const Vec low = splat(p.bounds.low), high = splat(p.bounds.high);
  Vec sum[kPixels];
#pragma GCC unroll 8
  for (int i = 0; i < kPixels; ++i) sum[i] = start;
#pragma GCC unroll 9
  for (int64_t t = 0; t < n; ++t) {
    Vec weight{};
    if constexpr (Reduce::kHasWeights) weight = load_n(taps.weight[t] + channel, count);
    const T* x = taps.x[t] + channel;
#pragma GCC unroll 8
    for (int i = 0; i < kPixels; ++i) sum[i] = Reduce::step(sum[i], load_n(x + i * p.x_step, count), weight);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kPixels; ++i) {
    if constexpr (Reduce::kScales) sum[i] *= p.scale[i];
    store_n(p.out + i * p.out_step + channel, min(high, max(low, sum[i])), count);  // NaN passes
  }
}

// The same for 2 * kLanes channels, with two taps at once, where T is bfloat16 and kHasPairs.
template <int kPixels, int kTaps, class T, class Out>
NPU_INLINE void multiply_pairs(const float* bias, const Pixels<T, Out>& p, int64_t channel) {
  const Taps<T>& taps = *p.taps;
  const int64_t n = kTaps ? kTaps : taps.count;
  const Vec low = splat(p.bounds.low), high = splat(p.bounds.high);
  Vecs sum[kPixels] = {};
  const auto add = [&](int64_t t, int64_t other, const T* second) __attribute__((always_inline)) {
    const Vecs weight = pairs_of(taps.weight[t] + channel, second + channel);
    const T *x = taps.x[t] + channel, *y = taps.x[other] + channel;
#pragma GCC unroll 8
    for (int i = 0; i < kPixels; ++i) {
      const Vecs pairs = pairs_of(x + i * p.x_step, y + i * p.x_step);
      sum[i] = {add_pairs(sum[i].first, pairs.first, weight.first),
                add_pairs(sum[i].second, pairs.second, weight.second)};
    }
  };
  int64_t t = 0;
#pragma GCC unroll 4
  for (; t + 2 <= n; t += 2) add(t, t + 1, taps.weight[t + 1]);
  if (t < n) add(t, t, taps.zeros);
  const Vec first = load(bias + channel), second = load(bias + channel + kLanes);
#pragma GCC unroll 8
  for (int i = 0; i < kPixels; ++i) {
    const Vecs ordered = in_order(sum[i]);
    Out* to = p.out + i * p.out_step + channel;
    store(to, min(high, max(low, ordered.first + first)));
    store(to + kLanes, min(high, max(low, ordered.second + second)));
  }
}

template <class Reduce, int kPixels, class T, class Out>
void reduce_pixels(const float* bias, int64_t channels, const Pixels<T, Out>& pixels) {
  const int64_t whole = channels / kLanes * kLanes;
  int64_t c = 0;
  if constexpr (kHasPairs && std::is_same_v<T, bf16> && Reduce::kHasWeights) {
    const int64_t pairs = channels / (2 * kLanes) * (2 * kLanes);
    if (kPixels > 1 && pixels.taps->count == 9)
      for (; c < pairs; c += 2 * kLanes) multiply_pairs<kPixels, 9>(bias, pixels, c);
    for (; c < pairs; c += 2 * kLanes) multiply_pairs<kPixels, 0>(bias, pixels, c);
  } else if (Reduce::kHasWeights && kPixels > 1 && pixels.taps->count == 9) {
    for (; c < whole; c += kLanes) reduce_vector<Reduce, kPixels, 9>(bias, pixels, c, kLanes);
  }
  for (; c < whole; c += kLanes) reduce_vector<Reduce, kPixels, 0>(bias, pixels, c, kLanes);
  if (whole < channels) reduce_vector<Reduce, kPixels, 0>(bias, pixels, whole, channels - whole);
}

// The range of taps along one axis that are inside the image for a window that begins at `start`.
struct Range {
  int64_t begin, end;
};
Range taps_inside(int64_t start, int64_t size, int64_t taps, int64_t apart) {
  const int64_t begin = start < 0 ? divide_up(-start, apart) : 0;
  return {std::min(begin, taps), std::max(begin, std::min(taps, size > start ? divide_up(size - start, apart) : 0))};
}

template <class Reduce, class T, class Out>
void reduce_row(const ChannelsLastArgs& a, int64_t row, Taps<T>& taps, const Bounds& bounds, Out* out, int64_t out_step) {
  const int64_t item = row / a.out_h, oy = row % a.out_h, top = oy * a.stride_h - a.pad_top;
  const Range down = taps_inside(top, a.in_h, a.kernel_h, a.dilation_h);
  const T* image = reinterpret_cast<const T*>(a.linear.x.data) + item * a.x_batch_stride;
  const float* bias = reinterpret_cast<const float*>(a.linear.bias.data);
  const auto* weights = reinterpret_cast<const Weight<T>*>(a.taps);
  taps.zeros = weights + a.kernel_h * a.kernel_w * a.channels;
  // The pixels [first, last) have all taps inside the image's width.
  const int64_t span = (a.kernel_w - 1) * a.dilation_w + 1, room = a.in_w + a.pad_left - span;
  const int64_t first = divide_up(a.pad_left, a.stride_w), last = room < 0 ? 0 : std::min(a.out_w, room / a.stride_w + 1);
  const auto reduce = [&]<int kPixels>(std::integral_constant<int, kPixels>, int64_t ox) {
    const int64_t left = ox * a.stride_w - a.pad_left;
    const Range right = taps_inside(left, a.in_w, a.kernel_w, a.dilation_w);
    taps.count = 0;
    for (int64_t ky = down.begin; ky < down.end; ++ky)
      for (int64_t kx = right.begin; kx < right.end; ++kx, ++taps.count) {
        taps.x[taps.count] =
            image + (top + ky * a.dilation_h) * a.x_row_stride + (left + kx * a.dilation_w) * a.x_pixel_stride;
        if constexpr (Reduce::kHasWeights) taps.weight[taps.count] = weights + (ky * a.kernel_w + kx) * a.channels;
      }
    const float* scale = Reduce::kScales ? a.taps + oy * a.out_w + ox : nullptr;
    reduce_pixels<Reduce, kPixels, T, Out>(
        bias, a.channels, {&taps, a.stride_w * a.x_pixel_stride, scale, out + ox * out_step, out_step, bounds});
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

// Rows whose sums need no more than the bounds.
template <class Reduce, class T>
void reduce_rows(const ChannelsLastArgs& a, const Bounds& bounds) {
  const View& out = a.linear.out;
  const int64_t rows = a.batch * a.out_h;
  parallel_for(rows, divide_up(rows, 8 * num_threads()), [&](int64_t begin, int64_t end, int) {
    Taps<T>& taps = *thread_scratch().get<Taps<T>>(sizeof(Taps<T>));
    for (int64_t row = begin; row < end; ++row) {
      T* to = reinterpret_cast<T*>(out.data) + row * a.out_w * out.stride[2];
      reduce_row<Reduce, T, T>(a, row, taps, bounds, to, out.stride[2]);
    }
  });
}

// Sums in float32, with their activation and the residual: one row of the image.
template <Activation activation>
void finish_row(const ChannelsLastArgs& a, const float* sums, int64_t row) {
  const View &out = a.linear.out, &residual = a.linear.residual;
  for (int64_t pixel = row * a.out_w; pixel < (row + 1) * a.out_w; ++pixel, sums += a.channels)
    for (int64_t c = 0; c < a.channels; c += kLanes) {
      const int64_t count = a.channels - c;
      Vec value = load_n(sums + c, count);
      if (residual.data) {
        const Vec added = load_any(residual.data, residual.dtype, pixel * residual.stride[2] + c, count);
        value = a.linear.residual_first ? activate<activation>(value + added) : activate<activation>(value) + added;
      } else {
        value = activate<activation>(value);
      }
      store_any(out.data, out.dtype, pixel * out.stride[2] + c, value, count);
    }
}

template <class T>
void convolve_rows(const ChannelsLastArgs& a) {
  const int64_t rows = a.batch * a.out_h;
  parallel_for(rows, divide_up(rows, 8 * num_threads()), [&](int64_t begin, int64_t end, int) {
    const int64_t taps_floats = divide_up(sizeof(Taps<T>), sizeof(float));
    float* memory = thread_scratch().get<float>((taps_floats + a.out_w * a.channels) * sizeof(float));
    float* sums = memory + taps_floats;
    for (int64_t row = begin; row < end; ++row) {
      reduce_row<Multiply, T, float>(a, row, *reinterpret_cast<Taps<T>*>(memory), {}, sums, a.channels);
      with_activation(a.linear.activation, [&](auto tag) { finish_row<decltype(tag)::value>(a, sums, row); });
    }
  });
}

void convolve_depthwise(const ChannelsLastArgs& a) {
  const Activation activation = a.linear.activation;
  const bool limits = activation == Activation::none || activation == Activation::relu || activation == Activation::relu6;
  const bool direct = limits && !a.linear.residual.data && a.linear.out.dtype == a.linear.x.dtype;
  Bounds bounds;
  if (activation != Activation::none) bounds.low = 0.0f;
  if (activation == Activation::relu6) bounds.high = 6.0f;
  with_type(a.linear.x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (direct) reduce_rows<Multiply, T>(a, bounds);
    else convolve_rows<T>(a);
  });
}

void pool_maximum(const ChannelsLastArgs& a) {
  with_type(a.linear.x.dtype, [&](auto* type) { reduce_rows<Maximum, std::remove_pointer_t<decltype(type)>>(a, {}); });
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
    else reduce_rows<Average, T>(a, {});
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_depthwise_channels_last, npu::conv::ChannelsLastArgs, npu::conv::convolve_depthwise)
NPU_KERNEL(max_pool2d_channels_last, npu::conv::ChannelsLastArgs, npu::conv::pool_maximum)
NPU_KERNEL(avg_pool2d_channels_last, npu::conv::ChannelsLastArgs, npu::conv::pool_average)
