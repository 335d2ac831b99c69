// 3x3 convolution with stride 1 by Winograd's minimal filtering, F(4x4, 3x3) or F(2x2, 3x3): overlapping input tiles
// and the weights are transformed, multiplied point by point (one matrix product per point), and transformed back.
//
// The input transform has tiles in the lanes, which writes the products' operand as it wants it. The products have
// output channels in the lanes, and so has the transform back.
#include "conv_epilogue.h"
#include "conv_gemm.h"
#include "planes.h"
#include "pool.h"
#include "scratch.h"

namespace npu::conv {
namespace {

// The one-dimensional transforms; v[i * stride] are the points.
template <int kTile>
struct Winograd;

template <>
struct Winograd<2> {
  static constexpr int kPoints = 4;
  static NPU_INLINE void input(Vec* v, int s) {
    const Vec d0 = v[0], d1 = v[s], d2 = v[2 * s], d3 = v[3 * s];
    v[0] = d0 - d2;
    v[s] = d1 + d2;
    v[2 * s] = d2 - d1;
    v[3 * s] = d1 - d3;
  }
  static NPU_INLINE void output(Vec* v, int s) {
    const Vec m0 = v[0], m1 = v[s], m2 = v[2 * s], m3 = v[3 * s];
    v[0] = m0 + m1 + m2;
    v[s] = m1 - m2 - m3;
  }
};

template <>
struct Winograd<4> {
  static constexpr int kPoints = 6;
  static NPU_INLINE void input(Vec* v, int s) {
    const Vec d0 = v[0], d1 = v[s], d2 = v[2 * s], d3 = v[3 * s], d4 = v[4 * s], d5 = v[5 * s];
    const Vec even = d4 - 4.0f * d2, odd = d3 - 4.0f * d1;
    const Vec even2 = d4 - d2, odd2 = 2.0f * (d3 - d1);
    v[0] = 4.0f * d0 - 5.0f * d2 + d4;
    v[s] = even + odd;
    v[2 * s] = even - odd;
    v[3 * s] = even2 + odd2;
    v[4 * s] = even2 - odd2;
    v[5 * s] = 4.0f * d1 - 5.0f * d3 + d5;
  }
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

// How a band of tile rows is cut into blocks of at most kChannelRows tiles: several whole rows, or part of one.
struct Blocks {
  int64_t rows, columns;           // tiles of the band
  int64_t row_blocks, row_splits;  // row_splits > 1 only where a block is less than a row

  Blocks(int64_t rows, int64_t columns, int64_t pitch) : rows(rows), columns(columns) {
    const int64_t fitting = std::min(kChannelRows / columns, (kLanes - columns) / pitch + 1);
    row_splits = (columns + kChannelRows - 1) / kChannelRows;
    row_blocks = row_splits > 1 ? rows : (rows + fitting - 1) / fitting;
  }
  int64_t count() const { return row_blocks * row_splits; }
};

struct Block {
  int64_t row, column, rows, columns;
  int64_t start;  // tiles in the blocks before

  Block(const Blocks& all, int64_t index) {
    const int64_t r = index / all.row_splits, c = index % all.row_splits;
    row = r * all.rows / all.row_blocks;
    rows = (r + 1) * all.rows / all.row_blocks - row;
    column = c * all.columns / all.row_splits;
    columns = (c + 1) * all.columns / all.row_splits - column;
    start = row * all.columns + column;
  }
  int64_t tiles() const { return rows * columns; }
};

// Keeps the lanes of a block's tiles: `columns` of every `pitch` lanes, `rows` times.
struct Compaction {
  int64_t tiles;
#if defined(NPU_HAS_MASKS)
  __mmask16 mask = 0;
  Compaction(const Block& block, int64_t pitch) : tiles(block.tiles()) {
    for (int64_t row = 0; row < block.rows; ++row) mask |= ((1u << block.columns) - 1) << (row * pitch);
  }
  NPU_INLINE void store(float* to, Vec v) const { store_first(to, _mm512_maskz_compress_ps(mask, v), tiles); }
#else
  int lane[kLanes];
  Compaction(const Block& block, int64_t pitch) : tiles(block.tiles()) {
    for (int64_t i = 0; i < tiles; ++i) lane[i] = i / block.columns * pitch + i % block.columns;
  }
  NPU_INLINE void store(float* to, Vec v) const {
    for (int64_t i = 0; i < tiles; ++i) to[i] = v[lane[i]];
  }
#endif
};

// Transforms one channel of a block of tiles; point p of it goes to to[p * point_stride].
template <int kTile>
void transform_input(const float* phases, const PhaseShape& shape, const Block& block, float* to,
                     int64_t point_stride) {
  constexpr int kPoints = Winograd<kTile>::kPoints;
  const Compaction compact(block, shape.pitch);
  const float* corner = phases + block.row * shape.pitch + block.column;
  Vec v[kPoints * kPoints];
#pragma GCC unroll 6
  for (int y = 0; y < kPoints; ++y) {
#pragma GCC unroll 6
    for (int x = 0; x < kPoints; ++x) v[y * kPoints + x] = load(corner + shape.offset(y, x));
    Winograd<kTile>::input(v + y * kPoints, 1);
  }
#pragma GCC unroll 6
  for (int x = 0; x < kPoints; ++x) {
    Winograd<kTile>::input(v + x, kPoints);
#pragma GCC unroll 6
    for (int y = 0; y < kPoints; ++y) compact.store(to + (y * kPoints + x) * point_stride, v[y * kPoints + x]);
  }
}

// Transforms sixteen channels of one tile back and puts pixel (y, x) at to[y * row_stride + x * kLanes].
template <int kTile>
void transform_output(const float* products, float* to, int64_t row_stride) {
  constexpr int kPoints = Winograd<kTile>::kPoints;
  Vec v[kPoints * kPoints];
#pragma GCC unroll 6
  for (int x = 0; x < kPoints; ++x) {
#pragma GCC unroll 6
    for (int y = 0; y < kPoints; ++y) v[y * kPoints + x] = load(products + (y * kPoints + x) * kLanes);
    Winograd<kTile>::output(v + x, kPoints);
  }
#pragma GCC unroll 4
  for (int y = 0; y < kTile; ++y) {
    Winograd<kTile>::output(v + y * kPoints, 1);
#pragma GCC unroll 4
    for (int x = 0; x < kTile; ++x) store(to + y * row_stride + x * kLanes, v[y * kPoints + x]);
  }
}

template <int kTile>
class Band {
 public:
  static constexpr int kPoints = Winograd<kTile>::kPoints, kProducts = kPoints * kPoints;
  static constexpr int64_t kWide = kChannelVecs * kLanes;
  static constexpr int64_t kTilesPerTask = 42;  // their products stay in the second-level cache

  Band(const ConvArgs& args, int64_t item, int64_t first_tile_row, int64_t tile_rows)
      : a(args), item(item), first(first_tile_row), columns((a.out_w + kTile - 1) / kTile),
        shape{kTile, kTile, tile_rows + 1, columns + 1}, blocks(tile_rows, columns, shape.pitch) {}

  template <class T>
  void transform(const T* x, float* transformed) const {
    const int64_t grain = std::clamp<int64_t>(a.in_channels / (4 * num_threads()), 1, 16);
    parallel_for(a.in_channels, grain, [&](int64_t begin, int64_t end, int) {
      float* memory = thread_scratch().get<float>(shape.floats() * sizeof(float));
      PhasePlanes planes(shape, {a.in_h, a.in_w, a.pad_top, a.pad_left, first * kTile}, 0.0f, memory);
      for (int64_t channel = begin; channel < end; ++channel) {
        planes.set(x + channel * a.in_h * a.in_w);
        for (int64_t i = 0; i < blocks.count(); ++i) {
          const Block block(blocks, i);
          float* to = transformed + block.start * kProducts * a.in_channels + channel * block.tiles();
          transform_input<kTile>(planes.data(), shape, block, to, a.in_channels * block.tiles());
        }
      }
    });
  }

  void multiply(const float* transformed) const {
    const int64_t wides = (a.out_channels + kWide - 1) / kWide;
    const int64_t tiles = blocks.rows * columns;
    const int64_t parts = std::min(blocks.count(), (tiles + kTilesPerTask - 1) / kTilesPerTask);
    parallel_for(wides * parts, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t part = task % parts;
        multiply_part(transformed, task / parts * kWide, part * blocks.count() / parts,
                      (part + 1) * blocks.count() / parts);
      }
    });
  }

 private:
  void multiply_part(const float* transformed, int64_t channel, int64_t first_block, int64_t end_block) const {
    const int64_t channels = std::min(kWide, a.out_channels - channel), vecs = channels > kLanes ? 2 : 1;
    const Block from(blocks, first_block), last(blocks, end_block - 1);
    const int64_t tiles = last.start + last.tiles() - from.start;
    const int64_t tile_floats = vecs * kProducts * kLanes;
    const int64_t row_stride = (columns * kTile + kLanes) * kLanes;
    float* products = thread_scratch().get<float>((tiles * tile_floats + 2 * kTile * row_stride) * sizeof(float));
    const float* weight = a.weight + channel * kProducts * a.in_channels;
    for (int64_t point = 0; point < kProducts; ++point, weight += vecs * kLanes * a.in_channels)
      for (int64_t i = first_block; i < end_block; ++i) {
        const Block block(blocks, i);
        const float* rows = transformed + (block.start * kProducts + point * block.tiles()) * a.in_channels;
        channel_kernel(block.tiles(), vecs)(rows, weight, a.in_channels,
                                            products + (block.start - from.start) * tile_floats + point * kLanes,
                                            tile_floats, kProducts * kLanes);
      }
    float* pixels = products + tiles * tile_floats;
    for (int64_t i = first_block; i < end_block; ++i) {
      const Block block(blocks, i);
      for (int64_t row = 0; row < block.rows; ++row)
        for (int64_t v = 0; v < vecs; ++v) {
          const int64_t start = block.start - from.start + row * block.columns;
          for (int64_t x = 0; x < block.columns; ++x)
            transform_output<kTile>(products + (start + x) * tile_floats + v * kProducts * kLanes,
                                    pixels + x * kTile * kLanes, row_stride);
          write_rows(pixels, row_stride, channel + v * kLanes, first + block.row + row, block);
        }
    }
  }

  // Turns kTile rows of pixels, sixteen channels each, into rows of channels.
  void write_rows(const float* pixels, int64_t row_stride, int64_t channel, int64_t tile_row,
                  const Block& block) const {
    const int64_t x = block.column * kTile, count = std::min(block.columns * kTile, a.out_w - x);
    const int64_t height = std::min<int64_t>(kTile, a.out_h - tile_row * kTile);
    const int64_t channels = std::min<int64_t>(kLanes, a.out_channels - channel);
    float turned[kLanes * kChannelRows * kTile + kLanes * kLanes];
    const int64_t turned_stride = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t i = 0; i < count; i += kLanes)
        transpose(pixels + y * row_stride + i * kLanes, kLanes, turned + i, turned_stride);
      finish(a, item, {turned, turned_stride, channels, count, channel, (tile_row * kTile + y) * a.out_w + x});
    }
  }

  const ConvArgs& a;
  const int64_t item, first, columns;
  const PhaseShape shape;
  const Blocks blocks;
};

template <int kTile, class T>
void run_items(const ConvArgs& a) {
  constexpr int64_t kBandBytes = 4 << 20;  // of transformed input, so that it stays in the last-level cache
  constexpr int64_t kProducts = Winograd<kTile>::kPoints * Winograd<kTile>::kPoints;
  const int64_t tile_rows = (a.out_h + kTile - 1) / kTile, tile_columns = (a.out_w + kTile - 1) / kTile;
  const int64_t row_bytes = tile_columns * kProducts * a.in_channels * sizeof(float);
  const int64_t bands = std::min(tile_rows, (tile_rows * row_bytes + kBandBytes - 1) / kBandBytes);
  const int64_t most_rows = (tile_rows + bands - 1) / bands;
  float* transformed = shared_scratch().get<float>(most_rows * row_bytes);
  for (int64_t item = 0; item < a.batch; ++item) {
    const T* x = reinterpret_cast<const T*>(a.x) + item * a.x_batch_stride;
    for (int64_t i = 0; i < bands; ++i) {
      const int64_t begin = i * tile_rows / bands, end = (i + 1) * tile_rows / bands;
      const Band<kTile> band(a, item, begin, end - begin);
      band.transform(x, transformed);
      band.multiply(transformed);
    }
  }
}

void run(const ConvArgs& a) {
  with_type(a.x_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (a.variant == 2) run_items<2, T>(a);
    else run_items<4, T>(a);
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_winograd, npu::conv::ConvArgs, npu::conv::run)
