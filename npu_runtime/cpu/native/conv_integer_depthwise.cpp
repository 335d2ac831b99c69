// Integer convolution whose groups have one input and one output channel each: channels in the lanes, two taps at once.
//
// x keeps its zero point: taps in the padding read it, and `offsets` take what it adds to every sum off again. A weight
// is, for one pair of taps after the other, each channel's two int16.
#include "integer_args.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

// Where the taps of a pixel lie: `taps[t] + c` is channel c of tap t; and room for its sums.
template <class X>
struct Taps {
  const Args& a;
  const X* zeros;
  const X** taps;
  int64_t* offsets;  // of each tap from the first
  int32_t* sums;

  Taps(const Args& args, char* memory) : a(args) {
    const int64_t count = a.kernel_h * a.kernel_w + 1;
    sums = reinterpret_cast<int32_t*>(memory);
    taps = reinterpret_cast<const X**>(sums + (a.groups + 1) / 2 * 2);
    offsets = reinterpret_cast<int64_t*>(taps + count);
    X* fill = reinterpret_cast<X*>(offsets + count);
    std::fill(fill, fill + a.groups + kLanes, X(a.zero_point));
    zeros = fill;
    for (int64_t ky = 0, t = 0; ky < a.kernel_h; ++ky)
      for (int64_t kx = 0; kx < a.kernel_w; ++kx, ++t)
        offsets[t] = (ky * a.dilation_h * a.in_w + kx * a.dilation_w) * a.groups;
    taps[count - 1] = zeros;  // beside the last of an odd number, with a weight of 0
  }
  static int64_t bytes(const Args& a) {
    const int64_t sums = (a.groups + 1) / 2 * 2 * sizeof(int32_t);
    return sums + (a.kernel_h * a.kernel_w + 1) * (sizeof(X*) + sizeof(int64_t)) + a.groups + kLanes;
  }

  void move_to(const X* image, int64_t y, int64_t x) {
    const int64_t top = y * a.stride_h - a.pad_top, left = x * a.stride_w - a.pad_left;
    const bool inside = top >= 0 && left >= 0 && top + (a.kernel_h - 1) * a.dilation_h < a.in_h &&
                        left + (a.kernel_w - 1) * a.dilation_w < a.in_w;
    const X* first = image + (top * a.in_w + left) * a.groups;
    const int64_t count = a.kernel_h * a.kernel_w;
    if (inside) {
      for (int64_t t = 0; t < count; ++t) taps[t] = first + offsets[t];
      return;
    }
    for (int64_t ky = 0, t = 0; ky < a.kernel_h; ++ky)
      for (int64_t kx = 0; kx < a.kernel_w; ++kx, ++t) {
        const int64_t in_y = top + ky * a.dilation_h, in_x = left + kx * a.dilation_w;
        taps[t] = in_y >= 0 && in_y < a.in_h && in_x >= 0 && in_x < a.in_w ? first + offsets[t] : zeros;
      }
  }
};

// Sums of kVecs vectors of channels from `channel` on. kPairs is the number of pairs of taps, or 0 where it is `pairs`.
template <int kVecs, int kPairs, class X>
NPU_INLINE void sum_taps(const Args& a, const X* const* taps, int64_t pairs, int64_t channel, int32_t* sums) {
  IVec sum[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) sum[v] = load_bits<IVec>(a.offsets + channel + v * kLanes);
  const int16_t* w = a.weight + 2 * channel;
#pragma GCC unroll 8
  for (int64_t p = 0; p < (kPairs ? kPairs : pairs); ++p, w += 2 * a.groups) {
    const X *first = taps[2 * p] + channel, *second = taps[2 * p + 1] + channel;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      sum[v] = add_products(sum[v], pair_bytes(first + v * kLanes, second + v * kLanes),
                            load_bits<IVec>(w + 2 * v * kLanes));
  }
  std::memcpy(sums + channel, sum, sizeof(sum));
}

template <int kPairs, class X>
void convolve_line(const Args& a, Finish finish, int64_t line, Taps<X>& taps) {
  const int64_t channels = a.groups, pairs = (a.kernel_h * a.kernel_w + 1) / 2;
  const X* image = reinterpret_cast<const X*>(a.x) + line / a.out_h * a.in_h * a.in_w * channels;
  for (int64_t x = 0; x < a.out_w; ++x) {
    taps.move_to(image, line % a.out_h, x);
    int64_t c = 0;
    for (; c + 2 * kLanes <= channels; c += 2 * kLanes)
      sum_taps<2, kPairs>(a, taps.taps, pairs, c, taps.sums);
    for (; c < channels; c += kLanes) sum_taps<1, kPairs>(a, taps.taps, pairs, c, taps.sums);
    finish(a, {taps.sums, 0, line * a.out_w + x, 1, 0, channels});
  }
}

void convolve_depthwise(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    const Finish finish = finish_of(a);
    const int64_t lines = a.batch * a.out_h, pairs = (a.kernel_h * a.kernel_w + 1) / 2;
    parallel_for(lines, std::max<int64_t>(1, lines / (8 * num_threads())), [&](int64_t begin, int64_t end, int) {
      Taps<X> taps(a, thread_scratch().get<char>(Taps<X>::bytes(a)));
      for (int64_t line = begin; line < end; ++line)
        if (pairs == 5) convolve_line<5>(a, finish, line, taps);
        else convolve_line<0>(a, finish, line, taps);
    });
  });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d_depthwise, npu::integer::Args, npu::integer::convolve_depthwise)
