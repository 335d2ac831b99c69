// Integer convolution with 3 x 3 or 5 x 5 taps whose groups have one input and one output channel each, on bytes.
//
// The bytes of a column of taps are one or two quads of a channel; those that are no tap have the weight 0. Neighbouring
// pixels share columns, which are interleaved once. Bytes count from 0, int8 with 128 added; the padding is x's zero
// point, and sums begin with what that takes off again.
//
// A task is a line of a block of kWide channels; the last block begins early enough to end with the channels. Weights,
// scales, biases and offsets are stored by blocks, in the order of channels that interleave_quads() makes.
#include "integer_args.h"
#include "pool.h"

namespace npu::integer {
namespace {

constexpr int64_t kWide = 4 * kLanes;

template <int kTaps>
struct Column {
  static constexpr int kQuads = (kTaps + 3) / 4;
  ByteVec quads[kQuads][4];
};

// The columns of taps of a line.
template <int kTaps, class X>
struct Line {
  const X* rows[kTaps];  // null in the padding
  int64_t channels, width, count;
  ByteVec padding;

  Line(const Args& a, const X* image, int64_t y, int64_t channel, int64_t block)
      : channels(a.groups), width(a.in_w), count(block), padding(ByteVec{} + int8_t(a.zero_point)) {
    for (int64_t r = 0; r < kTaps; ++r) {
      const int64_t in_y = y * a.stride_h - a.pad_top + r;
      rows[r] = in_y >= 0 && in_y < a.in_h ? image + in_y * width * channels + channel : nullptr;
    }
  }
  NPU_INLINE Column<kTaps> column(int64_t x) const {
    ByteVec bytes[kTaps];
    const bool inside = x >= 0 && x < width;
#pragma GCC unroll 5
    for (int r = 0; r < kTaps; ++r) {
      bytes[r] = inside && rows[r] ? load_first(rows[r] + x * channels, count) : padding;
      if constexpr (std::is_same_v<X, int8_t>) bytes[r] ^= -128;
    }
    Column<kTaps> made;
#pragma GCC unroll 2
    for (int q = 0; q < made.kQuads; ++q) {
      const auto tap = [&](int r) { return bytes[std::min(4 * q + r, kTaps - 1)]; };
      interleave_quads(tap(0), tap(1), tap(2), tap(3), made.quads[q]);
    }
    return made;
  }
};

// The columns of a pixel. Three stay in registers and move on from pixel to pixel; more are a ring in memory.
template <int kTaps, int kStride>
struct Window {
  static constexpr bool kMoves = kTaps == 3;
  static constexpr int kPlaces = kMoves ? kTaps : 8;
  static_assert(kPlaces >= kTaps + (kMoves ? 0 : kStride));
  Column<kTaps> columns[kPlaces];
  unsigned first = 0;

  NPU_INLINE Column<kTaps>& operator[](int i) { return columns[kMoves ? i : (first + i) % kPlaces]; }

  // The first columns; `next` makes one after the other.
  template <class Next>
  NPU_INLINE explicit Window(const Next& next) {
#pragma GCC unroll 5
    for (int i = kStride; i < kTaps; ++i) (*this)[i] = next();
  }
  template <class Next>
  NPU_INLINE void advance(const Next& next) {
#pragma GCC unroll 5
    for (int i = 0; i < kTaps; ++i)
      if (i + kStride >= kTaps) (*this)[kMoves ? i : i + kStride] = next();
      else if (kMoves) (*this)[i] = (*this)[i + kStride];
    first += kStride;
  }
};

template <int kTaps, int kStride, class X, class Out>
void convolve_line(const Args& a, int64_t line, int64_t block) {
  constexpr int kQuads = Column<kTaps>::kQuads;
  const int64_t channels = a.groups, channel = std::clamp<int64_t>(block * kWide, 0, std::max<int64_t>(0, channels - kWide));
  const int64_t y = line % a.out_h, count = std::min(kWide, channels);
  const X* image = reinterpret_cast<const X*>(a.x) + line / a.out_h * a.in_h * a.in_w * channels;
  const Line<kTaps, X> taps(a, image, y, channel, count);
  const int8_t* weights = static_cast<const int8_t*>(a.weight) + block * kTaps * kQuads * 4 * kWide;
  const int32_t* offsets = a.offsets + block * kWide;
  const float *scales = a.scales + block * kWide, *biases = a.bias + block * kWide;
  const Rounding round = Rounding::limited(a);
  Out* out = reinterpret_cast<Out*>(a.out) + line * a.out_w * channels + channel;
  int64_t x_next = -a.pad_left;
  const auto next = [&]() __attribute__((always_inline)) { return taps.column(x_next++); };
  Window<kTaps, kStride> window(next);
  for (int64_t x = 0; x < a.out_w; ++x, out += channels) {
    // What follows is at fixed distances from these, whose sums g++ would otherwise hold in registers.
    weights = not_known(weights), offsets = not_known(offsets), scales = not_known(scales), biases = not_known(biases);
    window.advance(next);
    IVec codes[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      IVec sum = load_bits<IVec>(offsets + v * kLanes);
#pragma GCC unroll 5
      for (int i = 0; i < kTaps; ++i)
#pragma GCC unroll 2
        for (int q = 0; q < kQuads; ++q)
          sum = add_byte_quads(sum, window[i].quads[q][v], load_bits<ByteVec>(weights + ((i * kQuads + q) * 4 + v) * kWide));
      codes[v] = round(to_floats(sum) * load(scales + v * kLanes) + load(biases + v * kLanes));
    }
    store_interleaved(out, codes, count);
  }
}

template <class X, class Out>
void convolve_columns(const Args& a) {
  const int64_t blocks = (a.groups + kWide - 1) / kWide, tasks = a.batch * a.out_h * blocks;
  parallel_for(tasks, std::max<int64_t>(1, tasks / (8 * num_threads())), [&](int64_t begin, int64_t end, int) {
    const auto run = a.kernel_w == 3 ? (a.stride_w == 1 ? convolve_line<3, 1, X, Out> : convolve_line<3, 2, X, Out>)
                                     : (a.stride_w == 1 ? convolve_line<5, 1, X, Out> : convolve_line<5, 2, X, Out>);
    for (int64_t task = begin; task < end; ++task) run(a, task / blocks, task % blocks);
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
