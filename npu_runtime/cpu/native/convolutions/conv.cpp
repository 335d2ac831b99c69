// Convolution as a product of the weights with columns of pixels that are gathered tile by tile, never all at once.
//
// Large maps keep pixels in the vector lanes. Small ones, 7x7 say, would leave lanes idle, so there output channels
// take the lanes and results are transposed on their way out.
#include "convolutions/conv_epilogue.h"
#include "pool.h"
#include "products/gemm.h"
#include "scratch.h"

namespace npu::conv {
namespace {

enum class Variant : int64_t { pixels, channels, tiles };

constexpr int64_t kCopyBytes = 16 << 20;  // of zero-padded inputs

// With pixels in the lanes: what a task's columns may be, so that they stay in L2.
constexpr int64_t kMostPanels = 8, kColumnBytes = 128 << 10;
// With channels in the lanes: blocks of pixels whose results are transposed and finished together.
constexpr int64_t kMostBlocks = 8, kMostPixels = round_up(kMostBlocks * kMaxRows, kLanes);

// Where the columns of some batch items come from: the input itself, or a zero-padded copy of it.
template <class T>
struct Planes {
  const T* data;
  int64_t pitch;
  int64_t size;
  int64_t item_stride;
  int64_t item, items;  // the first one's number, and how many there are

  Planes at(int64_t index) const { return {data + index * item_stride, pitch, size, item_stride, item + index, 1}; }
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
void copy_padded(const ConvArgs& a, const T* x, int64_t items, Copy* to) {
  const int64_t height = padded_h(a), width = padded_w(a), channels = a.groups * a.in_channels;
  const int64_t inside = std::min(a.in_w, width - a.pad_left);
  parallel_for(items * channels, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin * height; row < end * height; ++row) {
      Copy* target = to + row * width;
      const int64_t y = row % height - a.pad_top, channel = row / height;
      std::fill(target, target + width, Copy{});
      if (y < 0 || y >= a.in_h) continue;
      const T* source = x + channel / channels * a.x_batch_stride + (channel % channels * a.in_h + y) * a.in_w;
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
  int total = 0;
  for (int64_t done = 0; done < count; done += moves[total++].count) {
    const int64_t y = (pixel + done) / a.out_w, x = (pixel + done) % a.out_w;
    const int64_t length = std::min({a.out_w - x, count - done, width - done % width, int64_t(kLanes)});
    moves[total] = {y * a.stride_h * planes.pitch + x * a.stride_w, done / width * tile_stride + done % width, length};
  }
  return total;
}

// A range of input channels that begins with an even one, so that no pair of bfloat16 crosses its beginning.
struct Channels {
  int64_t begin, end;
};

// Gathers a step per (input channel, kernel row, kernel column), the order of the packed weights, or per two of these.
template <class W, int kStride, class T>
void pack_columns(const ConvArgs& a, const Planes<T>& planes, int64_t group, Channels channels, const Move* moves,
                  int total, int64_t step_size, float* to) {
  constexpr bool kPairs = Step<W>::kWidth == 2;
  const T* plane = planes.data + (group * a.in_channels + channels.begin) * planes.size;
  const T* first = nullptr;  // of a pair that lacks its second value
  const auto write = [&](const T* corner, const T* second) __attribute__((always_inline)) {
    for (int i = 0; i < total; ++i) {
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
  for (int64_t channel = channels.begin; channel < channels.end; ++channel, plane += planes.size)
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
void pack_columns(const ConvArgs& a, const Planes<T>& planes, int64_t group, Channels channels, const Move* moves,
                  int total, int64_t step_size, float* to) {
  if (a.stride_w == 1) pack_columns<W, 1>(a, planes, group, channels, moves, total, step_size, to);
  else if (a.stride_w == 2) pack_columns<W, 2>(a, planes, group, channels, moves, total, step_size, to);
  else pack_columns<W, 0>(a, planes, group, channels, moves, total, step_size, to);
}

// With pixels in the lanes: a task is some panels of pixels, over which all blocks of channels pass. Where there are too
// few panels for the threads, a task is one panel and a part of the blocks, and what it reads is packed for all of them.
struct PanelTasks {
  int64_t depth, panel_size;      // steps and elements of a panel
  int64_t panels, blocks, parts;  // panels of a task, tasks that cover the pixels, parts of the channels
  int64_t shared_floats;          // of packed columns

  PanelTasks(const ConvArgs& a, int64_t items, int64_t channel_blocks, int64_t depth)
      : depth(depth), panel_size(depth * kPanel + kLanes) {
    const int64_t pixels = a.out_h * a.out_w, threads = num_threads(), images = items * a.groups;
    const int64_t fitting = std::clamp<int64_t>(kColumnBytes / (panel_size * sizeof(float)), 1, kMostPanels);
    panels = std::min(fitting, std::max<int64_t>(1, images * pixels / (kPanel * 8 * threads)));
    blocks = divide_up(pixels, panels * kPanel);
    const bool enough = images * blocks >= 2 * threads;
    parts = enough ? 1 : std::min(channel_blocks, divide_up(4 * threads, images * blocks));
    shared_floats = enough ? 0 : images * blocks * panel_size;
  }
};

template <class W>
PanelTasks panel_tasks(const ConvArgs& a, int64_t items) {
  return {a, items, RowBlocks(a.out_channels).count, steps<W>(a)};
}
PanelTasks tile_tasks(const ConvArgs& a, int64_t items) {
  return {a, items, divide_up(a.out_channels, kTileRows), round_up(steps<bf16>(a), kTileSteps)};
}

// Packs the task's panels, with zeros up to `depth` steps.
template <class W, class T>
void pack_panels(const ConvArgs& a, const Planes<T>& planes, const PanelTasks& tasks, int64_t group, int64_t block,
                 float* columns) {
  const int64_t pixel = block * tasks.panels * kPanel, filled = steps<W>(a) * kPanel;
  const int64_t count = std::min(tasks.panels * kPanel, a.out_h * a.out_w - pixel);
  Move moves[kMostPanels * kPanel];
  const int total = find_moves(a, planes, pixel, count, kPanel, tasks.panel_size, moves);
  pack_columns<W>(a, planes, group, {0, a.in_channels}, moves, total, kPanel, columns);
  for (int64_t p = 0; p < tasks.panels && filled < tasks.depth * kPanel; ++p)
    std::fill(columns + p * tasks.panel_size + filled, columns + (p + 1) * tasks.panel_size, 0.0f);
}

// The same for one panel of each task, by all threads, each a range of channels.
template <class W, class T>
void pack_shared(const ConvArgs& a, const Planes<T>& planes, const PanelTasks& tasks, float* columns) {
  const int64_t taps = a.kernel_h * a.kernel_w, filled = steps<W>(a) * kPanel;
  const int64_t images = planes.items * a.groups;
  const int64_t ranges = std::min(divide_up(a.in_channels, 2), divide_up(4 * num_threads(), images * tasks.blocks));
  parallel_for(images * tasks.blocks * ranges, 1, [&](int64_t begin, int64_t end, int) {
    Move moves[kPanel];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t range = task % ranges, block = task / ranges % tasks.blocks, image = task / ranges / tasks.blocks;
      const auto bound = [&](int64_t i) { return i == ranges ? a.in_channels : a.in_channels * i / ranges / 2 * 2; };
      const Channels channels{bound(range), bound(range + 1)};
      if (channels.begin == channels.end) continue;
      const int64_t count = std::min(kPanel, a.out_h * a.out_w - block * kPanel);
      const int total = find_moves(a, planes, block * kPanel, count, kPanel, tasks.panel_size, moves);
      // Packed elsewhere and copied: what is written beyond the last step belongs to another thread.
      const int64_t first = channels.begin * taps / Step<W>::kWidth;
      const int64_t size = divide_up((channels.end - channels.begin) * taps, Step<W>::kWidth) * kPanel;
      float* own = thread_scratch().get<float>((size + kLanes) * sizeof(float));
      pack_columns<W>(a, planes.at(image / a.groups), image % a.groups, channels, moves, total, kPanel, own);
      float* panel = columns + (image * tasks.blocks + block) * tasks.panel_size;
      std::memcpy(panel + first * kPanel, own, size * sizeof(float));
      if (range == ranges - 1) std::fill(panel + filled, panel + tasks.panel_size, 0.0f);
    }
  });
}

// multiply(item, group, first block of channels, end block, columns, first pixel, pixels)
template <class W, class T, class Multiply>
void for_pixel_panels(const ConvArgs& a, const Planes<T>& planes, int64_t channel_blocks, const PanelTasks& tasks,
                      float* shared, const Multiply& multiply) {
  const int64_t pixels = a.out_h * a.out_w;
  if (tasks.parts > 1) pack_shared<W>(a, planes, tasks, shared);
  parallel_for(planes.items * a.groups * tasks.blocks * tasks.parts, 1, [&](int64_t begin, int64_t end, int) {
    [[maybe_unused]] const TileState state;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % tasks.parts, block = task / tasks.parts % tasks.blocks;
      const int64_t image = task / tasks.parts / tasks.blocks, pixel = block * tasks.panels * kPanel;
      const int64_t item = image / a.groups, group = image % a.groups;
      float* columns;
      if (tasks.parts > 1) {
        columns = shared + (image * tasks.blocks + block) * tasks.panel_size;
      } else {
        columns = thread_scratch().get<float>(tasks.panels * tasks.panel_size * sizeof(float));
        pack_panels<W>(a, planes.at(item), tasks, group, block, columns);
      }
      const int64_t first = channel_blocks * part / tasks.parts, last = channel_blocks * (part + 1) / tasks.parts;
      const int64_t count = std::min(tasks.panels * kPanel, pixels - pixel);
      multiply(planes.item + item, group, first, last, columns, pixel, count);
    }
  });
}

// The first values of a panel's sums: the bias, and the residual of each pixel where there is one.
void begin_with_bias(const ConvArgs& a, int64_t channel, int64_t rows, const float* residual, int64_t row_stride,
                     float* start) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t x = 0; x < kPanel; x += kLanes) {
      const Vec bias = splat(a.bias[channel + r]);
      store(start + r * kPanel + x, residual ? bias + load(residual + r * row_stride + x) : bias);
    }
}

template <class W, class T>
void run_pixel_lanes(const ConvArgs& a, const Planes<T>& planes, float* memory) {
  const RowBlocks blocks(a.out_channels);
  const PanelTasks tasks = panel_tasks<W>(a, planes.items);
  const int64_t depth = tasks.depth, plane = a.out_h * a.out_w;
  const Bounds bounds = bounds_of(a);
  for_pixel_panels<W>(a, planes, blocks.count, tasks, memory,
                      [&](int64_t item, int64_t group, int64_t begin, int64_t end, const float* columns, int64_t pixel,
                          int64_t count) {
    float* out = reinterpret_cast<float*>(a.out) + item * a.out_batch_stride;
    const float* residual = reinterpret_cast<const float*>(a.residual);
    if (residual) residual += item * a.residual_batch_stride;
    float tile[kMaxRows * kMostPanels * kPanel];
    const int64_t row_stride = round_up(count, kPanel);
    const int64_t finished = bounds.suffice ? count / kPanel * kPanel : 0;
    for (int64_t b = begin; b < end; ++b) {
      const float* weight = a.weight + group * a.weight_group_stride + blocks.begin(b) * depth;
      const int64_t channel = group * a.out_channels + blocks.begin(b), rows = blocks.size(b);
      float start[kMaxRows * kPanel];
      Range range{start, kPanel, kLanes, bounds.low, bounds.high};
      for (int64_t x = 0; x < count; x += kPanel) {
        const W* panel = as_operand<W>(columns + x / kPanel * tasks.panel_size);
        if (x < finished) {
          const int64_t at = channel * plane + pixel + x;
          if (x == 0 || residual) begin_with_bias(a, channel, rows, residual ? residual + at : nullptr, plane, start);
          multiply<W>(rows, as_operand<W>(weight), panel, depth, {out + at, plane}, range);
        } else {
          multiply<W>(rows, as_operand<W>(weight), panel, depth, {tile + x, row_stride}, {}, count - x);
        }
      }
      if (finished < count)
        finish(a, item, {tile + finished, row_stride, rows, count - finished, channel, pixel + finished});
    }
  });
}

// On the matrix unit, which reads the weights as they are: rows of bfloat16, padded with zeros to whole tiles.
template <class T>
void run_tiles(const ConvArgs& a, const Planes<T>& planes, float* memory) {
  const PanelTasks tasks = tile_tasks(a, planes.items);
  const int64_t depth = tasks.depth;
  for_pixel_panels<bf16>(a, planes, divide_up(a.out_channels, kTileRows), tasks, memory,
                         [&](int64_t item, int64_t group, int64_t begin, int64_t end, const float* columns,
                             int64_t pixel, int64_t count) {
    alignas(64) float tile[kTileRows * kPanel];
    for (int64_t b = begin; b < end; ++b) {
      const int64_t channel = b * kTileRows, rows = std::min(kTileRows, a.out_channels - channel);
      const float* weight = a.weight + group * a.weight_group_stride + channel * depth;
      for (int64_t p = 0; p * kPanel < count; ++p) {
        const bf16* panel = as_operand<bf16>(columns + p * tasks.panel_size);
        multiply_tiles(as_operand<bf16>(weight), 2 * depth, panel, depth, tile, [] {});
        finish(a, item, {tile, kPanel, rows, std::min(kPanel, count - p * kPanel), group * a.out_channels + channel,
                         pixel + p * kPanel});
      }
    }
  });
}

template <class W, class T>
void run_channel_lanes(const ConvArgs& a, const Planes<T>& planes, float* memory) {
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
        const int total = find_moves(a, planes, blocks.begin(block), count, count, 0, moves);
        pack_columns<W>(a, planes, group, {0, a.in_channels}, moves, total, count, block_at(block));
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
                        {tile + (blocks.begin(b) - pixel) * kPanel}, {}, channels);
          const int64_t count = blocks.begin(next) - pixel;
          for (int64_t x = 0; x < count; x += kLanes)
            for (int64_t c = 0; c < channels; c += kLanes)
              transpose_floats(tile + x * kPanel + c, kPanel, turned + c * kMostPixels + x, kMostPixels);
          finish(a, planes.item, {turned, kMostPixels, channels, count, group * a.out_channels + channel, pixel});
        }
      }
    });
  }
}

template <class W, class T>
void run_planes(const ConvArgs& a, const Planes<T>& planes, float* memory) {
  if constexpr (kHasTiles && std::is_same_v<W, bf16>) {
    if (static_cast<Variant>(a.variant) == Variant::tiles) return run_tiles(a, planes, memory);
  }
  if (static_cast<Variant>(a.variant) == Variant::pixels) return run_pixel_lanes<W>(a, planes, memory);
  for (int64_t item = 0; item < planes.items; ++item) run_channel_lanes<W>(a, planes.at(item), memory);
}

// How many floats of packed columns all threads share.
template <class W>
int64_t shared_floats(const ConvArgs& a, int64_t items) {
  if constexpr (kHasTiles && std::is_same_v<W, bf16>) {
    if (static_cast<Variant>(a.variant) == Variant::tiles) return tile_tasks(a, items).shared_floats;
  }
  if (static_cast<Variant>(a.variant) == Variant::pixels) return panel_tasks<W>(a, items).shared_floats;
  const RowBlocks blocks(a.out_h * a.out_w);
  return blocks.packed_begin(blocks.count, steps<W>(a));
}

// Items go together, as many as have padded copies of kCopyBytes at most.
template <class W, class T>
void run_items(const ConvArgs& a) {
  const bool pads = reads_padding(a);
  const int64_t plane = padded_h(a) * padded_w(a), size = a.groups * a.in_channels * plane;
  const int64_t together = pads ? std::clamp<int64_t>(kCopyBytes / (size * sizeof(W)), 1, a.batch) : a.batch;
  // The last few may have more threads each, and share more.
  const int64_t last = std::max<int64_t>(1, a.batch % together);
  const int64_t columns = std::max(shared_floats<W>(a, together), shared_floats<W>(a, last));
  float* memory = shared_scratch().get<float>(columns * sizeof(float) + (pads ? together * size * sizeof(W) : 0));
  W* copy = reinterpret_cast<W*>(memory + columns);
  for (int64_t item = 0; item < a.batch; item += together) {
    const T* x = reinterpret_cast<const T*>(a.x) + item * a.x_batch_stride;
    const int64_t items = std::min(together, a.batch - item);
    if (pads) {
      copy_padded(a, x, items, copy);
      run_planes<W>(a, Planes<W>{copy, padded_w(a), plane, size, item, items}, memory);
    } else {
      run_planes<W>(a, Planes<T>{x, a.in_w, a.in_h * a.in_w, a.x_batch_stride, item, items}, memory);
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
