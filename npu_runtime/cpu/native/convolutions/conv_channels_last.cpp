// Convolution as a product of windows with the weight of a linear layer. Windows are multiplied where they are, a part of the
// product for each of their pixels inside the image; or a matrix unit reads them so; or they are gathered some pixels at a time.
#include "convolutions/conv_tiles.h"
#include "convolutions/stretches.h"

namespace npu::conv {
namespace {

constexpr int64_t kBlockBytes = 512 << 10;  // of gathered windows, which should stay in L2
constexpr int64_t kCopiedBytes = 512;  // of a pixel: channels of as many groups as fit are copied together
// Of images whose windows are multiplied where they are, which should too.
constexpr int64_t kBandBytes = kLanes == 16 ? 448 << 10 : 256 << 10;
// Of a panel, which is read anew for every few pixels: from L2, or from L1 where these are few rows of short vectors.
constexpr int64_t kPanelBytes = kLanes == 16 ? 320 << 10 : 32 << 10;

// The windows of `count` pixels from `pixel` on, one row of k elements each. Those beyond a window stay as they are.
template <class T>
void gather(const ChannelsLastArgs& a, const T* x, int64_t pixel, int64_t count, T* row) {
  const int64_t pitch = a.linear.k, line = a.kernel_w * a.channels;
  const bool joined = a.dilation_w == 1 && a.x_pixel_stride == a.channels;  // a window's row, which only one group has
  const bool even = a.x_row_stride == a.in_w * a.x_pixel_stride &&
                    (a.batch == 1 || a.x_batch_stride == a.in_h * a.x_row_stride);
  const bool unmoved = a.kernel_h * a.kernel_w * a.stride_h * a.stride_w == 1;
  if (even && unmoved && a.in_h == a.out_h && a.in_w == a.out_w) {
    const T* from = x + pixel * a.x_pixel_stride;
    for (; count; --count, from += a.x_pixel_stride, row += pitch) copy_elements(from, row, a.channels);
    return;
  }
  int64_t ox = pixel % a.out_w, oy = pixel / a.out_w % a.out_h, item = pixel / a.out_w / a.out_h;
  for (; count; --count, row += pitch, ++ox) {
    if (ox == a.out_w) {
      ox = 0;
      if (++oy == a.out_h) oy = 0, ++item;
    }
    const int64_t left = ox * a.stride_w - a.pad_left, top = oy * a.stride_h - a.pad_top;
    const bool inside = joined && left >= 0 && left + a.kernel_w <= a.in_w;
    T* part = row;
    for (int64_t ky = 0; ky < a.kernel_h; ++ky, part += line) {
      const int64_t y = top + ky * a.dilation_h;
      if (y < 0 || y >= a.in_h) {
        std::fill(part, part + line, T{});
        continue;
      }
      const T* from = x + item * a.x_batch_stride + y * a.x_row_stride;
      if (inside) {
        copy_elements(from + left * a.x_pixel_stride, part, line);
        continue;
      }
      for (int64_t kx = 0; kx < a.kernel_w; ++kx) {
        const int64_t column = left + kx * a.dilation_w;
        T* tap = part + kx * a.channels;
        if (column < 0 || column >= a.in_w) std::fill(tap, tap + a.channels, T{});
        else copy_elements(from + column * a.x_pixel_stride, tap, a.channels);
      }
    }
  }
}

// The split of all pixels into blocks whose windows are multiplied at once. Each block reads the whole weight, and has enough
// pixels for the matrix unit.
struct PixelBlocks {
  int64_t pixels, rows, count;

  PixelBlocks(int64_t pixels, int64_t window_bytes) : pixels(pixels) {
    const int64_t fitting = std::max(kBlockBytes / window_bytes, 2 * kTileRows);
    const int64_t least = num_threads() > 1 ? std::min<int64_t>(2 * num_threads(), pixels / kMaxTaskRows) : 1;
    const int64_t blocks = std::max<int64_t>({1, least, divide_up(pixels, fitting)});
    rows = round_up(divide_up(pixels, blocks), kTileRows);
    count = std::max<int64_t>(1, (pixels + rows - kTileRows) / rows);
  }
  int64_t begin(int64_t block) const { return block * rows; }
  int64_t size(int64_t block) const { return block + 1 == count ? pixels - begin(block) : rows; }
};

// The product of the windows of `count` pixels from `first` on, gathered before, with a group's weight.
template <class T>
void multiply_windows(const ChannelsLastArgs& a, int64_t group, int64_t first, int64_t count, T* windows) {
  LinearArgs part = layer_of_group<T>(a, group, first);
  part.x.data = reinterpret_cast<char*>(windows);
  for (View* view : {&part.x, &part.residual, &part.out}) view->size[2] = count;
  linear(part);
}

// All windows at once. The threads share their gathering and then the product.
template <class T>
void convolve_together(const ChannelsLastArgs& a) {
  const T* x = reinterpret_cast<const T*>(a.linear.x.data);
  const int64_t pixels = a.batch * a.out_h * a.out_w, pitch = a.linear.k;
  T* windows = operand_scratch().get<T>(pixels * pitch * sizeof(T));
  const bool padded = a.kernel_h * a.kernel_w * a.channels < pitch;
  for (int64_t group = 0; group < a.groups; ++group) {
    parallel_for(pixels, rows_in_chunk(pixels, pitch), [&](int64_t begin, int64_t end, int) {
      T* rows = windows + begin * pitch;
      if (padded && group == 0) std::memset(rows, 0, (end - begin) * pitch * sizeof(T));
      gather(a, x + group * a.channels, begin, end - begin, rows);
    });
    multiply_windows(a, group, 0, pixels, windows);
  }
}

template <class T>
void convolve_images(const ChannelsLastArgs& a) {
  const T* x = reinterpret_cast<const T*>(a.linear.x.data);
  const int64_t pitch = a.linear.k;
  const PixelBlocks blocks(a.batch * a.out_h * a.out_w, pitch * sizeof(T));
  if (blocks.count * a.groups < num_threads()) return convolve_together<T>(a);
  parallel_for(blocks.count * a.groups, 1, [&](int64_t begin, int64_t end, int) {
    const int64_t bytes = (blocks.rows + kTileRows) * pitch * sizeof(T);
    T* windows = operand_scratch().get<T>(bytes);
    if (a.kernel_h * a.kernel_w * a.channels < pitch) std::memset(windows, 0, bytes);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / a.groups, group = task % a.groups, first = blocks.begin(block), count = blocks.size(block);
      gather(a, x + group * a.channels, first, count, windows);
      multiply_windows(a, group, first, count, windows);
    }
  });
}

// Number of lines of an image that some rows of the result read, with those of the padding.
int64_t lines_of(const ChannelsLastArgs& a, int64_t rows) {
  return (rows - 1) * a.stride_h + (a.kernel_h - 1) * a.dilation_h + 1;
}

// The panels of a group's outputs. Where its last two make a wide one, they are multiplied together.
struct Panels {
  int64_t count;
  bool ends_wide;

  Panels(int64_t outputs, bool is_direct) : count(divide_up(outputs, kPanel)) {
    ends_wide = is_direct && count > 1 && is_wide(outputs - (count - 2) * kPanel);
    count -= ends_wide;
  }
  bool wide(int64_t panel) const { return ends_wide && panel + 1 == count; }
};

// The split of a product with windows that are multiplied where they are. A task is a band of the result, some rows of an
// image or some images, whose input stays in L2, and a part of the panels of all groups.
struct Bands {
  int64_t images, rows, each;  // of a band, and bands of that many images
  int64_t parts;               // of all groups' panels
  int64_t count;               // of tasks

  Bands(const ChannelsLastArgs& a, int64_t all_panels, int64_t pixel_bytes) {
    const int64_t line = a.in_w * pixel_bytes, wanted = num_threads() > 1 ? 4 * num_threads() : 1;
    const int64_t most_images = all_panels < wanted ? divide_up(a.batch, num_threads()) : a.batch;
    images = std::clamp<int64_t>(kBandBytes / (a.in_h * line), 1, most_images);
    const int64_t lines = kBandBytes / line - (a.kernel_h - 1) * a.dilation_h;
    const int64_t fitting = std::clamp<int64_t>((lines - 1) / a.stride_h + 1, 1, a.out_h);
    const int64_t batches = divide_up(a.batch, images);
    each = std::max(divide_up(a.out_h, fitting), std::min(a.out_h, divide_up(wanted, batches * all_panels)));
    rows = images > 1 ? a.out_h : divide_up(a.out_h, each);
    each = divide_up(a.out_h, rows);
    parts = std::min(all_panels, divide_up(wanted, batches * each));
    count = batches * each * parts;
  }
};

// Images in which all windows of a band lie, from a line on, and their strides.
template <class T>
struct Images {
  const T* data;
  int64_t first_line, item_stride, row_stride, pixel_stride, group_stride;
};

// The images themselves; or a copy of the lines of some groups that the band reads, in which a group's pixels are neighbours.
template <class T>
Images<T> images_of(const ChannelsLastArgs& a, int64_t item, int64_t items, int64_t row, int64_t rows, int64_t group,
                    int64_t groups, T* copy) {
  const T* x = reinterpret_cast<const T*>(a.linear.x.data) + item * a.x_batch_stride + group * a.channels;
  if (!copy) return {x, 0, a.x_batch_stride, a.x_row_stride, a.x_pixel_stride, a.channels};
  const int64_t top = row * a.stride_h - a.pad_top, first = std::clamp<int64_t>(top, 0, a.in_h);
  const int64_t lines = std::clamp<int64_t>(top + lines_of(a, rows), first, a.in_h) - first, line = a.in_w * a.channels;
  const int64_t plane = items * lines * line;
  for (int64_t i = 0; i < items * lines; ++i) {
    const T* from = x + i / lines * a.x_batch_stride + (first + i % lines) * a.x_row_stride;
    T* to = copy + i * line;
    for (int64_t pixel = 0; pixel < a.in_w; ++pixel, from += a.x_pixel_stride, to += a.channels)
      for (int64_t g = 0; g < groups; ++g) copy_elements(from + g * a.channels, to + g * plane, a.channels);
  }
  return {copy, first, lines * line, line, a.channels, plane};
}

// Whether windows are multiplied where they are: pairs of channels are those of the weight, its panels stay in a near
// cache, and the pixels of a row are enough for a product.
template <class T>
bool reads_in_place(const ChannelsLastArgs& a) {
  if (kHasTiles && std::is_same_v<T, bf16> && tiles_allowed()) return false;
  const int64_t depth = a.kernel_h * a.kernel_w * a.channels;
  return a.channels % Step<T>::kWidth == 0 && depth == a.linear.k && depth * kPanel * int64_t(sizeof(T)) <= kPanelBytes &&
         (a.groups > 1 || 2 * a.out_w >= kMaxRows);
}

// Results at equal distances: their number, and the distances of their windows and of the results themselves.
struct Run {
  int64_t count, step, pixels;

  bool fills_blocks_better(const Run& other, int64_t most) const {
    return count * divide_up(other.count, most) > other.count * divide_up(count, most);
  }
};

// The products of one panel, or of a wide one, with windows where they are, for the images of a band.
template <class T>
struct PanelOfBand {
  const ChannelsLastArgs& a;
  const Axis &rows, &columns;
  const Images<T>& images;
  const T* data;        // the first image's channels of the panel's group
  int64_t first_pixel;  // of the results of that image
  int64_t items, group, column;
  bool wide;
  Finish finish;
  Part<T>* parts;    // memory for the taps
  int64_t* offsets;  // likewise: of their pixels from the first tap's

  // For the results of a stretch of rows and one of columns.
  void multiply(const Stretch& y, const Stretch& x) const {
    const int64_t first = first_pixel + y.begin * a.out_w + x.begin;
    const LinearArgs layer = layer_of_group<T>(a, group, first);
    const DirectResult<T> direct(layer);
    alignas(64) float start[kWidePanel], tile[kMaxRows * kPanel];
    Range range = direct.begin(column, start, wide ? kWidePanel : kPanel);
    range.low = direct.low, range.high = direct.high;
    // Taps of a row whose channels are neighbours are one part of the product.
    const bool joined = a.dilation_w == 1 && images.pixel_stride == a.channels;
    const int64_t together = joined ? x.taps() : 1, apart = x.taps() / together, taps = y.taps() * apart;
    const int64_t steps = together * a.channels / Step<T>::kWidth;
    const T* weight = static_cast<const T*>(layer.weight) + column * layer.k;
    for (int64_t t = 0; t < taps; ++t) {
      const int64_t ky = t / apart, kx = t % apart;
      const int64_t tap = (y.first_tap + ky) * a.kernel_w + x.first_tap + kx;
      parts[t].panel = weight + tap * a.channels * kPanel;
      offsets[t] = ky * a.dilation_h * images.row_stride + kx * a.dilation_w * images.pixel_stride;
    }
    const T* corner = data + (rows.place(y.begin, y.first_tap) - images.first_line) * images.row_stride +
                      columns.place(x.begin, x.first_tap) * images.pixel_stride;
    Run runs[] = {{x.size(), a.stride_w * images.pixel_stride, 1},
                  {y.size(), a.stride_h * images.row_stride, a.out_w},
                  {items, images.item_stride, a.out_h * a.out_w}};
    const int64_t most = wide ? kWideRows : kMaxRows;
    for (Run& run : runs)
      if (run.fills_blocks_better(runs[0], most)) std::swap(run, runs[0]);
    const RowBlocks blocks(runs[0].count, std::min(most, rows_together(runs[0].step * int64_t(sizeof(T)))));
    for (int64_t i = 0; i < runs[2].count * runs[1].count; ++i) {
      const int64_t outer = i / runs[1].count, inner = i % runs[1].count;
      for (int64_t block = 0; block < blocks.count; ++block) {
        const int64_t begin = blocks.begin(block), count = blocks.size(block);
        const T* window = corner + outer * runs[2].step + inner * runs[1].step + begin * runs[0].step;
        const int64_t pixel = outer * runs[2].pixels + inner * runs[1].pixels + begin * runs[0].pixels;
        for (int64_t t = 0; t < taps; ++t) parts[t].x = window + offsets[t];
        if (direct.out) {
          Results<T> results = direct.at(pixel, column);
          results.row_stride *= runs[0].pixels, results.added_row_stride *= runs[0].pixels;
          if (wide) multiply_wide<T, T>(count, parts, taps, runs[0].step, steps, results, range, layer.k * kPanel);
          else multiply_parts<T, T>(count, parts, taps, runs[0].step, steps, results, range, layer.n - column);
        } else {
          multiply_parts<T>(count, parts, taps, runs[0].step, steps, {tile}, {}, layer.n - column);
          LinearArgs results = layer_of_group<T>(a, group, first + pixel);
          results.out.stride[2] *= runs[0].pixels, results.residual.stride[2] *= runs[0].pixels;
          finish(results, tile, 0, count, column);
        }
      }
    }
  }
};

template <class T>
void convolve_in_place(const ChannelsLastArgs& a) {
  const int64_t together = std::clamp<int64_t>(kCopiedBytes / (a.channels * int64_t(sizeof(T))), 1, a.groups);
  const int64_t taps = a.kernel_h * a.kernel_w, pixel_bytes = together * a.channels * int64_t(sizeof(T));
  const Panels panels(a.linear.n, DirectResult<T>(a.linear).out);
  const Bands bands(a, panels.count * a.groups, pixel_bytes);
  const Finish finish = finish_for(a.linear);
  const Axis rows{a.in_h, a.kernel_h, a.stride_h, a.dilation_h, a.pad_top};
  const Axis columns{a.in_w, a.kernel_w, a.stride_w, a.dilation_w, a.pad_left};
  const int64_t table_bytes = round_up(taps * (sizeof(Part<T>) + sizeof(int64_t)) +
                                       (rows.most_stretches() + columns.most_stretches()) * sizeof(Stretch), 64);
  const int64_t lines = std::min(lines_of(a, bands.rows), a.in_h);
  const int64_t copy_bytes = a.groups > 1 ? bands.images * lines * a.in_w * pixel_bytes : 0;
  parallel_for(bands.count, 1, [&](int64_t begin, int64_t end, int) {
    char* memory = thread_scratch().get<char>(table_bytes + copy_bytes);
    Part<T>* parts = reinterpret_cast<Part<T>*>(memory);
    Stretch* xs = reinterpret_cast<Stretch*>(parts + taps);
    Stretch* ys = xs + columns.most_stretches();
    int64_t* offsets = reinterpret_cast<int64_t*>(ys + rows.most_stretches());
    T* copy = copy_bytes ? reinterpret_cast<T*>(memory + table_bytes) : nullptr;
    const Stretch* end_of_xs = columns.split(0, a.out_w, xs);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % bands.parts, band = task / bands.parts;
      const int64_t item = band / bands.each * bands.images, items = std::min(bands.images, a.batch - item);
      const int64_t row = band % bands.each * bands.rows, row_count = std::min(bands.rows, a.out_h - row);
      const Stretch* end_of_ys = rows.split(row, row + row_count, ys);
      const int64_t first = a.groups * panels.count * part / bands.parts;
      const int64_t last = a.groups * panels.count * (part + 1) / bands.parts;
      Images<T> images;
      int64_t ready = 0, first_group = 0;
      for (int64_t p = first; p < last; ++p) {
        const int64_t group = p / panels.count, panel = p % panels.count;
        if (group >= ready) {
          const int64_t copied = std::min(together, divide_up(last, panels.count) - group);
          first_group = group, ready = group + copied;
          images = images_of(a, item, items, row, row_count, group, copied, copy);
        }
        const PanelOfBand<T> results{a, rows, columns, images, images.data + (group - first_group) * images.group_stride,
                                     item * a.out_h * a.out_w, items, group, panel * kPanel, panels.wide(panel), finish,
                                     parts, offsets};
        for (const Stretch* y = ys; y < end_of_ys; ++y)
          for (const Stretch* x = xs; x < end_of_xs; ++x) results.multiply(*y, *x);
      }
    }
  });
}

void convolve(const ChannelsLastArgs& a) {
  with_type(a.linear.x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<typename Step<T>::X, T>) {
      if (reads_in_place<T>(a)) return convolve_in_place<T>(a);
    }
    if constexpr (kHasTiles && std::is_same_v<T, bf16>) {
      if (tiles_allowed() && fits_tiles(a)) return convolve_tiles(a);
    }
    convolve_images<T>(a);
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_channels_last, npu::conv::ChannelsLastArgs, npu::conv::convolve)
