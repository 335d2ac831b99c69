// 3x3 convolution with stride 1 by Winograd's minimal filtering, F(4x4, 3x3) or F(2x2, 3x3) (Lavin and Gray, "Fast
// Algorithms for Convolutional Neural Networks", 2015): overlapping input tiles and the weights are transformed,
// multiplied point by point (one matrix product per point), and transformed back. Tiles are in the lanes throughout.
#include "convolutions/conv_epilogue.h"
#include "convolutions/winograd.h"
#include "pool.h"
#include "products/gemm.h"
#include "scratch.h"

namespace npu::conv {
namespace {

// The one-dimensional transforms of results; v[i * s] are the points.
template <int kTile>
struct Winograd;

template <>
struct Winograd<2> {
  static constexpr int kPoints = 4;
  static NPU_INLINE void output(Vec* v, int s) {
    const Vec m0 = v[0], m1 = v[s], m2 = v[2 * s], m3 = v[3 * s];
    v[0] = m0 + m1 + m2;
    v[s] = m1 - m2 - m3;
  }
};

template <>
struct Winograd<4> {
  static constexpr int kPoints = 6;
  static NPU_INLINE void output(Vec* v, int s) {
    const Vec m0 = v[0], m5 = v[5 * s];
    const Vec sum1 = v[s] + v[2 * s], difference1 = v[s] - v[2 * s];
    const Vec sum2 = v[3 * s] + v[4 * s], difference2 = v[3 * s] - v[4 * s];
    v[0] = m0 + sum1 + sum2;
    v[s] = difference1 + 2.0f * difference2;
    v[2 * s] = sum1 + 4.0f * sum2;
    v[3 * s] = difference1 + 8.0f * difference2 + m5;
  }
};

// Pixels of kTile vectors of tiles, one after the other.
template <int kTile>
NPU_INLINE void store_pixels(float* to, const Vec* x) {
  if constexpr (kTile == 2) {
    store(to, zip_low(x[0], x[1]));
    store(to + kLanes, zip_high(x[0], x[1]));
  } else {
    const Vec even[] = {zip_low(x[0], x[2]), zip_high(x[0], x[2])}, odd[] = {zip_low(x[1], x[3]), zip_high(x[1], x[3])};
    for (int half = 0; half < 2; ++half) {
      store(to + 2 * half * kLanes, zip_low(even[half], odd[half]));
      store(to + (2 * half + 1) * kLanes, zip_high(even[half], odd[half]));
    }
  }
}

// The output is cut into strips of whole tile rows. Tiles of a strip are numbered row by row, and its last vector of
// them may be partly empty. Strips are processed in bands whose transformed inputs fit the last-level cache together.
template <int kTile, class T>
class Convolution {
 public:
  static constexpr int kPoints = Winograd<kTile>::kPoints, kProducts = kPoints * kPoints;
  static constexpr int64_t kBandBytes = 4 << 20;
  static constexpr int64_t kTaskPanels = divide_up(48, kPanel), kTaskBlocks = divide_up(32, kMaxRows);  // of products

  explicit Convolution(const ConvArgs& args)
      : a(args), columns(divide_up(a.out_w, kTile)), rows(divide_up(a.out_h, kTile)), blocks(a.out_channels) {
    const int64_t row_bytes = columns * kProducts * a.in_channels * int64_t(sizeof(float));
    item_strips = std::min(rows, divide_up(rows * row_bytes, kBandBytes));
    strip_vecs = divide_up(divide_up(rows, item_strips) * columns, kLanes);
    const int64_t strip_bytes = strip_vecs * kLanes * kProducts * a.in_channels * int64_t(sizeof(float));
    band_strips = std::clamp<int64_t>(kBandBytes / strip_bytes, 1, a.batch * item_strips);
  }

  void run() const {
    const int64_t panels = divide_up(band_strips * strip_vecs, 2);
    float* transformed = shared_scratch().get<float>(panels * panel_floats() * sizeof(float));
    for (int64_t first = 0; first < a.batch * item_strips; first += band_strips) {
      const int64_t strips = std::min(band_strips, a.batch * item_strips - first);
      transform(first, strips, transformed);
      multiply_band(first, strips, transformed);
    }
  }

 private:
  struct Strip {
    int64_t item, first, rows;  // of tiles
  };
  Strip strip_at(int64_t index) const {
    const int64_t part = index % item_strips, first = part * rows / item_strips;
    return {index / item_strips, first, (part + 1) * rows / item_strips - first};
  }
  int64_t panel_floats() const { return kProducts * a.in_channels * kPanel; }

  // A task is one channel of one strip: a padded copy of it is split into planes, one for each row of a tile and column
  // of its window, in which tiles that follow each other are neighbours; from these all points are computed.
  void transform(int64_t first, int64_t strips, float* transformed) const {
    const int64_t channels = a.in_channels, tasks = strips * channels;
    const int64_t grain = std::clamp<int64_t>(tasks / (4 * num_threads()), 1, 16);
    parallel_for(tasks, grain, [&](int64_t begin, int64_t end, int) {
      const int64_t most_rows = divide_up(rows, item_strips);
      const int64_t pitch = columns * kTile + 2 + kTile * kLanes, plane = (most_rows + 1) * columns + kLanes;
      const int64_t height = most_rows * kTile + 2;
      float* padded = thread_scratch().get<float>((height * pitch + kTile * kPoints * plane) * sizeof(float));
      float* planes = padded + height * pitch;
      std::fill(padded, planes + kTile * kPoints * plane, 0.0f);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t index = task / channels, channel = task % channels;
        const Strip strip = strip_at(first + index);
        copy_padded(strip, channel, padded, pitch);
        for (int64_t y = 0; y < strip.rows * kTile + 2; ++y)
          for (int64_t x = 0; x < kPoints; ++x) {
            float* to = planes + (y % kTile * kPoints + x) * plane + y / kTile * columns;
            const float* from = padded + y * pitch + x;
            for (int64_t c = 0; c < columns; c += kLanes)  // what is written beyond a row, the next row overwrites
              store(to + c, load_strided<kTile>(from + c * kTile, kTile, kLanes));
          }
        for (int64_t v = 0; v * kLanes < strip.rows * columns; ++v) {
          const int64_t vec = index * strip_vecs + v;
          transform_tiles(planes + v * kLanes, plane,
                          transformed + vec / 2 * panel_floats() + channel * kPanel + vec % 2 * kLanes);
        }
      }
    });
  }

  void copy_padded(const Strip& strip, int64_t channel, float* padded, int64_t pitch) const {
    const T* input = reinterpret_cast<const T*>(a.x) + strip.item * a.x_batch_stride + channel * a.in_h * a.in_w;
    const int64_t inside = std::min(a.in_w, columns * kTile + 2 - a.pad_left);
    for (int64_t row = 0; row < strip.rows * kTile + 2; ++row) {
      const int64_t y = strip.first * kTile + row - a.pad_top;
      float* to = padded + row * pitch;
      if (y < 0 || y >= a.in_h) {
        std::fill(to, to + pitch, 0.0f);
        continue;
      }
      const T* from = input + y * a.in_w;
      for (int64_t x = 0; x < inside; x += kLanes) store(to + a.pad_left + x, load_n(from + x, inside - x));
    }
  }

  // Transforms kLanes tiles; point p goes to to[p * in_channels * kPanel].
  void transform_tiles(const float* planes, int64_t plane, float* to) const {
    Vec v[kProducts];
#pragma GCC unroll 6
    for (int y = 0; y < kPoints; ++y) {
#pragma GCC unroll 6
      for (int x = 0; x < kPoints; ++x)
        v[y * kPoints + x] = load(planes + (y % kTile * kPoints + x) * plane + y / kTile * columns);
      transform_inputs<kTile>(v + y * kPoints, 1);
    }
#pragma GCC unroll 6
    for (int x = 0; x < kPoints; ++x) {
      transform_inputs<kTile>(v + x, kPoints);
#pragma GCC unroll 6
      for (int y = 0; y < kPoints; ++y) store(to + (y * kPoints + x) * a.in_channels * kPanel, v[y * kPoints + x]);
    }
  }

  // A task is some panels of tiles and some blocks of output channels.
  void multiply_band(int64_t first, int64_t strips, const float* transformed) const {
    const int64_t panels = divide_up(strips * strip_vecs, 2), panel_tasks = divide_up(panels, kTaskPanels);
    const int64_t for_balance = divide_up(8 * num_threads(), panel_tasks);
    const int64_t block_tasks = std::min(blocks.count, std::max(divide_up(blocks.count, kTaskBlocks), for_balance));
    parallel_for(panel_tasks * block_tasks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t p = task % panel_tasks, b = task / panel_tasks;
        multiply_part(first, strips, transformed, p * panels / panel_tasks, (p + 1) * panels / panel_tasks,
                      b * blocks.count / block_tasks, (b + 1) * blocks.count / block_tasks);
      }
    });
  }

  void multiply_part(int64_t first, int64_t strips, const float* transformed, int64_t panel, int64_t end_panel,
                     int64_t block, int64_t end_block) const {
    const int64_t channel = blocks.begin(block), channels = blocks.begin(end_block) - channel;
    const int64_t tiles = (end_panel - panel) * kPanel, row_stride = kTile * tiles * kTile;
    const int64_t product_floats = kProducts * channels * tiles, pixel_floats = kMaxRows * row_stride + kLanes;
    float* products = thread_scratch().get<float>((product_floats + pixel_floats) * sizeof(float));
    float* pixels = products + product_floats;
    for (int64_t point = 0; point < kProducts; ++point)
      for (int64_t b = block; b < end_block; ++b) {
        const float* weight = a.weight + (blocks.begin(b) * kProducts + point * blocks.size(b)) * a.in_channels;
        float* sums = products + (point * channels + blocks.begin(b) - channel) * tiles;
        for (int64_t p = panel; p < end_panel; ++p) {
          const int64_t columns = std::min(kPanel, (strips * strip_vecs - 2 * p) * kLanes);
          multiply<float>(blocks.size(b), weight, transformed + p * panel_floats() + point * a.in_channels * kPanel,
                          a.in_channels, {sums + (p - panel) * kPanel, tiles}, {}, columns);
        }
      }
    const int64_t first_vec = panel * 2, end_vec = std::min(end_panel * 2, strips * strip_vecs);
    for (int64_t b = block; b < end_block; ++b) {
      for (int64_t row = 0; row < blocks.size(b); ++row)
        for (int64_t v = 0; v < end_vec - first_vec; ++v)
          transform_back(products + (blocks.begin(b) - channel + row) * tiles + v * kLanes, channels * tiles,
                         pixels + row * row_stride + v * kLanes * kTile, tiles * kTile);
      for (int64_t s = first_vec / strip_vecs; s * strip_vecs < end_vec; ++s)
        write_strip(strip_at(first + s), s * strip_vecs - first_vec, end_vec - first_vec, pixels, tiles * kTile, b);
    }
  }

  // Transforms kLanes tiles of one channel back; pixel row y of them goes to to[y * row_stride].
  void transform_back(const float* products, int64_t point_stride, float* to, int64_t row_stride) const {
    Vec v[kProducts];
#pragma GCC unroll 6
    for (int x = 0; x < kPoints; ++x) {
#pragma GCC unroll 6
      for (int y = 0; y < kPoints; ++y) v[y * kPoints + x] = load(products + (y * kPoints + x) * point_stride);
      Winograd<kTile>::output(v + x, kPoints);
    }
#pragma GCC unroll 4
    for (int y = 0; y < kTile; ++y) {
      Winograd<kTile>::output(v + y * kPoints, 1);
      store_pixels<kTile>(to + y * row_stride, v + y * kPoints);
    }
  }

  // Writes what the vectors [0, vecs) of `pixels` hold of a strip whose first vector is number `strip_vec`, which may be
  // negative, for one block of channels.
  void write_strip(const Strip& strip, int64_t strip_vec, int64_t vecs, const float* pixels, int64_t pitch,
                   int64_t block) const {
    const int64_t origin = strip_vec * kLanes, from = std::max<int64_t>(0, -origin);
    const int64_t end = std::min(strip.rows * columns, vecs * kLanes - origin);
    for (int64_t tile = from; tile < end;) {
      const int64_t row = tile / columns, column = tile % columns, count = std::min(columns - column, end - tile);
      const int64_t x = column * kTile, width = std::min(count * kTile, a.out_w - x);
      for (int64_t y = 0; y < kTile && (strip.first + row) * kTile + y < a.out_h; ++y)
        finish(a, strip.item,
               {pixels + y * pitch + (origin + tile) * kTile, kTile * pitch, blocks.size(block), width,
                blocks.begin(block), ((strip.first + row) * kTile + y) * a.out_w + x});
      tile += count;
    }
  }

  const ConvArgs& a;
  const int64_t columns, rows;  // of tiles
  const RowBlocks blocks;       // of output channels
  int64_t item_strips, strip_vecs, band_strips;
};

void convolve_winograd(const ConvArgs& a) {
  with_type(a.x_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (a.variant == 2) Convolution<2, T>(a).run();
    else Convolution<4, T>(a).run();
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_winograd, npu::conv::ConvArgs, npu::conv::convolve_winograd)
