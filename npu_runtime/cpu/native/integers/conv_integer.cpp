// Integer convolution as a product: rows of pixels, each with what its window holds, times panels of output channels.
//
// The elements of a window are its rows, columns and channels, channels innermost. In the format Pairs the bytes of x
// become int16 while a row is packed, and x's zero point is subtracted there, so padding is 0 and sums are exact:
// products of such numbers with those of a weight, two at a time, fit in int32 (MOST_TERMS in ops/integer.py). In Quads
// they stay bytes, int8 with 128 added, and padding is x's zero point; sums begin with what that takes off again. So it is
// in TiledQuads, which a matrix unit multiplies by kTileRows rows.
#include "integers/integer_args.h"
#include "integers/integer_gemm.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

// Rows of a task, whose results stay in the first-level cache while all panels pass over them; and what is packed of
// them at most, which with a panel has room in the second-level cache.
constexpr int64_t kTaskRows = 64, kRowBytes = 224 << 10;
// Rows whose sums become results together.
template <class Format>
constexpr int64_t kTogether = std::is_same_v<Format, TiledQuads> ? kTileRows : 2 * kMaxRows;

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

constexpr int64_t kFew = 16;

// How a format stores elements of windows. put_few() reads and writes whole vectors, kFew bytes or 2 * kLanes int16, so it
// goes beyond its n elements.
template <class Format>
struct Packer {
  uint8_t zero;
  explicit Packer(const Args& a) : zero(a.zero_point + (a.x_type == Stored::i8 ? 128 : 0)) {}
  template <int64_t kWidth = 64, class X>
  NPU_INLINE void put(const X* from, int64_t n, uint8_t* to) const {
    typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
    constexpr uint8_t kMove = std::is_same_v<X, int8_t> ? 128 : 0;
    const auto copy = [&](int64_t i) __attribute__((always_inline)) {
      const Bytes moved = load_bits<Bytes>(from + i) ^ kMove;
      std::memcpy(to + i, &moved, sizeof(moved));
    };
    if (n >= kWidth) {
      for (int64_t i = 0; i + kWidth <= n; i += kWidth) copy(i);
      if (n % kWidth) copy(n - kWidth);
    } else if constexpr (kWidth > 4) {
      put<kWidth / 2>(from, n, to);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = uint8_t(from[i]) ^ kMove;
    }
  }
  template <class X>
  NPU_INLINE void put_few(const X* from, int64_t n, uint8_t* to) const {
    for (int64_t i = 0; i < n; i += kFew) put<kFew>(from + i, kFew, to + i);
  }
  void pad(uint8_t* to, int64_t n) const { std::memset(to, zero, n); }
};

template <>
struct Packer<Pairs> {
  int16_t zero;
  explicit Packer(const Args& a) : zero(a.zero_point) {}
  template <class X>
  void put(const X* from, int64_t n, int16_t* to) const {
    widen(from, n, zero, to);
  }
  template <class X>
  NPU_INLINE void put_few(const X* from, int64_t n, int16_t* to) const {
    for (int64_t i = 0; i < n; i += 2 * kLanes) widen(from + i, 2 * kLanes, zero, to + i);
  }
  void pad(int16_t* to, int64_t n) const { std::memset(to, 0, n * sizeof(int16_t)); }
};

// The geometry of a packed row: its elements, the steps that they take, those of a panel, and elements from row to row,
// with room for what `widen` writes.
template <class Format>
struct Row {
  int64_t length, steps, panel_steps, stride;
  explicit Row(const Args& a)
      : length(a.kernel_h * a.kernel_w * a.in_channels),
        steps(divide_up(length, Format::kStep)),
        panel_steps(std::is_same_v<Format, TiledQuads> ? round_up(steps, kTileSteps) : steps),
        stride(panel_steps * Format::kStep + (std::is_same_v<Format, Pairs> ? 2 * kLanes : 0)) {}
};

bool is_pointwise(const Args& a) {
  return a.kernel_h * a.kernel_w * a.stride_h * a.stride_w == 1 && a.out_h == a.in_h && a.out_w == a.in_w;
}

// Fills a row up to whole steps; their weights there are 0.
template <class Format>
void fill(const Row<Format>& row, typename Format::Row* to) {
  for (int64_t i = row.length; i < row.steps * Format::kStep; ++i) to[i] = 0;
}

template <class Format, class X>
void pack_window(const Args& a, const X* image, int64_t group, int64_t y, int64_t x, typename Format::Row* to) {
  const int64_t channels = a.in_channels, pitch = a.groups * channels;
  const bool together = a.groups == 1 && a.dilation_w == 1;
  const Packer<Format> packer(a);
  const int64_t left = x * a.stride_w - a.pad_left, top = y * a.stride_h - a.pad_top;
  if (together && left >= 0 && left + a.kernel_w <= a.in_w && top >= 0 &&
      top + (a.kernel_h - 1) * a.dilation_h < a.in_h) {
    const int64_t size = a.kernel_w * channels, step = a.dilation_h * a.in_w * pitch;
    const X* line = image + (top * a.in_w + left) * pitch;
    for (int64_t ky = a.kernel_h; ky; --ky, to += size, line += step) packer.put(line, size, to);
    return;
  }
  for (int64_t ky = 0; ky < a.kernel_h; ++ky, to += a.kernel_w * channels) {
    const int64_t in_y = top + ky * a.dilation_h;
    if (in_y < 0 || in_y >= a.in_h) {
      packer.pad(to, a.kernel_w * channels);
      continue;
    }
    const X* line = image + in_y * a.in_w * pitch + group * channels;
    if (together) {
      const int64_t begin = std::clamp<int64_t>(-left, 0, a.kernel_w);
      const int64_t end = std::clamp<int64_t>(a.in_w - left, begin, a.kernel_w);
      if (begin) packer.pad(to, begin * channels);
      packer.put(line + (left + begin) * pitch, (end - begin) * channels, to + begin * channels);
      if (end < a.kernel_w) packer.pad(to + end * channels, (a.kernel_w - end) * channels);
      continue;
    }
    for (int64_t kx = 0; kx < a.kernel_w; ++kx) {
      const int64_t in_x = left + kx * a.dilation_w;
      if (in_x < 0 || in_x >= a.in_w) packer.pad(to + kx * channels, channels);
      else packer.put(line + in_x * pitch, channels, to + kx * channels);
    }
  }
}

// Fills rows for pixels from x on, `count` at most, if their windows lie inside of the image and have few elements in a
// row. Returns how many.
template <class Format, class X>
int64_t pack_narrow(const Args& a, const Row<Format>& row, const X* image, int64_t y, int64_t x, int64_t count,
                    typename Format::Row* to) {
  const int64_t channels = a.in_channels, size = a.kernel_w * channels, beyond = std::max<int64_t>(kFew, 2 * kLanes);
  const int64_t left = x * a.stride_w - a.pad_left, top = y * a.stride_h - a.pad_top, spare = a.in_w - a.kernel_w - left;
  const int64_t advance = a.stride_w * channels, step = a.dilation_h * a.in_w * channels, rows = (a.kernel_h - 1) * step;
  if (a.groups > 1 || a.dilation_w > 1 || size > 2 * kFew || left < 0 || top < 0 || spare < 0 ||
      top + (a.kernel_h - 1) * a.dilation_h >= a.in_h)
    return 0;
  const X* line = image + (top * a.in_w + left) * channels;
  const int64_t behind = reinterpret_cast<const X*>(a.x) + a.batch * a.in_h * a.in_w * channels - line - rows - size - beyond;
  if (behind < 0) return 0;
  count = std::min({count, spare / a.stride_w + 1, behind / advance + 1});
  const Packer<Format> packer(a);
  for (int64_t i = 0; i < count; ++i, line += advance, to += row.stride) {
    for (int64_t ky = 0; ky < a.kernel_h; ++ky) packer.put_few(line + ky * step, size, to + ky * size);
    fill(row, to);
  }
  return count;
}

// Rows for pixels [begin, end) of all images.
template <class Format, class X>
void pack_rows(const Args& a, const Row<Format>& row, int64_t group, int64_t begin, int64_t end,
               typename Format::Row* to) {
  const X* data = reinterpret_cast<const X*>(a.x);
  const int64_t plane = a.out_h * a.out_w, image = a.in_h * a.in_w * a.groups * a.in_channels;
  const Packer<Format> packer(a);
  if (is_pointwise(a) && a.groups == 1) {
    for (int64_t pixel = begin; pixel < end; ++pixel, to += row.stride) {
      packer.put(data + pixel * a.in_channels, a.in_channels, to);
      fill(row, to);
    }
    return;
  }
  int64_t item = begin / plane, y = begin % plane / a.out_w, x = begin % a.out_w;
  for (int64_t pixel = begin, count; pixel < end; pixel += count, to += count * row.stride) {
    count = pack_narrow<Format>(a, row, data + item * image, y, x, std::min(end - pixel, a.out_w - x), to);
    if (!count) {
      pack_window<Format>(a, data + item * image, group, y, x, to);
      fill(row, to);
      count = 1;
    }
    x += count;
    if (x < a.out_w) continue;
    x = 0;
    if (++y < a.out_h) continue;
    y = 0;
    ++item;
  }
}

// A task is some rows and a part of the panels, over which they all pass.
struct Tasks {
  int64_t rows, count, parts;  // rows of a task, tasks that cover the rows, parts of the panels
  Tasks(const Args& a, int64_t row_bytes, int64_t panels, int64_t multiple) {
    const int64_t all = a.batch * a.out_h * a.out_w, threads = num_threads();
    const int64_t fitting = std::clamp<int64_t>(kRowBytes / row_bytes, std::max<int64_t>(kMaxRows, multiple), kTaskRows);
    count = divide_up(all, fitting);
    rows = round_up(divide_up(all, count), multiple);
    count = divide_up(all, rows);
    parts = std::min(panels, divide_up(4 * threads, a.groups * count));
  }
};

// Blocks of sums on their way to results. A matrix unit takes long to give its first sums, so those of the block before
// become results meanwhile.
template <class Format>
class Results {
  static constexpr bool kLater = std::is_same_v<Format, TiledQuads>;
  const Args& args_;
  const Finish finish_;
  Codes codes_;
  alignas(64) int32_t sums_[kLater ? 2 : 1][kTogether<Format> * kPanel];
  int next_ = 0;
  Block waiting_{};

 public:
  explicit Results(const Args& a)
      : args_(a),
        finish_(finish_of(a)),
        codes_{nullptr, nullptr, Rounding::limited(a), nullptr, a.groups * a.out_channels, a.out_type == Stored::i8} {}
  ~Results() {
    if (waiting_.pixels) finish_(args_, waiting_);
  }
  // Where the next block's sums go, until it is put.
  int32_t* sums() { return sums_[next_]; }
  // Whether sums of whole panels can become results before they are stored.
  bool at_once() const {
    return kMakesCodes && !kLater && is_bytes(args_.out_type) && !args_.residual && args_.activation <= Activation::relu6;
  }
  const Codes& codes(int64_t pixel, int64_t channel) {
    codes_.scales = args_.scales + channel;
    codes_.biases = args_.bias + channel;
    codes_.out = args_.out + pixel * codes_.stride + channel;
    return codes_;
  }
  void put(const Block& block) {
    if constexpr (kLater) {
      if (waiting_.pixels) finish_(args_, waiting_);
      waiting_ = block;
      next_ ^= 1;
    } else {
      finish_(args_, block);
    }
  }
};

// Rows of x, `stride` elements apart, times a panel; the results are those of pixels from `pixel` on.
template <class Format>
void multiply_rows(int64_t rows, const typename Format::Row* x, int64_t stride, const typename Format::Weight* panel,
                   const Row<Format>& row, const int32_t* start, Results<Format>& results, int64_t pixel, int64_t channel,
                   int64_t channels) {
  if constexpr (std::is_same_v<Format, TiledQuads>) {
    for (int64_t done = 0; done < rows; done += kTileRows) {
      // The last block begins early enough to be a whole one; with fewer rows, there is room for those that it lacks.
      const int64_t first = std::clamp<int64_t>(rows - kTileRows, 0, done), count = std::min(rows - done, kTileRows);
      multiply_byte_tiles(x + first * stride, stride, panel, row.panel_steps, start, results.sums());
      results.put({results.sums() + (done - first) * kPanel, kPanel, pixel + done, count, channel, channels});
    }
  } else {
    if constexpr (kMakesCodes) {
      if (results.at_once() && channels % kLanes == 0) {
        const RowBlocks blocks(rows);
        for (int64_t i = 0; i < blocks.count; ++i)
          multiply(blocks.size(i), channels, x + blocks.begin(i) * stride, stride, panel, row.steps, start,
                   results.codes(pixel + blocks.begin(i), channel));
        return;
      }
    }
    const RowBlocks finished(rows, kTogether<Format>);
    for (int64_t f = 0; f < finished.count; ++f) {
      const int64_t done = finished.begin(f);
      const RowBlocks blocks(finished.size(f));
      for (int64_t i = 0; i < blocks.count; ++i)
        multiply(blocks.size(i), channels, x + (done + blocks.begin(i)) * stride, stride, panel, row.steps, start,
                 results.sums() + blocks.begin(i) * kPanel);
      results.put({results.sums(), kPanel, pixel + done, blocks.rows, channel, channels});
    }
  }
}

template <class Format, class X>
void convolve_bytes(const Args& a) {
  using Element = typename Format::Row;
  constexpr bool kTiled = std::is_same_v<Format, TiledQuads>;
  const Row<Format> row(a);
  const int64_t panels = divide_up(a.out_channels, kPanel), all = a.batch * a.out_h * a.out_w;
  const Tasks tasks(a, row.stride * sizeof(Element), panels, kTiled ? kTileRows : 1);
  // Rows that lie in x as they would be packed. A matrix unit also reads what stands behind them.
  const int64_t pitch = a.groups * a.in_channels;
  const auto lie_in_x = [&](int64_t group, int64_t begin, int64_t end) {
    if (std::is_same_v<Format, Pairs> || !std::is_same_v<X, uint8_t> || !is_pointwise(a) || a.in_channels % 4) return false;
    if (!kTiled) return true;
    return end - begin >= kTileRows &&
           (end - 1) * pitch + group * a.in_channels + row.panel_steps * Format::kStep <= all * pitch;
  };
  const auto* weights = static_cast<const typename Format::Weight*>(a.weight);
  parallel_for(a.groups * tasks.count * tasks.parts, 1, [&](int64_t first, int64_t last, int) {
    [[maybe_unused]] const std::conditional_t<kTiled, TileState, int> state{};
    const int64_t room = std::max<int64_t>(tasks.rows, kTiled ? kTileRows : 1) + 1;
    Element* memory = thread_scratch().get<Element>((room * row.stride + kFew) * sizeof(Element));
    Results<Format> results(a);
    int64_t packed = -1;
    for (int64_t task = first; task < last; ++task) {
      const int64_t part = task % tasks.parts, which = task / tasks.parts;
      const int64_t group = which / tasks.count, begin = which % tasks.count * tasks.rows;
      const int64_t end = std::min(begin + tasks.rows, all);
      const Element* rows = memory;
      int64_t stride = row.stride;
      if (lie_in_x(group, begin, end)) {
        stride = pitch;
        rows = reinterpret_cast<const Element*>(a.x) + begin * stride + group * a.in_channels;
      } else if (packed != which) {
        pack_rows<Format, X>(a, row, group, begin, end, memory);
        packed = which;
      }
      for (int64_t p = panels * part / tasks.parts; p < panels * (part + 1) / tasks.parts; ++p) {
        const int64_t channel = p * kPanel, channels = std::min(kPanel, a.out_channels - channel);
        const int64_t whole = group * a.out_channels + channel;
        const auto* panel = weights + group * a.weight_group_stride + p * row.panel_steps * Format::kStep * kPanel;
        const int32_t* start = std::is_same_v<Format, Pairs> ? nullptr : a.offsets + whole;
        multiply_rows(end - begin, rows, stride, panel, row, start, results, begin, whole, channels);
      }
    }
  });
}

template <class Format>
void convolve(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) { convolve_bytes<Format, std::remove_pointer_t<decltype(type)>>(a); });
}

void convolve_tiles(const Args& a) { convolve<std::conditional_t<kHasTiles, TiledQuads, Quads>>(a); }

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d, npu::integer::Args, npu::integer::convolve<npu::integer::Pairs>)
NPU_KERNEL(integer_conv2d_bytes, npu::integer::Args, npu::integer::convolve<npu::integer::Quads>)
NPU_KERNEL(integer_conv2d_tiles, npu::integer::Args, npu::integer::convolve_tiles)
