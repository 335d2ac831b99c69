// Kernels on bytes without products: quantizing, dequantizing, sums, max pooling and means of maps.
#include "integers/integer_args.h"
#include "pool.h"
#include "scratch.h"

namespace npu::integer {
namespace {

constexpr int64_t kGrain = 16 << 10;  // elements that are worth a task

// Calls body(begin, end) for parts of [0, n) that are whole vectors, but for the last.
template <class F>
void in_parts(int64_t n, const F& body) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end, int) { body(begin, end); });
}

int64_t elements(const Args& a) { return a.batch * a.groups * a.in_h * a.in_w; }

// out[i][c] = codes[c][i]. The number of channels may be known when this is compiled.
template <class Channels, class Out>
NPU_INLINE void interleave(const Out* codes, int64_t pitch, int64_t width, Channels channels, Out* out) {
  for (int64_t i = 0; i < width; ++i)
    for (int64_t c = 0; c < channels; ++c) out[i * channels + c] = codes[c * pitch + i];
}

// x has its channels apart; the result has them innermost.
template <class Out>
void quantize_planes(const Args& a) {
  const int64_t channels = a.groups, width = a.in_w, plane = a.in_h * width, pitch = round_up(width, kLanes);
  parallel_for(a.batch * a.in_h, std::max<int64_t>(1, kGrain / (width * channels)),
               [&](int64_t begin, int64_t end, int) {
    const Rounding round(a);
    const char* x = a.x;
    const Dtype type = static_cast<Dtype>(a.x_type);
    Out* codes = thread_scratch().get<Out>(channels * pitch * sizeof(Out));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t item = row / a.in_h, y = row % a.in_h;
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t line = (item * channels + c) * plane + y * width;
        for (int64_t i = 0; i < width; i += kLanes)
          store_bytes(codes + c * pitch + i, round(load_any(x, type, line + i, width - i)), kLanes);
      }
      Out* out = reinterpret_cast<Out*>(a.out) + row * width * channels;
      if (channels == 3) interleave(codes, pitch, width, std::integral_constant<int64_t, 3>(), out);
      else interleave(codes, pitch, width, channels, out);
    }
  });
}

// kernel_h says whether x has its channels apart.
void quantize(const Args& a) {
  if (a.kernel_h) return with_bytes(a.out_type, [&](auto* type) {
    quantize_planes<std::remove_pointer_t<decltype(type)>>(a);
  });
  const Rounding round(a);
  in_parts(elements(a), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kLanes)
      store_result(a, round, i, load_any(a.x, static_cast<Dtype>(a.x_type), i, end - i), end - i);
  });
}

void dequantize(const Args& a) {
  in_parts(elements(a), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kLanes) {
      const Vec value = load_stored(a.x, a.x_type, i, end - i, a.x_scale, a.zero_point);
      store_any(a.out, static_cast<Dtype>(a.out_type), i, value, end - i);
    }
  });
}

void add(const Args& a) {
  const Rounding round(a);
  in_parts(elements(a), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kLanes) {
      const Vec x = load_stored(a.x, a.x_type, i, end - i, a.x_scale, a.zero_point);
      const Vec other = load_stored(a.residual, a.residual_type, i, end - i, a.residual_scale, a.residual_zero_point);
      store_result(a, round, i, apply(a.activation, x + other), end - i);
    }
  });
}

// Bytes of a vector register's length, whose lanes are compared as they are.
template <class X>
void pool_line(const Args& a, const X* image, int64_t y, X* out) {
  typedef X Lanes __attribute__((vector_size(4 * kLanes)));
  constexpr int64_t kWidth = 4 * kLanes;
  const int64_t channels = a.groups;
  for (int64_t x = 0; x < a.out_w; ++x, out += channels) {
    bool first = true;
    for (int64_t ky = 0; ky < a.kernel_h; ++ky)
      for (int64_t kx = 0; kx < a.kernel_w; ++kx) {
        const int64_t in_y = y * a.stride_h - a.pad_top + ky * a.dilation_h;
        const int64_t in_x = x * a.stride_w - a.pad_left + kx * a.dilation_w;
        if (in_y < 0 || in_y >= a.in_h || in_x < 0 || in_x >= a.in_w) continue;
        const X* from = image + (in_y * a.in_w + in_x) * channels;
        if (first) {
          std::memcpy(out, from, channels * sizeof(X));
          first = false;
          continue;
        }
        int64_t c = 0;
        for (; c + kWidth <= channels; c += kWidth) {
          const Lanes best = load_bits<Lanes>(out + c), other = load_bits<Lanes>(from + c);
          const Lanes chosen = best > other ? best : other;
          std::memcpy(out + c, &chosen, sizeof(chosen));
        }
        for (; c < channels; ++c) out[c] = std::max(out[c], from[c]);
      }
  }
}

void max_pool(const Args& a) {
  with_bytes(a.x_type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    parallel_for(a.batch * a.out_h, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t line = begin; line < end; ++line) {
        const X* image = reinterpret_cast<const X*>(a.x) + line / a.out_h * a.in_h * a.in_w * a.groups;
        pool_line(a, image, line % a.out_h, reinterpret_cast<X*>(a.out) + line * a.out_w * a.groups);
      }
    });
  });
}

// `x_scale` is that of x divided by the elements of a map.
void mean(const Args& a) {
  const Rounding round(a);
  const int64_t channels = a.groups, plane = a.in_h * a.in_w, blocks = (channels + kLanes - 1) / kLanes;
  with_bytes(a.x_type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    parallel_for(a.batch * blocks, std::max<int64_t>(1, kGrain / (plane * kLanes)), [&](int64_t begin, int64_t end, int) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t item = task / blocks, c = task % blocks * kLanes;
        const X* from = reinterpret_cast<const X*>(a.x) + item * plane * channels + c;
        IVec sum{};
        for (int64_t p = 0; p < plane; ++p) sum += load_bytes(from + p * channels, channels - c) - a.zero_point;
        store_result(a, round, item * channels + c, to_floats(sum) * a.x_scale, channels - c);
      }
    });
  });
}

}  // namespace
}  // namespace npu::integer

NPU_KERNEL(integer_quantize, npu::integer::Args, npu::integer::quantize)
NPU_KERNEL(integer_dequantize, npu::integer::Args, npu::integer::dequantize)
NPU_KERNEL(integer_add, npu::integer::Args, npu::integer::add)
NPU_KERNEL(integer_max_pool2d, npu::integer::Args, npu::integer::max_pool)
NPU_KERNEL(integer_mean, npu::integer::Args, npu::integer::mean)
