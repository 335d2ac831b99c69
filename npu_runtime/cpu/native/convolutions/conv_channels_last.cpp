// Convolution as a product of windows with the weight of a linear layer. Windows are gathered some pixels at a time; those of
// narrow groups are multiplied where they are, since gathering them would take long beside their product.
#include "convolutions/channels_last.h"

namespace npu::conv {
namespace {

constexpr int64_t kBlockBytes = 512 << 10;  // of gathered windows, which should stay in L2

// Constant sizes become moves of vectors; the last one begins early enough to end with the range.
template <int64_t kChunk>
NPU_INLINE void copy_chunks(const char* from, char* to, int64_t bytes) {
  for (int64_t i = 0; i + kChunk <= bytes; i += kChunk) std::memcpy(to + i, from + i, kChunk);
  std::memcpy(to + bytes - kChunk, from + bytes - kChunk, kChunk);
}
template <class T>
NPU_INLINE void copy_elements(const T* from, T* to, int64_t count) {
  const int64_t bytes = count * sizeof(T);
  const char* source = reinterpret_cast<const char*>(from);
  char* target = reinterpret_cast<char*>(to);
  if (bytes >= 64) copy_chunks<64>(source, target, bytes);
  else if (bytes >= 16) copy_chunks<16>(source, target, bytes);
  else for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

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

// The linear layer of a group, for the pixels from `pixel` on.
template <class T>
LinearArgs layer_of_group(const ChannelsLastArgs& a, int64_t group, int64_t pixel) {
  LinearArgs part = a.linear;
  const int64_t column = group * part.n;
  part.weight = static_cast<const T*>(part.weight) + group * round_up(part.n, kPanel) * part.k;
  if (part.bias.data) part.bias.data += column * sizeof(float);
  for (View* view : {&part.residual, &part.out})
    if (view->data) view->data += (pixel * view->stride[2] + column) * item_size(view->dtype);
  return part;
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

template <class T>
void convolve_images(const ChannelsLastArgs& a) {
  const T* x = reinterpret_cast<const T*>(a.linear.x.data);
  const int64_t pitch = a.linear.k;
  const PixelBlocks blocks(a.batch * a.out_h * a.out_w, pitch * sizeof(T));
  parallel_for(blocks.count, 1, [&](int64_t begin, int64_t end, int) {
    const int64_t bytes = (blocks.rows + kTileRows) * pitch * sizeof(T);
    T* windows = operand_scratch().get<T>(bytes);
    if (a.kernel_h * a.kernel_w * a.channels < pitch) std::memset(windows, 0, bytes);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = blocks.begin(block), count = blocks.size(block);
      for (int64_t group = 0; group < a.groups; ++group) {
        gather(a, x + group * a.channels, first, count, windows);
        LinearArgs part = layer_of_group<T>(a, group, first);
        part.x.data = reinterpret_cast<char*>(windows);
        for (View* view : {&part.x, &part.residual, &part.out}) view->size[2] = count;
        linear(part);
      }
    }
  });
}

// Images in which all windows lie, and their strides.
template <class T>
struct Images {
  const T* data;
  int64_t item_stride, row_stride, pixel_stride;
};

int64_t padded_h(const ChannelsLastArgs& a) {
  return (a.out_h - 1) * a.stride_h + (a.kernel_h - 1) * a.dilation_h + 1;
}
int64_t padded_w(const ChannelsLastArgs& a) {
  return (a.out_w - 1) * a.stride_w + (a.kernel_w - 1) * a.dilation_w + 1;
}

// The images themselves, or copies with their padding.
template <class T>
Images<T> padded_images(const ChannelsLastArgs& a) {
  const T* x = reinterpret_cast<const T*>(a.linear.x.data);
  const int64_t height = padded_h(a), width = padded_w(a), channels = a.groups * a.channels, line = width * channels;
  if (!a.pad_top && !a.pad_left && height <= a.in_h && width <= a.in_w)
    return {x, a.x_batch_stride, a.x_row_stride, a.x_pixel_stride};
  T* copy = operand_scratch().get<T>(a.batch * height * line * sizeof(T));
  parallel_for(a.batch * height, divide_up(a.batch * height, 4 * num_threads()), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      T* to = copy + row * line;
      const int64_t y = row % height - a.pad_top;
      const bool inside = y >= 0 && y < a.in_h;
      const int64_t left = inside ? std::min(a.pad_left, width) : width;
      const int64_t right = inside ? std::clamp(a.pad_left + a.in_w, left, width) : width;
      std::fill(to, to + left * channels, T{});
      std::fill(to + right * channels, to + line, T{});
      const T* from = x + row / height * a.x_batch_stride + y * a.x_row_stride;
      for (int64_t pixel = left; pixel < right; ++pixel, from += a.x_pixel_stride)
        copy_elements(from, to + pixel * channels, channels);
    }
  });
  return {copy, height * line, line, channels};
}

// Whether a group's windows are multiplied where they are: its panels stay in the first cache, and pairs of channels are
// those of the weight.
template <class T>
bool reads_in_place(const ChannelsLastArgs& a) {
  if (kHasTiles && std::is_same_v<T, bf16> && tiles_allowed()) return false;
  const int64_t depth = a.kernel_h * a.kernel_w * a.channels;
  return a.groups > 1 && a.channels % Step<T>::kWidth == 0 && depth == a.linear.k &&
         depth * kPanel * int64_t(sizeof(T)) <= kSliceBytes &&
         padded_h(a) * padded_w(a) <= 4 * a.in_h * a.in_w;  // what may be copied
}

// A task is a panel of a group and some rows of an image.
template <class T>
void convolve_groups(const ChannelsLastArgs& a) {
  const Images<T> images = padded_images<T>(a);
  const int64_t taps = a.kernel_h * a.kernel_w, panels = divide_up(a.linear.n, kPanel), rows = a.batch * a.out_h;
  const int64_t bands = std::clamp<int64_t>(divide_up(8 * num_threads(), a.groups * panels), 1, rows);
  const Finish finish = finish_for(a.linear);
  const RowBlocks blocks(a.out_w);
  parallel_for(a.groups * panels * bands, 1, [&](int64_t begin, int64_t end, int) {
    alignas(64) float tile[kMaxRows * kPanel];
    const T** parts = thread_scratch().get<const T*>(taps * sizeof(const T*));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t band = task % bands, panel = task / bands % panels, group = task / bands / panels;
      const LinearArgs layer = layer_of_group<T>(a, group, 0);
      const T* weight = static_cast<const T*>(layer.weight) + panel * kPanel * layer.k;
      const int64_t column = panel * kPanel, columns = layer.n - column;
      const DirectResult<T> direct(layer);
      alignas(64) float start[kPanel];
      Range range = direct.begin(column, start);
      range.low = direct.low, range.high = direct.high;
      for (int64_t row = rows * band / bands; row < rows * (band + 1) / bands; ++row) {
        const T* line = images.data + row / a.out_h * images.item_stride +
                        row % a.out_h * a.stride_h * images.row_stride + group * a.channels;
        for (int64_t block = 0; block < blocks.count; ++block) {
          const int64_t ox = blocks.begin(block), count = blocks.size(block), step = a.stride_w * images.pixel_stride;
          for (int64_t t = 0; t < taps; ++t)
            parts[t] = line + t / a.kernel_w * a.dilation_h * images.row_stride +
                       t % a.kernel_w * a.dilation_w * images.pixel_stride + ox * step;
          const int64_t steps = a.channels / Step<T>::kWidth, pixel = row * a.out_w + ox;
          if (direct.out) {
            multiply_parts<T, T>(count, parts, taps, step, weight, steps, direct.at(pixel, column), range, columns);
          } else {
            multiply_parts<T>(count, parts, taps, step, weight, steps, {tile}, {}, columns);
            finish(layer, tile, pixel, count, column);
          }
        }
      }
    }
  });
}

void convolve(const ChannelsLastArgs& a) {
  with_type(a.linear.x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<typename Step<T>::X, T>) {
      if (reads_in_place<T>(a)) return convolve_groups<T>(a);
    }
    convolve_images<T>(a);
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_channels_last, npu::conv::ChannelsLastArgs, npu::conv::convolve)
