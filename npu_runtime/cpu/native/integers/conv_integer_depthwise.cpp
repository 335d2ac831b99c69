// Integer convolution whose groups have one input and one output channel each: channels in the lanes, two taps at once.
//
// x keeps its zero point: taps in the padding read it, and `offsets` take what it adds to every sum off again. A weight
// is, for one pair of taps after the other, each channel's two int16.
#include "integers/integer_args.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

constexpr int64_t kSumBytes = 16 << 10;  // of the sums that are finished together

// Where the taps of a pixel lie: tap t at base + offsets[t], or, where some are in the padding, at taps[t].
template <class X>
struct Taps {
  const Args& a;
  int64_t count;
  int64_t* offsets;
  const X** taps;
  const X* zeros;

  Taps(const Args& args, char* memory) : a(args), count(a.kernel_h * a.kernel_w) {
    offsets = reinterpret_cast<int64_t*>(memory);
    taps = reinterpret_cast<const X**>(offsets + count + 1);
    X* fill = reinterpret_cast<X*>(taps + count + 1);
    std::fill(fill, fill + a.groups + kLanes, X(a.zero_point));
    zeros = fill;
    for (int64_t t = 0; t < count; ++t)
      offsets[t] = (t / a.kernel_w * a.dilation_h * a.in_w + t % a.kernel_w * a.dilation_w) * a.groups;
    offsets[count] = 0;  // beside the last of an odd number, with a weight of 0
    taps[count] = zeros;
  }
  static int64_t bytes(const Args& a) {
    return (a.kernel_h * a.kernel_w + 1) * (sizeof(X*) + sizeof(int64_t)) + a.groups + kLanes;
  }

  // The first tap of a pixel whose taps are all inside, or null.
  const X* find(const X* image, int64_t y, int64_t x) {
    const int64_t top = y * a.stride_h - a.pad_top, left = x * a.stride_w - a.pad_left;
    const X* first = image + (top * a.in_w + left) * a.groups;
    if (top >= 0 && left >= 0 && top + (a.kernel_h - 1) * a.dilation_h < a.in_h &&
        left + (a.kernel_w - 1) * a.dilation_w < a.in_w)
      return first;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t in_y = top + t / a.kernel_w * a.dilation_h, in_x = left + t % a.kernel_w * a.dilation_w;
      taps[t] = in_y >= 0 && in_y < a.in_h && in_x >= 0 && in_x < a.in_w ? first + offsets[t] : zeros;
    }
    return nullptr;
  }
};

// Sums of kVecs vectors of channels from `channel` on.
template <int kVecs, class At>
NPU_INLINE void sum_taps(const Args& a, const At& at, int64_t pairs, int64_t channel, int32_t* sums) {
  IVec sum[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) sum[v] = load_bits<IVec>(a.offsets + channel + v * kLanes);
  const int16_t* w = static_cast<const int16_t*>(a.weight) + 2 * channel;
  for (int64_t p = 0; p < pairs; ++p, w += 2 * a.groups) {
    const auto *first = at(2 * p) + channel, *second = at(2 * p + 1) + channel;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      sum[v] = add_integer_pairs(sum[v], pair_bytes(first + v * kLanes, second + v * kLanes),
                                 load_bits<ShortVec>(w + 2 * v * kLanes));
  }
  std::memcpy(sums + channel, sum, sizeof(sum));
}

template <class At>
NPU_INLINE void sum_pixel(const Args& a, const At& at, int64_t pairs, int32_t* sums) {
  const int64_t channels = a.groups;
  int64_t c = 0;
  for (; c + 2 * kLanes <= channels; c += 2 * kLanes) sum_taps<2>(a, at, pairs, c, sums);
  for (; c < channels; c += kLanes) sum_taps<1>(a, at, pairs, c, sums);
}

template <class X>
void convolve_line(const Args& a, Finish finish, int64_t line, Taps<X>& taps, int32_t* sums, int64_t together) {
  const int64_t channels = a.groups, pairs = (taps.count + 1) / 2, y = line % a.out_h;
  const X* image = reinterpret_cast<const X*>(a.x) + line / a.out_h * a.in_h * a.in_w * channels;
  for (int64_t begin = 0; begin < a.out_w; begin += together) {
    const int64_t end = std::min(begin + together, a.out_w);
    for (int64_t x = begin; x < end; ++x) {
      int32_t* own = sums + (x - begin) * channels;
      const X* base = taps.find(image, y, x);
      if (base) sum_pixel(a, [&](int64_t t) { return base + taps.offsets[t]; }, pairs, own);
      else sum_pixel(a, [&](int64_t t) { return taps.taps[t]; }, pairs, own);
    }
    finish(a, {sums, channels, line * a.out_w + begin, end - begin, 0, channels});
  }
}

void convolve_depthwise(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    const Finish finish = finish_of(a);
    const int64_t lines = a.batch * a.out_h;
    const int64_t pixel = a.groups * sizeof(int32_t), together = std::max<int64_t>(1, kSumBytes / pixel);
    parallel_for(lines, std::max<int64_t>(1, lines / (8 * num_threads())), [&](int64_t begin, int64_t end, int) {
      char* memory = thread_scratch().get<char>(together * pixel + Taps<X>::bytes(a));
      int32_t* sums = reinterpret_cast<int32_t*>(memory);
      Taps<X> taps(a, memory + together * pixel);
      for (int64_t line = begin; line < end; ++line) convolve_line(a, finish, line, taps, sums, together);
    });
  });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d_depthwise, npu::integer::Args, npu::integer::convolve_depthwise)
