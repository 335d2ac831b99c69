// Convolution as a product of windows, gathered some pixels at a time, with the weight of a linear layer.
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
  const int64_t pitch = a.linear.k, n = a.linear.n;
  const int64_t weight_bytes = round_up(n, kPanel) * pitch * sizeof(T);  // of a group
  const PixelBlocks blocks(a.batch * a.out_h * a.out_w, pitch * sizeof(T));
  parallel_for(blocks.count, 1, [&](int64_t begin, int64_t end, int) {
    const int64_t bytes = (blocks.rows + kTileRows) * pitch * sizeof(T);
    T* windows = operand_scratch().get<T>(bytes);
    if (a.kernel_h * a.kernel_w * a.channels < pitch) std::memset(windows, 0, bytes);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = blocks.begin(block), count = blocks.size(block);
      LinearArgs part = a.linear;
      part.x.data = reinterpret_cast<char*>(windows);
      for (View* view : {&part.x, &part.residual, &part.out}) view->size[2] = count;
      for (int64_t group = 0; group < a.groups; ++group) {
        gather(a, x + group * a.channels, first, count, windows);
        part.weight = static_cast<const char*>(a.linear.weight) + group * weight_bytes;
        const auto begin_at = [&](View& view, const View& whole, int64_t row) {
          if (view.data) view.data = whole.data + (row * whole.stride[2] + group * n) * item_size(whole.dtype);
        };
        begin_at(part.bias, a.linear.bias, 0);
        begin_at(part.residual, a.linear.residual, first);
        begin_at(part.out, a.linear.out, first);
        linear(part);
      }
    }
  });
}

void convolve(const ChannelsLastArgs& a) {
  with_type(a.linear.x.dtype, [&](auto* type) { convolve_images<std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_channels_last, npu::conv::ChannelsLastArgs, npu::conv::convolve)
