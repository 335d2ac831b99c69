// Convolution on a matrix unit that reads images where a gathered window would be nine times as large. The lines that a task
// needs are copied once, with their padding. The rows of tiles are neighbouring pixels of that copy, where windows begin, and a
// tap is as far from each of them. Results at the end of a line, whose windows reach into the next one, are dropped.
#pragma once

#include <numeric>

#include "convolutions/channels_last.h"
#include "products/tiles.h"

namespace npu::conv {

// Maximum bytes of copied lines, which stay in L2 beside a panel, and of those that do so beside the images' own lines.
inline constexpr int64_t kLinesBytes = 1 << 20, kNearBytes = 1 << 18;
inline constexpr int64_t kLineElements = 64 / sizeof(bf16);  // of a cache line

// An axis of a padded image as it is copied: places that are a multiple of the stride apart follow each other, in as many
// phases as the taps of windows have.
struct PhasedAxis {
  int64_t in, pad, stride, dilation;
  int64_t phases;
  int64_t reach;  // from a window's first place in a phase to its last

  PhasedAxis(int64_t in, int64_t pad, int64_t kernel, int64_t stride, int64_t dilation)
      : in(in),
        pad(pad),
        stride(stride),
        dilation(dilation),
        phases(std::min(kernel, stride / std::gcd(stride, dilation))),
        reach(shift(kernel - 1)) {}
  int64_t phase(int64_t tap) const { return tap % phases; }
  int64_t shift(int64_t tap) const { return tap * dilation / stride; }
  // Where a phase's place is in the image, or in the padding before or behind it.
  int64_t place(int64_t phase, int64_t number) const { return number * stride + phase * dilation % stride - pad; }
  // The number of places of a phase before that one of the image.
  int64_t places_before(int64_t phase, int64_t limit) const {
    return divide_up(std::max<int64_t>(0, limit - place(phase, 0)), stride);
  }
};

// Lines of an image with the padding around them, one image of them for each pair of phases.
struct PaddedLines {
  const PhasedAxis y, x;
  const int64_t out_w;
  const int64_t width;  // of a line, in pixels
  // Elements from the channels of a group to those of the next, in whole cache lines, and from a pixel to the next: rows of a
  // tile whole KiB apart would share few sets of L1.
  const int64_t group, pixel;

  // With the channels of that many groups, which are copied together.
  PaddedLines(const ChannelsLastArgs& a, int64_t groups)
      : y(a.in_h, a.pad_top, a.kernel_h, a.stride_h, a.dilation_h),
        x(a.in_w, a.pad_left, a.kernel_w, a.stride_w, a.dilation_w),
        out_w(a.out_w),
        width(out_w + x.reach),
        group(round_up(a.channels, kLineElements)),
        pixel(groups * group + (groups * group % 256 ? 0 : kLineElements)) {}
  // Pixels, from one to the next, at which the windows of that many rows of results begin.
  int64_t places(int64_t rows) const { return (rows - 1) * width + out_w; }
  int64_t blocks(int64_t rows) const { return divide_up(places(rows), kTileRows); }
  // Pixels of a pair of phases, and elements of all with those that the last block reads beyond them.
  int64_t plane(int64_t rows) const { return (rows + y.reach) * width; }
  int64_t elements(int64_t rows) const {
    const int64_t last = blocks(rows) * kTileRows + y.reach * width + x.reach;
    return ((y.phases * x.phases - 1) * plane(rows) + last) * pixel;
  }
  int64_t bytes(int64_t rows) const { return elements(rows) * sizeof(bf16); }
  // Elements from the first tap of a window to another one.
  int64_t offset(int64_t rows, int64_t ky, int64_t kx) const {
    const int64_t phase = y.phase(ky) * x.phases + x.phase(kx);
    return (phase * plane(rows) + y.shift(ky) * width + x.shift(kx)) * pixel;
  }
};

// Tiles that follow each other in depth for a number of values of k, and those for all windows' taps.
inline int64_t tiles_deep(int64_t k) { return divide_up(k, 2 * kTileSteps); }
inline int64_t tiles_of_taps(const ChannelsLastArgs& a) { return a.kernel_h * a.kernel_w * tiles_deep(a.channels); }

// Whether tiles can read a's images: where channels are pairs that fill at least half of the tiles, a row's lines are few, and
// at most half of the results are dropped.
inline bool fits_tiles(const ChannelsLastArgs& a) {
  if (a.channels % 2 || a.linear.k != a.kernel_h * a.kernel_w * a.channels) return false;
  if (tiles_of_taps(a) > 2 * tiles_deep(a.linear.k)) return false;
  const PaddedLines lines(a, 1);
  return lines.bytes(1) <= kLinesBytes && lines.blocks(a.out_h) * kTileRows <= 2 * a.out_h * a.out_w;
}

// A task is some rows of an image, or some whole images, and a part of the groups, or of the panels of a single group.
struct TileTasks {
  int64_t items = 1, rows = 1, parts = 1;
  int64_t batches = 1, bands = 1, count = 0;  // of items, of rows, and of tasks
  int64_t slices, groups = 1;                 // what parts are of, and the maximum number of groups in one

  // The split whose tasks would be done first.
  explicit TileTasks(const ChannelsLastArgs& a) {
    const int64_t panels = divide_up(a.linear.n, kPanel);
    slices = a.groups > 1 ? a.groups : panels;
    double least = 0;
    bool near = false;
    const auto try_rows = [&](int64_t some_items, int64_t some_rows) {
      const int64_t some_batches = divide_up(a.batch, some_items), some_bands = divide_up(a.out_h, some_rows);
      const int64_t copies = some_batches * some_bands;
      for (int64_t some = 1;; some = std::min(slices, more(some))) {
        const int64_t together = divide_up(slices, some), some_groups = a.groups > 1 ? together : 1;
        const PaddedLines lines(a, some_groups);
        const int64_t bytes = some_items * lines.bytes(some_rows);
        const bool fits = bytes <= kLinesBytes;
        near = bytes <= kNearBytes;
        const double blocks = some_items * lines.blocks(some_rows), block_cycles = kBlockCycles * tiles_of_taps(a);
        const double of_panel = a.linear.k * kPanel * sizeof(bf16) / kBytesPerCycle + blocks * block_cycles;
        const double of_slice = a.groups > 1 ? panels * of_panel : of_panel;
        const double of_task = bytes / (near ? kBytesPerCycle : kFarBytesPerCycle) + together * of_slice;
        const double cycles = of_task * divide_up(copies * some, num_threads());
        if (fits && (!count || cycles < least)) {
          least = cycles;
          items = some_items, rows = some_rows, parts = some, groups = some_groups;
          batches = some_batches, bands = some_bands, count = copies * some;
        }
        if (some == slices || (fits && copies * some >= 4 * num_threads())) return;
      }
    };
    for (int64_t some = a.batch; some > 1; some /= 2) try_rows(some, a.out_h);
    for (int64_t some = 1;; some = std::min(a.out_h, more(some))) {
      try_rows(1, divide_up(a.out_h, some));
      if (some == a.out_h || (near && a.batch * some >= 4 * num_threads())) return;
    }
  }

 private:
  // Of a block and a tile's depth; and bytes that come from another core's caches or from L3, where L2 holds them and where
  // they push each other out of it.
  static constexpr double kBlockCycles = 64, kBytesPerCycle = 8, kFarBytesPerCycle = 4;

  static int64_t more(int64_t number) { return std::max(number + 1, number * 3 / 2); }
};

// Copies the channels of some groups of a pixel.
NPU_INLINE void copy_pixel(const bf16* from, int64_t groups, int64_t channels, int64_t step, bf16* to) {
  if (channels > kLineElements || sizeof(Vec) != 64) {
    for (int64_t g = 0; g < groups; ++g) copy_elements(from + g * channels, to + g * step, channels);
  } else {
    for (int64_t g = 0; g < groups; ++g) {
      const ByteVec line = load_first(from + g * channels, channels * sizeof(bf16));
      std::memcpy(to + g * step, &line, sizeof line);
    }
  }
}

// Copies the pixels of a line that are of one phase, with its padding.
inline void copy_line(const ChannelsLastArgs& a, const PaddedLines& lines, int64_t groups, const bf16* from, int64_t phase,
                      bf16* to) {
  const int64_t begin = std::min(lines.x.places_before(phase, 0), lines.width);
  const int64_t end = from ? std::min(lines.x.places_before(phase, a.in_w), lines.width) : begin;
  const int64_t channels = groups * a.channels, behind = lines.width - end;
  if (begin) std::memset(to, 0, begin * lines.pixel * sizeof(bf16));
  if (behind) std::memset(to + end * lines.pixel, 0, behind * lines.pixel * sizeof(bf16));
  if (begin == end) return;
  const bf16* pixel = from + lines.x.place(phase, begin) * a.x_pixel_stride;
  bf16* target = to + begin * lines.pixel;
  if (lines.pixel == channels && a.x_pixel_stride == channels && a.stride_w == 1)
    return copy_elements(pixel, target, (end - begin) * channels);
  const bool joined = lines.group == a.channels;
  for (int64_t i = begin; i < end; ++i, pixel += a.stride_w * a.x_pixel_stride, target += lines.pixel)
    joined ? copy_elements(pixel, target, channels) : copy_pixel(pixel, groups, a.channels, lines.group, target);
}

// Copies the lines of an image that some rows of results read, each once for all of its phases.
inline void copy_lines(const ChannelsLastArgs& a, const PaddedLines& lines, int64_t groups, const bf16* image, int64_t row,
                       int64_t rows, bf16* to) {
  for (int64_t phase = 0; phase < lines.y.phases; ++phase)
    for (int64_t i = 0; i < rows + lines.y.reach; ++i) {
      const int64_t y = lines.y.place(phase, row + i);
      const bf16* line = y >= 0 && y < a.in_h ? image + y * a.x_row_stride : nullptr;
      for (int64_t x = 0; x < lines.x.phases; ++x) {
        const int64_t place = (phase * lines.x.phases + x) * lines.plane(rows) + i * lines.width;
        copy_line(a, lines, groups, line, x, to + place * lines.pixel);
      }
    }
}

// Sums of windows that begin at `place` and those behind it, in lines whose first result is that of `pixel` in a layer.
struct PlacedSums {
  const LinearArgs* layer;
  int64_t place, places, pixel, column;
};

// Makes results of the sums, but for those between the lines.
struct FinishPlaced {
  const PaddedLines& lines;
  const Finish finish;

  void operator()(const PlacedSums& block, const float* sums, int64_t first, int64_t last) const {
    const int64_t begin = block.place + first, end = std::min(block.place + last, block.places);
    int64_t y = begin / lines.width, x = begin % lines.width;
    for (int64_t place = begin; place < end; place += lines.width - x, ++y, x = 0) {
      const int64_t count = std::min(lines.out_w - x, end - place), row = block.pixel + y * lines.out_w + x;
      if (count > 0) finish(*block.layer, sums + (place - block.place) * kPanel, row, count, block.column);
    }
  }
};

// The tasks of one thread.
class TileThread {
 public:
  TileThread(const ChannelsLastArgs& a, const PaddedLines& lines, const TileTasks& tasks)
      : a_(a),
        state_(a.channels / 2),
        lines_(lines),
        tasks_(tasks),
        taps_(a.kernel_h * a.kernel_w),
        elements_(lines.elements(tasks.rows)),
        finish_{lines, finish_for(a.linear)},
        sums_(finish_, tiles_of_taps(a)) {
    const int64_t tap_bytes = round_up(taps_ * sizeof(int64_t), 64);
    char* memory = thread_scratch().get<char>(tap_bytes + tasks.items * lines.bytes(tasks.rows));
    offsets_ = reinterpret_cast<int64_t*>(memory);
    copy_ = reinterpret_cast<bf16*>(memory + tap_bytes);
  }

  void run(int64_t task) {
    const int64_t band = task / tasks_.parts, part = task % tasks_.parts, panels = divide_up(a_.linear.n, kPanel);
    const int64_t item = band / tasks_.bands * tasks_.items, items = std::min(tasks_.items, a_.batch - item);
    const int64_t row = band % tasks_.bands * tasks_.rows, rows = std::min(tasks_.rows, a_.out_h - row);
    const int64_t first = tasks_.slices * part / tasks_.parts, last = tasks_.slices * (part + 1) / tasks_.parts;
    const bool grouped = a_.groups > 1;
    const int64_t copied = grouped ? task : band;
    if (copied != copied_) grouped ? copy(item, items, row, rows, first, last - first) : copy(item, items, row, rows, 0, 1);
    copied_ = copied;
    for (int64_t slice = first; slice < last; ++slice) {
      begin_group(grouped ? slice : 0);
      const int64_t first_panel = grouped ? 0 : slice, last_panel = grouped ? panels : slice + 1;
      const bf16* x = copy_ + (grouped ? slice - first : 0) * lines_.group;
      for (int64_t p = first_panel; p < last_panel; ++p)
        for (int64_t i = 0; i < items; ++i)
          multiply(x + i * elements_, p, lines_.places(rows), ((item + i) * a_.out_h + row) * a_.out_w);
    }
  }

 private:
  void begin_group(int64_t group) {
    if (group == group_) return;
    layer_ = layer_ == layers_ ? layers_ + 1 : layers_;  // sums of the other one may wait
    *layer_ = layer_of_group<bf16>(a_, group, 0);
    group_ = group;
  }
  void copy(int64_t item, int64_t items, int64_t row, int64_t rows, int64_t group, int64_t groups) {
    for (int64_t t = 0; t < taps_; ++t) offsets_[t] = lines_.offset(rows, t / a_.kernel_w, t % a_.kernel_w);
    const bf16* x = reinterpret_cast<const bf16*>(a_.linear.x.data) + group * a_.channels;
    for (int64_t i = 0; i < items; ++i)
      copy_lines(a_, lines_, groups, x + (item + i) * a_.x_batch_stride, row, rows, copy_ + i * elements_);
  }
  void multiply(const bf16* x, int64_t panel, int64_t places, int64_t pixel) {
    const bf16* weight = static_cast<const bf16*>(layer_->weight) + panel * layer_->k * kPanel;
    for (int64_t place = 0; place < places; place += kTileRows) {
      multiply_tile_parts(x + place * lines_.pixel, lines_.pixel, offsets_, taps_, weight, a_.channels / 2, sums_.next(),
                          [&]() __attribute__((always_inline)) { sums_.after_product(); });
      sums_.put({layer_, place, places, pixel, panel * kPanel});
    }
  }

  const ChannelsLastArgs& a_;
  [[maybe_unused]] const TileState state_;
  const PaddedLines& lines_;
  const TileTasks& tasks_;
  const int64_t taps_, elements_;
  int64_t* offsets_;
  bf16* copy_;
  int64_t group_ = -1, copied_ = -1;
  LinearArgs layers_[2]{}, *layer_ = layers_;
  const FinishPlaced finish_;
  TileSums<PlacedSums, FinishPlaced> sums_;
};

inline void convolve_tiles(const ChannelsLastArgs& a) {
  const TileTasks tasks(a);
  const PaddedLines lines(a, tasks.groups);
  const int64_t panels = divide_up(a.linear.n, kPanel) * a.groups;
  const int64_t grain = tile_grain(tasks.count, tasks.items * lines.blocks(tasks.rows) * divide_up(panels, tasks.parts));
  parallel_for(tasks.count, grain, [&](int64_t begin, int64_t end, int) {
    TileThread thread(a, lines, tasks);
    for (int64_t task = begin; task < end; ++task) thread.run(task);
  });
}

}  // namespace npu::conv
