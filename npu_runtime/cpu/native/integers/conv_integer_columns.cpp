// Integer convolution with 3 x 3 or 5 x 5 taps whose groups have one input and one output channel each, by columns of taps.
//
// Neighbouring pixels share columns, which are interleaved once: as quads of bytes, of which a column is one or two for
// each channel, or else as pairs of int16. What is no tap has the weight 0. The padding is x's zero point, and sums begin
// with what that takes off again.
//
// A task is a line of a block of channels. A last block begins early enough to end with the channels, and belongs to the
// task of the one before, some of whose results it stores again. Weights, scales, biases and offsets are stored by blocks,
// in the order of the columns' channels.
#include "integers/integer_args.h"
#include "pool.h"
#include "products/gemm.h"
#include "scratch.h"

namespace npu::integer {
namespace {

// The taps of a line, kPixels columns at once, which begin one column after the other.
template <int kTaps, int kPixels, class X>
struct Line {
  const X *rows[kTaps], *padding;
  int64_t x, width, channels, offset;
  X edge[kTaps][kPixels > 1 ? 4 * kLanes : 1];

  // `all` is a row of padding.
  Line(const Args& a, const X* image, const X* all, int64_t y, int64_t channel)
      : padding(all), x(-a.pad_left), width(a.in_w), channels(a.groups), offset(x * channels) {
    for (int64_t r = 0; r < kTaps; ++r) {
      const int64_t in_y = y * a.stride_h - a.pad_top + r;
      rows[r] = in_y >= 0 && in_y < a.in_h ? image + in_y * width * channels + channel : padding;
    }
  }
  // Calls read with a function that tells where each tap of what comes next is.
  template <class Read>
  NPU_INLINE void next(const Read& read) {
    const bool inside = x >= 0 && x + kPixels <= width;
    if constexpr (kPixels > 1)
      if (!inside) fill_edge();
    read([&](int r) { return inside ? rows[r] + offset : kPixels > 1 ? edge[r] : padding; });
    offset += channels;
    ++x;
  }
  // Columns of which some are in the padding.
  __attribute__((noinline)) void fill_edge() {
    for (int64_t r = 0; r < kTaps; ++r)
      for (int64_t i = 0; i < kPixels; ++i) {
        const bool inside = x + i >= 0 && x + i < width;
        std::memcpy(edge[r] + i * channels, inside ? rows[r] + offset + i * channels : padding, channels);
      }
  }
};

// A column in bytes from 0 to 255, int8 with 128 added. Channels are in the order that interleave_quads() makes, and may
// be fewer than kWide.
template <int kTaps>
struct QuadColumn {
  static constexpr int64_t kWide = 4 * kLanes;
  static constexpr int kVecs = 4, kParts = (kTaps + 3) / 4;
  ByteVec parts[kParts][kVecs];

  template <class X, class Tap>
  NPU_INLINE void read(const Tap& at, int64_t count) {
    ByteVec bytes[kTaps];
#pragma GCC unroll 5
    for (int r = 0; r < kTaps; ++r) {
      bytes[r] = load_first(at(r), count);
      if constexpr (std::is_same_v<X, int8_t>) bytes[r] ^= -128;
    }
#pragma GCC unroll 2
    for (int q = 0; q < kParts; ++q) {
      const auto tap = [&](int r) { return bytes[std::min(4 * q + r, kTaps - 1)]; };
      interleave_quads(tap(0), tap(1), tap(2), tap(3), parts[q]);
    }
  }
  NPU_INLINE static IVec add(IVec sum, ByteVec part, ByteVec weights) { return add_byte_quads(sum, part, weights); }
  template <class Out>
  NPU_INLINE static void store(Out* out, const Vec* results, int64_t count, const Rounding& round) {
    IVec numbers[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) numbers[v] = round.numbers(results[v]);
    store_interleaved(out, numbers, count, round.codes);
  }
};

// A column in int16, of a vector of channels.
template <int kTaps>
struct PairColumn {
  static constexpr int64_t kWide = kLanes;
  static constexpr int kVecs = 1, kParts = (kTaps + 1) / 2;
  ShortVec parts[kParts][kVecs];

  template <class X, class Tap>
  NPU_INLINE void read(const Tap& at, int64_t) {
#pragma GCC unroll 2
    for (int p = 0; p < kTaps / 2; ++p) parts[p][0] = pair_bytes(at(2 * p), at(2 * p + 1));
    parts[kTaps / 2][0] = bit_cast<ShortVec>(load_bytes(at(kTaps - 1)));  // beside its sign
  }
  NPU_INLINE static IVec add(IVec sum, ShortVec part, ByteVec weights) {
    return add_integer_pairs(sum, part, bit_cast<ShortVec>(weights));
  }
  template <class Out>
  NPU_INLINE static void store(Out* out, const Vec* results, int64_t, const Rounding& round) {
    store_bytes(out, round(results[0]), kLanes);
  }
};

template <int kTaps>
using Column = std::conditional_t<kHasByteQuads, QuadColumn<kTaps>, PairColumn<kTaps>>;

// A copy in which g++ sees registers.
template <class Of>
NPU_INLINE void copy_parts(const Of& from, Of& to) {
#pragma GCC unroll 4
  for (int i = 0; i < Of::kParts * Of::kVecs; ++i)
    to.parts[i / Of::kVecs][i % Of::kVecs] = from.parts[i / Of::kVecs][i % Of::kVecs];
}

// The columns of a pixel. Three stay in registers and move on from pixel to pixel; more are a ring in memory.
template <int kTaps, int kStride>
struct Window {
  static constexpr bool kMoves = kTaps == 3;
  static constexpr int kPlaces = kMoves ? kTaps : 8;
  static_assert(kPlaces >= kTaps + (kMoves ? 0 : kStride));
  Column<kTaps> columns[kPlaces];
  unsigned first = 0;

  NPU_INLINE Column<kTaps>& operator[](int i) { return columns[kMoves ? i : (first + i) % kPlaces]; }

  // The first columns; `next` reads one after the other.
  template <class Next>
  NPU_INLINE explicit Window(const Next& next) {
#pragma GCC unroll 5
    for (int i = kStride; i < kTaps; ++i) next((*this)[i]);
  }
  template <class Next>
  NPU_INLINE void advance(const Next& next) {
#pragma GCC unroll 5
    for (int i = 0; i < kTaps; ++i)
      if (i + kStride >= kTaps) next((*this)[kMoves ? i : i + kStride]);
      else if (kMoves) copy_parts(columns[i + kStride], columns[i]);
    first += kStride;
  }
};

// Two pixels whose channels make a block are convolved together. As with a stride of 2, the next two share one column.
template <int kTaps, int kStride, int kPixels, class X, class Out>
void convolve_line(const Args& a, const X* padding, int64_t line, int64_t block) {
  using Of = Column<kTaps>;
  constexpr int kParts = Of::kParts, kVecs = Of::kVecs;
  constexpr int64_t kWide = Of::kWide, kBytes = sizeof(ByteVec);
  const int64_t channels = a.groups, channel = std::clamp<int64_t>(block * kWide, 0, std::max<int64_t>(0, channels - kWide));
  const int64_t y = line % a.out_h, count = std::min(kWide, kPixels * channels);
  const X* image = reinterpret_cast<const X*>(a.x) + line / a.out_h * a.in_h * a.in_w * channels;
  Line<kTaps, kPixels, X> taps(a, image, padding, y, channel);
  const char* weights = static_cast<const char*>(a.weight) + block * kTaps * kParts * kVecs * kBytes;
  const int32_t* offsets = a.offsets + block * kWide;
  const float *scales = a.scales + block * kWide, *biases = a.bias + block * kWide;
  const Rounding round = Rounding::limited(a);
  Out* out = reinterpret_cast<Out*>(a.out) + line * a.out_w * channels + channel;
  const auto next = [&](Of& column) __attribute__((always_inline)) {
    taps.next([&](const auto& at) __attribute__((always_inline)) { column.template read<X>(at, count); });
  };
  Window<kTaps, kStride * kPixels> window(next);
  for (int64_t x = 0; x < a.out_w; x += kPixels, out += kPixels * channels) {
    // What follows is at fixed distances from these, whose sums g++ would otherwise hold in registers.
    weights = not_known(weights);
    if constexpr (kVecs > 1) offsets = not_known(offsets), scales = not_known(scales), biases = not_known(biases);
    window.advance(next);
    Vec results[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      IVec sum = load_bits<IVec>(offsets + v * kLanes);
#pragma GCC unroll 5
      for (int i = 0; i < kTaps; ++i)
#pragma GCC unroll 3
        for (int p = 0; p < kParts; ++p)
          sum = Of::add(sum, window[i].parts[p][v], load_bits<ByteVec>(weights + ((i * kParts + p) * kVecs + v) * kBytes));
      results[v] = to_floats(sum) * load(scales + v * kLanes) + load(biases + v * kLanes);
    }
    Of::store(out, results, kPixels == 1 ? count : std::min(count, (a.out_w - x) * channels), round);
  }
}

template <int kTaps, class X, class Out>
auto line_of(const Args& a) {
  if (a.stride_w == 2) return convolve_line<kTaps, 2, 1, X, Out>;
  if constexpr (kHasByteQuads)
    if (2 * a.groups == Column<kTaps>::kWide) return convolve_line<kTaps, 1, 2, X, Out>;
  return convolve_line<kTaps, 1, 1, X, Out>;
}

template <class X, class Out>
void convolve_columns(const Args& a) {
  constexpr int64_t kWide = Column<3>::kWide;
  const int64_t blocks = divide_up(a.groups, kWide);
  const int64_t line_tasks = a.groups > kWide ? a.groups / kWide : 1, tasks = a.batch * a.out_h * line_tasks;
  parallel_for(tasks, std::max<int64_t>(1, tasks / (8 * num_threads())), [&](int64_t begin, int64_t end, int) {
    const auto run = a.kernel_w == 3 ? line_of<3, X, Out>(a) : line_of<5, X, Out>(a);
    X* padding = thread_scratch().get<X>(a.in_w * a.groups);
    std::fill(padding, padding + a.in_w * a.groups, X(a.zero_point));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t line = task / line_tasks, block = task % line_tasks;
      run(a, padding, line, block);
      if (block == line_tasks - 1 && line_tasks < blocks) run(a, padding, line, line_tasks);
    }
  });
}

void convolve(const Args& a) {
  with_bytes(a.x_type, [&](auto* x) {
    with_bytes(a.out_type, [&](auto* out) {
      convolve_columns<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(out)>>(a);
    });
  });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d_columns, npu::integer::Args, npu::integer::convolve)
