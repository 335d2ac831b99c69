// Integer convolution as a product: rows of pixels, each with what its window holds, times panels of output channels.
//
// The bytes of x become int16 while a row is packed, and x's zero point is subtracted there, so padding is 0 and sums
// are exact: products of such numbers with those of a weight, two at a time, fit in int32 (MOST_TERMS in ops/integer.py).
// The elements of a window are its rows, columns and channels, channels innermost.
#include "integer_args.h"
#include "integer_gemm.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

constexpr int64_t kRowBytes = 224 << 10;  // what a task packs of rows: with a panel, a second-level cache
constexpr int64_t kFewRows = 4 * kMaxRows;
constexpr int64_t kTogether = 16 * kMaxRows;  // rows whose sums become results together

// to[i] = from[i] - zero, for n elements; nothing beyond them is read, and a vector at most beyond them written.
template <class X>
NPU_INLINE void widen(const X* from, int64_t n, int16_t zero, int16_t* to) {
  constexpr int64_t kWidth = 2 * kLanes;
  const ShortVec zeros = ShortVec{} + zero;
  const auto put = [&](int64_t i) __attribute__((always_inline)) {
    const ShortVec v = widen_bytes(from + i) - zeros;
    std::memcpy(to + i, &v, sizeof(v));
  };
  const auto put_half = [&](int64_t i) __attribute__((always_inline)) {
    typedef X Narrow __attribute__((vector_size(kLanes)));
    typedef int16_t Half __attribute__((vector_size(2 * kLanes)));
    const Half v = __builtin_convertvector(load_bits<Narrow>(from + i), Half) - zero;
    std::memcpy(to + i, &v, sizeof(v));
  };
  if (n >= kWidth) {
    for (int64_t i = 0; i + kWidth <= n; i += kWidth) put(i);
    if (n % kWidth) put(n - kWidth);
    return;
  }
  if (n >= kLanes) {
    put_half(0);
    if (n > kLanes) put_half(n - kLanes);
    return;
  }
  for (int64_t i = 0; i < n; ++i) to[i] = int16_t(from[i]) - zero;
}

// The geometry of a packed row.
struct Row {
  int64_t length, stride;  // elements, and with those up to whole pairs and room for `widen`
  explicit Row(const Args& a)
      : length(a.kernel_h * a.kernel_w * a.in_channels), stride(round_up(length, 2) + 2 * kLanes) {}
  int64_t pairs() const { return divide_up(length, 2); }
};

template <class X>
void pack_window(const Args& a, const X* image, int64_t group, int64_t y, int64_t x, int16_t* to) {
  const int64_t channels = a.in_channels, pitch = a.groups * channels;
  const bool together = a.groups == 1 && a.dilation_w == 1;
  const int16_t zero = a.zero_point;
  const int64_t left = x * a.stride_w - a.pad_left;
  for (int64_t ky = 0; ky < a.kernel_h; ++ky, to += a.kernel_w * channels) {
    const int64_t in_y = y * a.stride_h - a.pad_top + ky * a.dilation_h;
    if (in_y < 0 || in_y >= a.in_h) {
      std::memset(to, 0, a.kernel_w * channels * sizeof(int16_t));
      continue;
    }
    const X* line = image + in_y * a.in_w * pitch + group * channels;
    if (together) {
      const int64_t begin = std::clamp<int64_t>(-left, 0, a.kernel_w);
      const int64_t end = std::clamp<int64_t>(a.in_w - left, begin, a.kernel_w);
      if (begin) std::memset(to, 0, begin * channels * sizeof(int16_t));
      widen(line + (left + begin) * pitch, (end - begin) * channels, zero, to + begin * channels);
      if (end < a.kernel_w) std::memset(to + end * channels, 0, (a.kernel_w - end) * channels * sizeof(int16_t));
      continue;
    }
    for (int64_t kx = 0; kx < a.kernel_w; ++kx) {
      const int64_t in_x = left + kx * a.dilation_w;
      if (in_x < 0 || in_x >= a.in_w) std::memset(to + kx * channels, 0, channels * sizeof(int16_t));
      else widen(line + in_x * pitch, channels, zero, to + kx * channels);
    }
  }
  if (a.kernel_h * a.kernel_w * channels % 2) *to = 0;
}

// Rows for pixels [begin, end) of all images.
template <class X>
void pack_rows(const Args& a, const Row& row, int64_t group, int64_t begin, int64_t end, int16_t* to) {
  const X* data = reinterpret_cast<const X*>(a.x);
  const int64_t plane = a.out_h * a.out_w, image = a.in_h * a.in_w * a.groups * a.in_channels;
  const int64_t channels = a.in_channels;
  if (a.groups == 1 && a.kernel_h * a.kernel_w * a.stride_h * a.stride_w == 1 && plane == a.in_h * a.in_w) {
    const int16_t zero = a.zero_point;
    for (int64_t pixel = begin; pixel < end; ++pixel, to += row.stride) {
      widen(data + pixel * channels, channels, zero, to);
      if (channels % 2) to[channels] = 0;
    }
    return;
  }
  for (int64_t pixel = begin; pixel < end; ++pixel, to += row.stride) {
    const int64_t item = pixel / plane, place = pixel % plane;
    pack_window(a, data + item * image, group, place / a.out_w, place % a.out_w, to);
  }
}

// A task is some rows and a part of the panels, over which they all pass.
struct Tasks {
  int64_t rows, count, parts;  // rows of a task, tasks that cover the rows, parts of the panels
  Tasks(const Args& a, const Row& row, int64_t panels) {
    const int64_t all = a.batch * a.out_h * a.out_w, threads = num_threads();
    const int64_t fitting = std::max<int64_t>(kMaxRows, kRowBytes / int64_t(row.stride * sizeof(int16_t)));
    const int64_t even = std::max(kFewRows, divide_up(all, 2 * threads));
    rows = round_up(std::min(fitting, even), kMaxRows);
    count = divide_up(all, rows);
    rows = round_up(divide_up(all, count), kMaxRows);
    count = divide_up(all, rows);
    parts = a.groups * count >= 2 * threads ? 1 : std::min(panels, divide_up(4 * threads, a.groups * count));
  }
};

template <class X>
void convolve_bytes(const Args& a) {
  const Row row(a);
  const int64_t panels = divide_up(a.out_channels, kPanel), all = a.batch * a.out_h * a.out_w;
  const Tasks tasks(a, row, panels);
  const Finish finish = finish_of(a);
  parallel_for(a.groups * tasks.count * tasks.parts, 1, [&](int64_t first, int64_t last, int) {
    int16_t* rows = thread_scratch().get<int16_t>((tasks.rows + 1) * row.stride * sizeof(int16_t));
    alignas(64) int32_t sums[kTogether * kPanel];
    int64_t packed = -1;
    for (int64_t task = first; task < last; ++task) {
      const int64_t part = task % tasks.parts, which = task / tasks.parts;
      const int64_t group = which / tasks.count, begin = which % tasks.count * tasks.rows;
      const int64_t end = std::min(begin + tasks.rows, all);
      if (packed != which) pack_rows<X>(a, row, group, begin, end, rows);
      packed = which;
      const int16_t* weight = a.weight + group * a.weight_group_stride;
      for (int64_t p = panels * part / tasks.parts; p < panels * (part + 1) / tasks.parts; ++p) {
        const int64_t channel = p * kPanel, channels = std::min(kPanel, a.out_channels - channel);
        const int16_t* panel = weight + p * row.pairs() * 2 * kPanel;
        for (int64_t pixel = begin; pixel < end; pixel += kTogether) {
          const int64_t count = std::min(kTogether, end - pixel);
          for (int64_t r = 0; r < count; r += kMaxRows)
            multiply(std::min<int64_t>(kMaxRows, count - r), rows + (pixel - begin + r) * row.stride, row.stride, panel,
                     row.pairs(), sums + r * kPanel);
          finish(a, {sums, kPanel, pixel, count, group * a.out_channels + channel, channels});
        }
      }
    }
  });
}

void convolve(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) { convolve_bytes<std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d, npu::integer::Args, npu::integer::convolve)
