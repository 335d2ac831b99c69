// Integer convolution with 3 x 3 taps by Winograd's F(2 x 2, 3 x 3): 16 products instead of 36 for each four pixels.
//
// All of it is exact. The transforms of inputs and results only add and subtract; that of weights is taken four times as
// large, which makes integers of it, and so are the results, until they are shifted. Transformed inputs are at most 4 *
// 255 and weights 9 * 255, which int16 holds. Sums may wrap: what counts is four times the result, which int32 holds
// for as many input channels as integer.py allows.
#include "integer_args.h"
#include "integer_gemm.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

constexpr int64_t kPoints = 16, kTileBytes = 192 << 10;
constexpr int64_t kMostTiles = 48;

struct Tiles {
  int64_t high, wide, all;      // tiles of an image, and of all images
  int64_t size, count, parts;   // tiles of a task, tasks that cover them, parts of the panels
  Tiles(const Args& a, int64_t panels)
      : high(divide_up(a.out_h, 2)), wide(divide_up(a.out_w, 2)), all(a.batch * high * wide) {
    const int64_t threads = num_threads(), bytes = kPoints * a.in_channels * sizeof(int16_t);
    const int64_t fitting = std::clamp<int64_t>(kTileBytes / bytes, kMaxRows, kMostTiles);
    size = std::min(fitting, std::max<int64_t>(2 * kMaxRows, divide_up(all, 2 * threads)));
    count = divide_up(all, std::max<int64_t>(kMaxRows, size / kMaxRows * kMaxRows));
    size = std::min(kMostTiles, round_up(divide_up(all, count), kMaxRows));
    count = divide_up(all, size);
    parts = count >= 2 * threads ? 1 : std::min(panels, divide_up(4 * threads, count));
  }
};

// rows = B' d of four rows, in each lane.
NPU_INLINE void transform(ShortVec* d, int64_t step) {
  const ShortVec a = d[0], b = d[step], c = d[2 * step], e = d[3 * step];
  d[0] = a - c;
  d[step] = b + c;
  d[2 * step] = c - b;
  d[3 * step] = b - e;
}

// The transformed inputs of a tile: point p at to[p * point_stride].
template <class X>
void transform_tile(const Args& a, const X* image, int64_t y, int64_t x, int64_t point_stride, int16_t* to) {
  const int64_t top = 2 * y - a.pad_top, left = 2 * x - a.pad_left, channels = a.in_channels;
  const X* at[kPoints];
  for (int64_t i = 0; i < kPoints; ++i) {
    const int64_t in_y = top + i / 4, in_x = left + i % 4;
    const bool inside = in_y >= 0 && in_y < a.in_h && in_x >= 0 && in_x < a.in_w;
    at[i] = inside ? image + (in_y * a.in_w + in_x) * channels : nullptr;
  }
  const ShortVec zero = ShortVec{} + int16_t(a.zero_point);
  for (int64_t c = 0; c < channels; c += 2 * kLanes) {
    ShortVec d[kPoints];
#pragma GCC unroll 16
    for (int i = 0; i < kPoints; ++i) d[i] = at[i] ? widen_bytes(at[i] + c) - zero : ShortVec{};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) transform(d + i, 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) transform(d + 4 * i, 1);
#pragma GCC unroll 16
    for (int i = 0; i < kPoints; ++i) std::memcpy(to + i * point_stride + c, &d[i], sizeof(ShortVec));
  }
}

// Four results of each of kPanel channels from the sums of 16 points, `point_stride` apart: two pixels of two lines.
NPU_INLINE void transform_back(const int32_t* sums, int64_t point_stride, int32_t* first, int32_t* second) {
  for (int64_t c = 0; c < kPanel; c += kLanes) {
    IVec rows[2][4];
#pragma GCC unroll 4
    for (int x = 0; x < 4; ++x) {
      const auto point = [&](int y) __attribute__((always_inline)) {
        return load_bits<IVec>(sums + (4 * y + x) * point_stride + c);
      };
      const IVec b = point(1), d = point(2);
      rows[0][x] = point(0) + b + d;
      rows[1][x] = b - d - point(3);
    }
#pragma GCC unroll 2
    for (int y = 0; y < 2; ++y) {
      const IVec left = (rows[y][0] + rows[y][1] + rows[y][2]) >> 2, right = (rows[y][1] - rows[y][2] - rows[y][3]) >> 2;
      int32_t* to = (y ? second : first) + c;
      std::memcpy(to, &left, sizeof(left));
      std::memcpy(to + kPanel, &right, sizeof(right));
    }
  }
}

template <class X>
void convolve_bytes(const Args& a) {
  const int64_t panels = divide_up(a.out_channels, kPanel), channels = a.in_channels, pairs = channels / 2;
  const Tiles tiles(a, panels);
  const Finish finish = finish_of(a);
  const int16_t* weights = static_cast<const int16_t*>(a.weight);
  const int64_t point_stride = tiles.size * channels, sum_stride = tiles.size * kPanel;
  parallel_for(tiles.count * tiles.parts, 1, [&](int64_t first, int64_t last, int) {
    const int64_t sums_bytes = kPoints * sum_stride * sizeof(int32_t), lines_bytes = 4 * sum_stride * sizeof(int32_t);
    char* memory = thread_scratch().get<char>(sums_bytes + lines_bytes + kPoints * point_stride * sizeof(int16_t));
    int32_t* sums = reinterpret_cast<int32_t*>(memory);
    int32_t* lines = reinterpret_cast<int32_t*>(memory + sums_bytes);
    int16_t* inputs = reinterpret_cast<int16_t*>(memory + sums_bytes + lines_bytes);
    int64_t transformed = -1;
    for (int64_t task = first; task < last; ++task) {
      const int64_t part = task % tiles.parts, which = task / tiles.parts;
      const int64_t begin = which * tiles.size, end = std::min(begin + tiles.size, tiles.all);
      for (int64_t t = begin; t < end && transformed != which; ++t) {
        const int64_t item = t / (tiles.high * tiles.wide), place = t % (tiles.high * tiles.wide);
        const X* image = reinterpret_cast<const X*>(a.x) + item * a.in_h * a.in_w * channels;
        transform_tile(a, image, place / tiles.wide, place % tiles.wide, point_stride, inputs + (t - begin) * channels);
      }
      transformed = which;
      for (int64_t p = panels * part / tiles.parts; p < panels * (part + 1) / tiles.parts; ++p) {
        for (int64_t point = 0; point < kPoints; ++point) {
          const int16_t* panel = weights + (p * kPoints + point) * channels * kPanel;
          for (int64_t t = 0; t < end - begin; t += kMaxRows)
            multiply(std::min<int64_t>(kMaxRows, end - begin - t), kPanel, inputs + point * point_stride + t * channels,
                     channels, panel, pairs, nullptr, sums + point * sum_stride + t * kPanel);
        }
        const int64_t channel = p * kPanel, count = std::min(kPanel, a.out_channels - channel);
        for (int64_t t = begin; t < end;) {
          const int64_t line = t / tiles.wide, item = line / tiles.high, y = line % tiles.high * 2;
          const int64_t next = std::min(end, (line + 1) * tiles.wide), x = t % tiles.wide * 2;
          int32_t* second = lines + 2 * sum_stride;
          for (int64_t i = t; i < next; ++i)
            transform_back(sums + (i - begin) * kPanel, sum_stride, lines + (i - t) * 2 * kPanel,
                           second + (i - t) * 2 * kPanel);
          const int64_t pixel = (item * a.out_h + y) * a.out_w + x;
          const int64_t pixels = std::min(2 * (next - t), a.out_w - x);
          finish(a, {lines, kPanel, pixel, pixels, channel, count});
          if (y + 1 < a.out_h) finish(a, {second, kPanel, pixel + a.out_w, pixels, channel, count});
          t = next;
        }
      }
    }
  });
}

void convolve_winograd(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) { convolve_bytes<std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d_winograd, npu::integer::Args, npu::integer::convolve_winograd)
