// Integer convolution whose groups have one input and one output channel each: channels in the lanes, two taps at once.
//
// x keeps its zero point: taps in the padding read it, and `offsets` take what it adds to every sum off again. A weight
// is, for one pair of taps after the other, each channel's two int16.
#include "integer_args.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

// Channel by channel, the bytes of two taps as pairs of int16.
template <class X>
NPU_INLINE IVec pair_up(const X* first, const X* second) {
  typedef X Narrow __attribute__((vector_size(kLanes)));
  typedef int16_t Half __attribute__((vector_size(2 * kLanes)));
  const auto low = __builtin_convertvector(load_bits<Narrow>(first), IVec);
  const auto high = __builtin_convertvector(load_bits<Narrow>(second), IVec);
  return (low & 0xffff) | (high << 16);
}

template <class X>
void convolve_rows(const Args& a, int64_t begin, int64_t end, const X* zeros, const X** taps) {
  const int64_t channels = a.groups, count = a.kernel_h * a.kernel_w, pairs = (count + 1) / 2;
  const int64_t padded = (channels + kLanes - 1) / kLanes * kLanes;
  alignas(64) int32_t sums[4 * kLanes];
  for (int64_t line = begin; line < end; ++line) {
    const int64_t item = line / a.out_h, y = line % a.out_h;
    const X* image = reinterpret_cast<const X*>(a.x) + item * a.in_h * a.in_w * channels;
    for (int64_t x = 0; x < a.out_w; ++x) {
      for (int64_t t = 0; t < count; ++t) {
        const int64_t in_y = y * a.stride_h - a.pad_top + t / a.kernel_w * a.dilation_h;
        const int64_t in_x = x * a.stride_w - a.pad_left + t % a.kernel_w * a.dilation_w;
        const bool inside = in_y >= 0 && in_y < a.in_h && in_x >= 0 && in_x < a.in_w;
        taps[t] = inside ? image + (in_y * a.in_w + in_x) * channels : zeros;
      }
      taps[count] = zeros;  // beside the last of an odd number, with a weight of 0
      for (int64_t c = 0; c < channels; c += 4 * kLanes) {
        const int64_t here = std::min<int64_t>(4 * kLanes, channels - c);
        const auto sum_up = [&](auto vecs, int64_t from) __attribute__((always_inline)) {
          constexpr int kVecs = decltype(vecs)::value;
          IVec sum[kVecs];
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) sum[v] = load_bits<IVec>(a.offsets + from + v * kLanes);
          const int16_t* w = a.weight + 2 * from;
          for (int64_t p = 0; p < pairs; ++p, w += 2 * padded) {
            const X *first = taps[2 * p] + from, *second = taps[2 * p + 1] + from;
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v)
              sum[v] = add_products(sum[v], pair_up(first + v * kLanes, second + v * kLanes),
                                    load_bits<IVec>(w + 2 * v * kLanes));
          }
          std::memcpy(sums + (from - c), sum, sizeof(sum));
        };
        if (here == 4 * kLanes) {
          sum_up(std::integral_constant<int, 4>(), c);
        } else {
          for (int64_t i = c; i < c + here; i += kLanes) sum_up(std::integral_constant<int, 1>(), i);
        }
        finish(a, {sums, 0, line * a.out_w + x, 1, c, here});
      }
    }
  }
}

void convolve_depthwise(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    const int64_t lines = a.batch * a.out_h, taps = a.kernel_h * a.kernel_w + 1;
    parallel_for(lines, std::max<int64_t>(1, lines / (8 * num_threads())), [&](int64_t begin, int64_t end, int) {
      char* memory = thread_scratch().get<char>(taps * sizeof(X*) + a.groups + 4 * kLanes);
      X* zeros = reinterpret_cast<X*>(memory + taps * sizeof(X*));
      std::fill(zeros, zeros + a.groups + kLanes, X(a.zero_point));
      convolve_rows<X>(a, begin, end, zeros, reinterpret_cast<const X**>(memory));
    });
  });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_conv2d_depthwise, npu::integer::Args, npu::integer::convolve_depthwise)
