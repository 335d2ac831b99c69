// Convolution as a product of the weights with columns of pixels that are gathered tile by tile, never all at once.
//
// Large maps keep pixels in the vector lanes. Small ones, 7x7 say, would leave lanes idle, so there output channels
// take the lanes and results are transposed on their way out.
#include "conv_epilogue.h"
#include "gemm.h"
#include "pool.h"
#include "scratch.h"

namespace npu::conv {
namespace {

enum class Variant : int64_t { pixels, channels, tiles };

// With pixels in the lanes: what a task's columns may be, so that they stay in L2.
constexpr int64_t kMostPanels = 8, kColumnBytes = 128 << 10;
// With channels in the lanes: blocks of pixels whose results are transposed and finished together.
constexpr int64_t kMostBlocks = 8, kMostPixels = round_up(kMostBlocks * kMaxRows, kLanes);

// Where the columns of one batch item come from: the input itself, or a zero-padded copy of it.
template <class T>
struct Planes {
  const T* data;
  int64_t pitch;
  int64_t size;
};

int64_t extent(int64_t out, int64_t stride, int64_t kernel, int64_t dilation) {
  return (out - 1) * stride + (kernel - 1) * dilation + 1;
}
int64_t padded_h(const ConvArgs& a) { return extent(a.out_h, a.stride_h, a.kernel_h, a.dilation_h); }
int64_t padded_w(const ConvArgs& a) { return extent(a.out_w, a.stride_w, a.kernel_w, a.dilation_w); }

bool reads_padding(const ConvArgs& a) {
  return a.pad_top || a.pad_left || padded_h(a) > a.in_h || padded_w(a) > a.in_w;
}

// W is the type of both packed operands: floats, or bfloat16 in pairs of consecutive depth, the first in the low half.
// An element of either is four bytes, so everything that moves elements treats them as floats.
template <class W>
int64_t steps(const ConvArgs& a) {
  return divide_up(a.in_channels * a.kernel_h * a.kernel_w, Step<W>::kWidth);
}
template <class W>
const W* as_operand(const float* elements) {
  return reinterpret_cast<const W*>(elements);
}

template <class T, class Copy>
void copy_padded(const ConvArgs& a, const T* item, Copy* to) {
  const int64_t height = padded_h(a), width = padded_w(a);
  const int64_t inside = std::min(a.in_w, width - a.pad_left);
  parallel_for(a.groups * a.in_channels, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin * height; row < end * height; ++row) {
      Copy* target = to + row * width;
      const int64_t y = row % height - a.pad_top;
      std::fill(target, target + width, Copy{});
      if (y < 0 || y >= a.in_h) continue;
      const T* source = item + (row / height * a.in_h + y) * a.in_w;
      for (int64_t x = 0; x < inside; x += kLanes)
        store_n(target + a.pad_left + x, load_n(source + x, inside - x), inside - x);
    }
  });
}

// Up to kLanes neighbouring pixels of one output row: the first reads `source` elements into a plane, and goes to
// element `target` of a step. Whole vectors are written: what a move writes beyond its pixels the following move, or the
// next step, overwrites, and packed operands have room for a vector after their last element.
struct Move {
  int64_t source, target, count;
};

// The moves of `count` pixels from `pixel` on into tiles of `width` pixels, `tile_stride` elements apart.
template <class T>
int find_moves(const ConvArgs& a, const Planes<T>& planes, int64_t pixel, int64_t count, int64_t width,
               int64_t tile_stride, Move* moves) {
  int found = 0;
  for (int64_t done = 0; done < count; done += moves[found++].count) {
    const int64_t y = (pixel + done) / a.out_w, x = (pixel + done) % a.out_w;
    const int64_t length = std::min({a.out_w - x, count - done, width - done % width, int64_t(kLanes)});
    moves[found] = {y * a.stride_h * planes.pitch + x * a.stride_w, done / width * tile_stride + done % width, length};
  }
  return found;
}

// Gathers a step per (input channel, kernel row, kernel column), the order of the packed weights, or per two of these.
template <class W, int kStride, class T>
void pack_columns(const ConvArgs& a, const Planes<T>& planes, int64_t group, const Move* moves, int found,
                  int64_t step_size, float* to) {
  constexpr bool kPairs = Step<W>::kWidth == 2;
  const T* plane = planes.data + group * a.in_channels * planes.size;
  const T* first = nullptr;  // of a pair that lacks its second value
  const auto write = [&](const T* corner, const T* second) __attribute__((always_inline)) {
    for (int i = 0; i < found; ++i) {
      const Move& move = moves[i];
      Vec v = load_strided<kStride>(corner + move.source, a.stride_w, move.count);
      if constexpr (kPairs) {
        const Vec w = second ? load_strided<kStride>(second + move.source, a.stride_w, move.count) : Vec{};
        v = bit_cast<Vec>(bit_cast<UVec>(v) >> 16 | bit_cast<UVec>(w));
      }
      store(to + move.target, v);
    }
    to += step_size;
  };
  for (int64_t channel = 0; channel < a.in_channels; ++channel, plane += planes.size)
    for (int64_t ky = 0; ky < a.kernel_h; ++ky)
      for (int64_t kx = 0; kx < a.kernel_w; ++kx) {
        const T* corner = plane + ky * a.dilation_h * planes.pitch + kx * a.dilation_w;
        if (kPairs && !first) {
          first = corner;
          continue;
        }
        write(kPairs ? first : corner, corner);
        first = nullptr;
      }
  if (first) write(first, nullptr);
}

template <class W, class T>
void pack_columns(const ConvArgs& a, const Planes<T>& planes, int64_t group, const Move* moves, int found,
                  int64_t step_size, float* to) {
  if (a.stride_w == 1) pack_columns<W, 1>(a, planes, group, moves, found, step_size, to);
  else if (a.stride_w == 2) pack_columns<W, 2>(a, planes, group, moves, found, step_size, to);
  else pack_columns<W, 0>(a, planes, group, moves, found, step_size, to);
}

// Pixels in the lanes. A task is some panels of pixels, over which all blocks of channels pass, or a part of them where
// there are few panels: multiply(group, first block, end block, columns, panel size, first pixel, pixels). Panels are
// padded with zeros to `depth` steps.
template <class W, class T, class Multiply>
void for_pixel_panels(const ConvArgs& a, const Planes<T>& planes, int64_t channel_blocks, int64_t depth,
                      const Multiply& multiply) {
  const int64_t pixels = a.out_h * a.out_w, panel_size = depth * kPanel + kLanes, filled = steps<W>(a) * kPanel;
  const int64_t fitting = std::clamp<int64_t>(kColumnBytes / (panel_size * sizeof(float)), 1, kMostPanels);
  const int64_t for_balance = std::max<int64_t>(1, a.groups * pixels / (kPanel * 8 * num_threads()));
  const int64_t panels = std::min(fitting, for_balance), block = panels * kPanel;
  const int64_t blocks = divide_up(pixels, block);
  const int64_t parts = std::min(channel_blocks, divide_up(2 * num_threads(), a.groups * blocks));
  parallel_for(a.groups * blocks * parts, 1, [&](int64_t begin, int64_t end, int) {
    [[maybe_unused]] const TileState state;
    float* columns = thread_scratch().get<float>(panels * panel_size * sizeof(float));
    Move moves[kMostPanels * kPanel];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % parts, group = task / parts / blocks, pixel = task / parts % blocks * block;
      const int64_t count = std::min(block, pixels - pixel);
      const int found = find_moves(a, planes, pixel, count, kPanel, panel_size, moves);
      pack_columns<W>(a, planes, group, moves, found, kPanel, columns);
      for (int64_t p = 0; p < panels && filled < depth * kPanel; ++p)
        std::fill(columns + p * panel_size + filled, columns + (p + 1) * panel_size, 0.0f);
      multiply(group, channel_blocks * part / parts, channel_blocks * (part + 1) / parts, columns, panel_size, pixel,
               count);
    }
  });
}

template <class W, class T>
void run_pixel_lanes(const ConvArgs& a, const Planes<T>& planes, int64_t item) {
  const RowBlocks blocks(a.out_channels);
  const int64_t depth = steps<W>(a), plane = a.out_h * a.out_w;
  const Bounds bounds = bounds_of(a);
  float* out = reinterpret_cast<float*>(a.out) + item * a.out_batch_stride;
  for_pixel_panels<W>(a, planes, blocks.count, depth,
                      [&](int64_t group, int64_t begin, int64_t end, const float* columns, int64_t panel_size,
                          int64_t pixel, int64_t count) {
    float tile[kMaxRows * kMostPanels * kPanel];
    const int64_t row_stride = round_up(count, kPanel);
    const int64_t finished = bounds.suffice ? count / kPanel * kPanel : 0;
    for (int64_t b = begin; b < end; ++b) {
      const float* weight = a.weight + group * a.weight_group_stride + blocks.begin(b) * depth;
      const int64_t channel = group * a.out_channels + blocks.begin(b), rows = blocks.size(b);
      float bias[kMaxRows * kLanes];
      for (int64_t r = 0; r < rows; ++r) store(bias + r * kLanes, splat(a.bias[channel + r]));
      for (int64_t x = 0; x < count; x += kPanel) {
        const W* panel = as_operand<W>(columns + x / kPanel * panel_size);
        if (x < finished)
          multiply<W>(rows, as_operand<W>(weight), panel, depth, {out + channel * plane + pixel + x, plane},
                      {bias, kLanes, 0, bounds.low, bounds.high});
        else
          multiply<W>(rows, as_operand<W>(weight), panel, depth, {tile + x, row_stride}, {},
                      count - x > kLanes ? 2 : 1);
      }
      if (finished < count)
        finish(a, item, {tile + finished, row_stride, rows, count - finished, channel, pixel + finished});
    }
  });
}

// On the matrix unit, which reads the weights as they are: rows of bfloat16, padded with zeros to whole tiles.
template <class T>
void run_tiles(const ConvArgs& a, const Planes<T>& planes, int64_t item) {
  const int64_t blocks = divide_up(a.out_channels, kTileRows), depth = round_up(steps<bf16>(a), kTileSteps);
  for_pixel_panels<bf16>(a, planes, blocks, depth,
                         [&](int64_t group, int64_t begin, int64_t end, const float* columns, int64_t panel_size,
                             int64_t pixel, int64_t count) {
    alignas(64) float tile[kTileRows * kPanel];
    for (int64_t b = begin; b < end; ++b) {
      const int64_t channel = b * kTileRows, rows = std::min(kTileRows, a.out_channels - channel);
      const float* weight = a.weight + group * a.weight_group_stride + channel * depth;
      for (int64_t p = 0; p * kPanel < count; ++p) {
        multiply_tiles(as_operand<bf16>(weight), 2 * depth, as_operand<bf16>(columns + p * panel_size), depth, tile);
        finish(a, item, {tile, kPanel, rows, std::min(kPanel, count - p * kPanel), group * a.out_channels + channel,
                         pixel + p * kPanel});
      }
    }
  });
}

template <class W, class T>
void run_channel_lanes(const ConvArgs& a, const Planes<T>& planes, int64_t item, float* memory) {
  const int64_t depth = steps<W>(a), pixels = a.out_h * a.out_w;
  const int64_t panels = divide_up(a.out_channels, kPanel);
  const RowBlocks blocks(pixels);
  const auto block_at = [&](int64_t block) { return memory + blocks.packed_begin(block, depth); };
  // A few tasks per thread even out the ends; more would only reload weights.
  const int64_t parts = std::min(blocks.count, std::max<int64_t>(1, 4 * num_threads() / panels));
  for (int64_t group = 0; group < a.groups; ++group) {
    parallel_for(blocks.count, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t count = blocks.size(block);
        Move moves[kMaxRows];
        const int found = find_moves(a, planes, blocks.begin(block), count, count, 0, moves);
        pack_columns<W>(a, planes, group, moves, found, count, block_at(block));
      }
    });
    parallel_for(panels * parts, 1, [&](int64_t begin, int64_t end, int) {
      float tile[kMostPixels * kPanel], turned[kPanel * kMostPixels];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t channel = task / parts * kPanel, part = task % parts;
        const int64_t channels = std::min(kPanel, a.out_channels - channel);
        const float* weight = a.weight + group * a.weight_group_stride + channel * depth;
        const int64_t last = (part + 1) * blocks.count / parts;
        for (int64_t first = part * blocks.count / parts; first < last; first += kMostBlocks) {
          const int64_t next = std::min(first + kMostBlocks, last), pixel = blocks.begin(first);
          for (int64_t b = first; b < next; ++b)
            multiply<W>(blocks.size(b), as_operand<W>(block_at(b)), as_operand<W>(weight), depth,
                        {tile + (blocks.begin(b) - pixel) * kPanel}, {}, channels > kLanes ? 2 : 1);
          const int64_t count = blocks.begin(next) - pixel;
          for (int64_t x = 0; x < count; x += kLanes)
            for (int64_t c = 0; c < channels; c += kLanes)
              transpose_floats(tile + x * kPanel + c, kPanel, turned + c * kMostPixels + x, kMostPixels);
          finish(a, item, {turned, kMostPixels, channels, count, group * a.out_channels + channel, pixel});
        }
      }
    });
  }
}

template <class W, class T>
void run_planes(const ConvArgs& a, const Planes<T>& planes, int64_t item, float* memory) {
  if constexpr (kHasTiles && std::is_same_v<W, bf16>) {
    if (static_cast<Variant>(a.variant) == Variant::tiles) return run_tiles(a, planes, item);
  }
  if (static_cast<Variant>(a.variant) == Variant::pixels) run_pixel_lanes<W>(a, planes, item);
  else run_channel_lanes<W>(a, planes, item, memory);
}

template <class W, class T>
void run_items(const ConvArgs& a) {
  const RowBlocks blocks(a.out_h * a.out_w);
  const bool channel_lanes = static_cast<Variant>(a.variant) == Variant::channels;
  const int64_t columns = channel_lanes ? blocks.packed_begin(blocks.count, steps<W>(a)) : 0;
  const bool pads = reads_padding(a);
  const int64_t plane = padded_h(a) * padded_w(a);
  const int64_t copied = pads ? a.groups * a.in_channels * plane : 0;
  float* memory = shared_scratch().get<float>(columns * sizeof(float) + copied * sizeof(W));
  W* copy = reinterpret_cast<W*>(memory + columns);
  for (int64_t item = 0; item < a.batch; ++item) {
    const T* x = reinterpret_cast<const T*>(a.x) + item * a.x_batch_stride;
    if (pads) {
      copy_padded(a, x, copy);
      run_planes<W>(a, Planes<W>{copy, padded_w(a), plane}, item, memory);
    } else {
      run_planes<W>(a, Planes<T>{x, a.in_w, a.in_h * a.in_w}, item, memory);
    }
  }
}

void convolve(const ConvArgs& a) {
  if constexpr (kHasPairs) {
    if (a.pairs) return run_items<bf16, bf16>(a);
  }
  with_type(a.x_type, [&](auto* type) { run_items<float, std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d, npu::conv::ConvArgs, npu::conv::convolve)
