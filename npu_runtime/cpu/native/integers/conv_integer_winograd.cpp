// Integer convolution with 3 x 3 taps by Winograd's F(2 x 2, 3 x 3), with 16 products instead of 36 for each four pixels,
// or F(4 x 4, 3 x 3), with 36 instead of 144 for each 16. https://arxiv.org/abs/1509.09308
//
// All of it is exact. Transforms are taken so many times as large that all of their factors are integers, so 4 or 576 times
// a result comes out, which is divided by shifting it and, for 9, by multiplying with its inverse modulo 2^32. Sums may wrap:
// integer.py allows only weights with which 4 or 64 times a result fits in int32.
#include "convolutions/winograd.h"
#include "integers/integer_args.h"
#include "integers/integer_gemm.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

// Of transformed inputs, with which the L2 cache has room for some channels' transformed weights, or L3 is read once for
// each panel.
constexpr int64_t kTileBytes = 320 << 10;
constexpr int64_t kWeightBytes = kLanes == 16 ? 192 << 10 : 96 << 10;
constexpr int64_t kMostTiles = 48;

// Transforms of kOut results, and of three weights, which become kOut + 2.
template <int kOut>
struct Transform;

// Transformed inputs are at most 4 * 255 and weights 9 * 128, which int16 holds.
template <>
struct Transform<2> {
  static NPU_INLINE void weights(const ShortVec* w, int step, ShortVec* to) {
    const ShortVec ends = w[0] + w[2 * step];
    to[0] = w[0] << 1;
    to[1] = ends + w[step];
    to[2] = ends - w[step];
    to[3] = w[2 * step] << 1;
  }
  static NPU_INLINE void results(const UVec* m, int step, UVec* y) {
    y[0] = m[0] + m[step] + m[2 * step];
    y[1] = m[step] - m[2 * step] - m[3 * step];
  }
  static NPU_INLINE IVec divided(UVec y) { return bit_cast<IVec>(y) >> 2; }
};

// Transformed inputs are at most 68 * 255 and weights 49 * 128.
template <>
struct Transform<4> {
  static NPU_INLINE void weights(const ShortVec* w, int step, ShortVec* to) {
    const ShortVec ends = w[0] + w[2 * step], far = w[0] + (w[2 * step] << 2), twice = w[step] << 1;
    to[0] = w[0];
    to[1] = ends + w[step];
    to[2] = ends - w[step];
    to[3] = far + twice;
    to[4] = far - twice;
    to[5] = w[2 * step];
  }
  static NPU_INLINE void results(const UVec* m, int step, UVec* y) {
    const UVec near = -((m[step] + m[2 * step]) << 2), near_odd = (m[2 * step] - m[step]) << 2;
    const UVec far = m[3 * step] + m[4 * step], far_odd = m[3 * step] - m[4 * step];
    y[0] = m[0] * 6 + near + far;
    y[1] = near_odd + (far_odd << 1);
    y[2] = near + (far << 2);
    y[3] = near_odd + (far_odd << 3) + m[5 * step] * 24;
  }
  static NPU_INLINE IVec divided(UVec y) { return bit_cast<IVec>(y * 0x38e38e39u) >> 6; }  // 9 * 64 = 24 * 24
};

template <int kOut>
struct Tiles {
  static constexpr int kIn = kOut + 2, kPoints = kIn * kIn;
  int64_t high, wide, all;     // tiles of an image, and of all images
  int64_t size, count, parts;  // tiles of a task, tasks that cover them, parts of the panels
  Tiles(const Args& a, int64_t panels)
      : high(divide_up(a.out_h, kOut)), wide(divide_up(a.out_w, kOut)), all(a.batch * high * wide) {
    const int64_t wanted = 8 * num_threads(), bytes = kPoints * a.in_channels * sizeof(int16_t);
    count = divide_up(all, std::clamp<int64_t>(kTileBytes / bytes, kMaxRows, kMostTiles));
    size = divide_up(all, count);
    count = divide_up(all, size);
    parts = count >= wanted ? 1 : std::min(panels, divide_up(wanted, count));
  }
};

// The transformed inputs of a tile: point p at to[p * point_stride].
template <int kOut, class X>
void transform_tile(const Args& a, const X* image, int64_t y, int64_t x, int64_t point_stride, int16_t* to) {
  constexpr int kIn = Tiles<kOut>::kIn, kPoints = Tiles<kOut>::kPoints;
  const int64_t top = kOut * y - a.pad_top, left = kOut * x - a.pad_left, channels = a.in_channels;
  const X* at[kPoints];
  for (int64_t i = 0; i < kPoints; ++i) {
    const int64_t in_y = top + i / kIn, in_x = left + i % kIn;
    const bool inside = in_y >= 0 && in_y < a.in_h && in_x >= 0 && in_x < a.in_w;
    at[i] = inside ? image + (in_y * a.in_w + in_x) * channels : nullptr;
  }
  const ShortVec zero = ShortVec{} + int16_t(a.zero_point);
  for (int64_t c = 0; c < channels; c += 2 * kLanes) {
    ShortVec d[kPoints];
#pragma GCC unroll 36
    for (int i = 0; i < kPoints; ++i) d[i] = at[i] ? widen_bytes(at[i] + c) - zero : ShortVec{};
#pragma GCC unroll 6
    for (int i = 0; i < kIn; ++i) transform_inputs<kOut>(d + i, kIn);
#pragma GCC unroll 6
    for (int i = 0; i < kIn; ++i) transform_inputs<kOut>(d + kIn * i, 1);
#pragma GCC unroll 36
    for (int i = 0; i < kPoints; ++i) std::memcpy(to + i * point_stride + c, &d[i], sizeof(ShortVec));
  }
}

// The transformed weights of a panel: point p, as a panel of `multiply`, at to[p * point_stride]. The weights are, for one
// pair of input channels after the other, nine taps of kPanel output channels' pairs.
template <int kOut>
void transform_weights(const int8_t* weights, int64_t pairs, int64_t point_stride, int16_t* to) {
  constexpr int kIn = Tiles<kOut>::kIn, kWide = 2 * kLanes;
  for (int64_t i = 0; i < pairs; ++i, weights += 9 * 2 * kPanel, to += 2 * kPanel)
    for (int64_t c = 0; c < 2 * kPanel; c += kWide) {
      ShortVec taps[9], columns[3][kIn];
#pragma GCC unroll 9
      for (int t = 0; t < 9; ++t) {
        taps[t] = widen_bytes(weights + t * 2 * kPanel + c);
        if (c == 0) __builtin_prefetch(weights + 4096 + t * 2 * kPanel);
      }
#pragma GCC unroll 3
      for (int x = 0; x < 3; ++x) Transform<kOut>::weights(taps + x, 3, columns[x]);
#pragma GCC unroll 6
      for (int y = 0; y < kIn; ++y) {
        ShortVec points[kIn];
        Transform<kOut>::weights(&columns[0][y], kIn, points);
#pragma GCC unroll 6
        for (int x = 0; x < kIn; ++x) std::memcpy(to + (y * kIn + x) * point_stride + c, &points[x], sizeof(ShortVec));
      }
    }
}

// The results of a tile for each of kPanel channels from the sums of its points, `point_stride` apart: kOut pixels of kOut
// lines, `line_stride` apart.
template <int kOut>
NPU_INLINE void transform_back(const int32_t* sums, int64_t point_stride, int64_t line_stride, int32_t* lines) {
  constexpr int kIn = Tiles<kOut>::kIn;
  for (int64_t c = 0; c < kPanel; c += kLanes) {
    UVec columns[kIn][kOut];
#pragma GCC unroll 6
    for (int x = 0; x < kIn; ++x) {
      UVec points[kIn];
#pragma GCC unroll 6
      for (int y = 0; y < kIn; ++y) points[y] = load_bits<UVec>(sums + (kIn * y + x) * point_stride + c);
      Transform<kOut>::results(points, 1, columns[x]);
    }
#pragma GCC unroll 4
    for (int y = 0; y < kOut; ++y) {
      UVec pixels[kOut];
      Transform<kOut>::results(&columns[0][y], kOut, pixels);
#pragma GCC unroll 4
      for (int x = 0; x < kOut; ++x) {
        const IVec result = Transform<kOut>::divided(pixels[x]);
        std::memcpy(lines + y * line_stride + x * kPanel + c, &result, sizeof(result));
      }
    }
  }
}

template <int kOut, class X>
void convolve_bytes(const Args& a) {
  constexpr int64_t kPoints = Tiles<kOut>::kPoints;
  const int64_t panels = divide_up(a.out_channels, kPanel), channels = a.in_channels, pairs = channels / 2;
  const Tiles<kOut> tiles(a, panels);
  const Finish finish = finish_of(a);
  const int8_t* weights = static_cast<const int8_t*>(a.weight);
  const int64_t most_pairs = std::clamp<int64_t>(kWeightBytes / (kPoints * kPanel * 2 * sizeof(int16_t)), 1, pairs);
  // From point to point: a vector more than there is, since a power of two would put all points into few sets of the cache.
  const int64_t weight_stride = most_pairs * 2 * kPanel + 2 * kLanes, point_stride = tiles.size * channels + 2 * kLanes;
  const int64_t sum_stride = tiles.size * kPanel + kLanes, line_stride = kOut * tiles.size * kPanel;
  parallel_for(tiles.count * tiles.parts, 1, [&](int64_t first, int64_t last, int) {
    const int64_t sums_bytes = kPoints * sum_stride * sizeof(int32_t), lines_bytes = kOut * line_stride * sizeof(int32_t);
    const int64_t points_bytes = kPoints * weight_stride * sizeof(int16_t);
    char* memory = thread_scratch().get<char>(sums_bytes + lines_bytes + points_bytes + kPoints * point_stride * sizeof(int16_t));
    int32_t* sums = reinterpret_cast<int32_t*>(memory);
    int32_t* lines = reinterpret_cast<int32_t*>(memory + sums_bytes);
    int16_t* points = reinterpret_cast<int16_t*>(memory + sums_bytes + lines_bytes);
    int16_t* inputs = reinterpret_cast<int16_t*>(memory + sums_bytes + lines_bytes + points_bytes);
    int64_t transformed = -1;
    for (int64_t task = first; task < last; ++task) {
      const int64_t part = task % tiles.parts, which = task / tiles.parts;
      const int64_t begin = which * tiles.size, end = std::min(begin + tiles.size, tiles.all);
      for (int64_t t = begin; t < end && transformed != which; ++t) {
        const int64_t item = t / (tiles.high * tiles.wide), place = t % (tiles.high * tiles.wide);
        const X* image = reinterpret_cast<const X*>(a.x) + item * a.in_h * a.in_w * channels;
        transform_tile<kOut>(a, image, place / tiles.wide, place % tiles.wide, point_stride,
                             inputs + (t - begin) * channels);
      }
      transformed = which;
      const RowBlocks blocks(end - begin);
      for (int64_t p = panels * part / tiles.parts; p < panels * (part + 1) / tiles.parts; ++p) {
        for (int64_t pair = 0; pair < pairs; pair += most_pairs) {
          const int64_t count = std::min(most_pairs, pairs - pair);
          transform_weights<kOut>(weights + (p * pairs + pair) * 9 * 2 * kPanel, count, weight_stride, points);
          for (int64_t point = 0; point < kPoints; ++point)
            for (int64_t i = 0; i < blocks.count; ++i) {
              const int16_t* x = inputs + point * point_stride + blocks.begin(i) * channels + 2 * pair;
              const int16_t* panel = points + point * weight_stride;
              int32_t* to = sums + point * sum_stride + blocks.begin(i) * kPanel;
              if (pair) multiply(blocks.size(i), kPanel, x, channels, panel, count, nullptr, Added{to});
              else multiply(blocks.size(i), kPanel, x, channels, panel, count, nullptr, to);
            }
        }
        const int64_t channel = p * kPanel, count = std::min(kPanel, a.out_channels - channel);
        for (int64_t t = begin; t < end;) {
          const int64_t line = t / tiles.wide, item = line / tiles.high, y = line % tiles.high * kOut;
          const int64_t next = std::min(end, (line + 1) * tiles.wide), x = t % tiles.wide * kOut;
          for (int64_t i = t; i < next; ++i)
            transform_back<kOut>(sums + (i - begin) * kPanel, sum_stride, line_stride, lines + (i - t) * kOut * kPanel);
          const int64_t pixel = (item * a.out_h + y) * a.out_w + x;
          const int64_t pixels = std::min(kOut * (next - t), a.out_w - x);
          for (int64_t i = 0; i < std::min<int64_t>(kOut, a.out_h - y); ++i)
            finish(a, {lines + i * line_stride, kPanel, pixel + i * a.out_w, pixels, channel, count});
          t = next;
        }
      }
    }
  });
}

template <int kOut>
void convolve_winograd(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) { convolve_bytes<kOut, std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d_winograd2, npu::integer::Args, npu::integer::convolve_winograd<2>)
NPU_KERNEL(integer_conv2d_winograd4, npu::integer::Args, npu::integer::convolve_winograd<4>)
