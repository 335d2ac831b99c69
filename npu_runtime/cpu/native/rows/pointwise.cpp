// out = activation(a), or that plus or times b: additions, products, gated activations and casts are one kernel. Gates
// within limits are another one.
#include "activation.h"
#include "rows.h"

namespace npu {
namespace {

enum class Combine : int64_t { none = 0, add = 1, multiply = 2 };

struct PointwiseArgs {
  View a, b, out;  // of out's size; the last stride of out is 1
  Activation activation;
  Combine combine;
};

struct ClampedGateArgs {
  View a, b, out;  // of out's size; the last stride of out is 1
  float alpha, limit;
};

// Operands of one type, known at compile time, and of several types.
template <class T>
struct Same {
  static NPU_INLINE Vec read(const View& view, int64_t at, int64_t count) {
    return load_n(reinterpret_cast<const T*>(view.data) + at, count);
  }
  static NPU_INLINE Vec read_strided(const View& view, int64_t at, int64_t count) {
    const T* data = reinterpret_cast<const T*>(view.data) + at;
    return view.stride[3] == 2 ? load_strided<2>(data, 2, count) : load_strided<0>(data, view.stride[3], count);
  }
  static NPU_INLINE void write(const View& view, int64_t at, Vec v, int64_t count) {
    store_n(reinterpret_cast<T*>(view.data) + at, v, count);
  }
};
struct Mixed {
  static NPU_INLINE Vec read(const View& view, int64_t at, int64_t count) {
    return load_any(view.data, view.dtype, at, count);
  }
  static NPU_INLINE Vec read_strided(const View& view, int64_t at, int64_t count) {
    Vec result;
    with_type(view.dtype, [&](auto* type) {
      result = Same<std::remove_pointer_t<decltype(type)>>::read_strided(view, at, count);
    });
    return result;
  }
  static NPU_INLINE void write(const View& view, int64_t at, Vec v, int64_t count) {
    store_any(view.data, view.dtype, at, v, count);
  }
};

template <class Access>
NPU_INLINE Vec read_run(const View& view, int64_t row, int64_t i, int64_t count) {
  if (view.stride[3] == 0) return splat(Access::read(view, row, 1)[0]);
  if (view.stride[3] == 1) return Access::read(view, row + i, count);
  return Access::read_strided(view, row + i * view.stride[3], count);
}

template <class Access, Activation activation>
void run(const PointwiseArgs& args) {
  const View &a = args.a, &b = args.b, &out = args.out;
  for_runs(out.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const int64_t row_a = offset(a, i, j, k), row_b = offset(b, i, j, k), row_out = offset(out, i, j, k);
    for (int64_t x = begin; x < end; x += kLanes) {
      const int64_t count = end - x;
      Vec value = activate<activation>(read_run<Access>(a, row_a, x, count));
      if (args.combine != Combine::none) {
        const Vec other = read_run<Access>(b, row_b, x, count);
        value = args.combine == Combine::add ? value + other : value * other;
      }
      Access::write(out, row_out + x, value, count);
    }
  });
}

// out = a + b or a * b for operands of one type whose neighbours follow each other, or are one number; b may be absent.
template <class T, Combine combine>
void run_neighbours(const PointwiseArgs& args) {
  const View &a = args.a, &b = args.b, &out = args.out;
  for_runs(out.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const T* x = reinterpret_cast<const T*>(a.data) + offset(a, i, j, k);
    const T* y = reinterpret_cast<const T*>(b.data) + offset(b, i, j, k);
    T* to = reinterpret_cast<T*>(out.data) + offset(out, i, j, k);
    const Vec number = combine != Combine::none && b.stride[3] == 0 ? splat(load_n(y, 1)[0]) : Vec{};
    const auto results = [&]<bool kNumber>(std::bool_constant<kNumber>) __attribute__((always_inline)) {
      const auto result = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
        const Vec first = load_n(x + at, count);
        if constexpr (combine == Combine::none) return first;
        const Vec second = kNumber ? number : load_n(y + at, count);
        return combine == Combine::add ? first + second : first * second;
      };
      int64_t at = begin;
      for (; at + 2 * kLanes <= end; at += 2 * kLanes)
        store_both(to + at, kLanes, result(at, kLanes), result(at + kLanes, kLanes));
      for (; at < end; at += kLanes) store_n(to + at, result(at, end - at), end - at);
    };
    combine != Combine::none && b.stride[3] == 0 ? results(std::true_type()) : results(std::false_type());
  });
}

// Whether neighbours are in a column.
NPU_INLINE bool is_turned(const View& view) { return view.data && view.stride[2] == 1 && view.stride[3] > 1; }

// kLanes rows, `at` the first one's element, of kLanes elements each. Where neighbours are in a column, columns are read
// and turned.
template <class T>
NPU_INLINE void read_square(const View& view, int64_t at, int64_t rows, int64_t count, Vec* square) {
  const T* data = reinterpret_cast<const T*>(view.data) + at;
  const bool by_columns = is_turned(view);
  const int64_t step = view.stride[by_columns ? 3 : 2], line = by_columns ? rows : count;
  if (rows < kLanes || count < kLanes || (view.stride[3] != 1 && !by_columns)) {
    for (int64_t i = 0; i < (by_columns ? count : rows); ++i)
      square[i] = by_columns ? load_n(data + i * step, line) : read_run<Same<T>>(view, at + i * step, 0, line);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = load(data + i * step);
  }
  if (by_columns) transpose(square);
}

// out = a + b or a * b where neighbours of an operand are in a column: in squares, so that cache lines are read once.
template <class T>
void combine_squares(const PointwiseArgs& args) {
  const View &a = args.a, &b = args.b, &out = args.out;
  const int64_t groups = divide_up(out.size[2], kLanes), planes = out.size[0] * out.size[1];
  const bool adds = args.combine == Combine::add;
  const int64_t grain = rows_in_chunk(planes * groups, kLanes * out.size[3]);
  parallel_for(planes * groups, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / groups / out.size[1], j = task / groups % out.size[1], k = task % groups * kLanes;
      const int64_t rows = std::min<int64_t>(kLanes, out.size[2] - k);
      const int64_t at_a = offset(a, i, j, k), at_b = offset(b, i, j, k);
      T* to = reinterpret_cast<T*>(out.data) + offset(out, i, j, k);
      for (int64_t x = 0; x < out.size[3]; x += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, out.size[3] - x);
        Vec first[kLanes], second[kLanes];
        read_square<T>(a, at_a + x * a.stride[3], rows, count, first);
        read_square<T>(b, at_b + x * b.stride[3], rows, count, second);
        if (rows == kLanes && count == kLanes) {
#pragma GCC unroll 16
          for (int r = 0; r < kLanes; ++r)
            store(to + r * out.stride[2] + x, adds ? first[r] + second[r] : first[r] * second[r]);
        } else {
          for (int64_t r = 0; r < rows; ++r)
            store_n(to + r * out.stride[2] + x, adds ? first[r] + second[r] : first[r] * second[r], count);
        }
      }
    }
  });
}

// Types are known at compile time where little but loading and storing is to be done.
void pointwise(const PointwiseArgs& args) {
  const Dtype dtype = args.out.dtype;
  const bool same = args.a.dtype == dtype && (args.combine == Combine::none || args.b.dtype == dtype);
  if (!same || args.activation != Activation::none)
    return with_activation(args.activation, [&](auto tag) { run<Mixed, decltype(tag)::value>(args); });
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool combines = args.combine != Combine::none;
    if (combines && (is_turned(args.a) || is_turned(args.b))) combine_squares<T>(args);
    else if (args.a.stride[3] != 1 || (combines && args.b.stride[3] > 1)) run<Same<T>, Activation::none>(args);
    else if (!combines) run_neighbours<T, Combine::none>(args);
    else if (args.combine == Combine::add) run_neighbours<T, Combine::add>(args);
    else run_neighbours<T, Combine::multiply>(args);
  });
}

template <class Access>
void run_clamped(const ClampedGateArgs& args) {
  const View &a = args.a, &b = args.b, &out = args.out;
  const Vec high = splat(args.limit), low = splat(-args.limit);
  for_runs(out.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const int64_t row_a = offset(a, i, j, k), row_b = offset(b, i, j, k), row_out = offset(out, i, j, k);
    for (int64_t x = begin; x < end; x += kLanes) {
      const int64_t count = end - x;
      const Vec gate = min(high, read_run<Access>(a, row_a, x, count));  // in this order NaN passes through
      const Vec up = min(high, max(low, read_run<Access>(b, row_b, x, count)));
      Access::write(out, row_out + x, times_sigmoid(gate, args.alpha * gate) * (up + 1.0f), count);
    }
  });
}

// out = g sigmoid(alpha g) (u + 1), where g is a, but at most limit, and u is b, but between -limit and limit.
void clamped_silu_mul(const ClampedGateArgs& args) {
  const Dtype dtype = args.out.dtype;
  if (args.a.dtype != dtype || args.b.dtype != dtype) return run_clamped<Mixed>(args);
  with_type(dtype, [&](auto* type) { run_clamped<Same<std::remove_pointer_t<decltype(type)>>>(args); });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(pointwise, npu::PointwiseArgs, npu::pointwise)
NPU_KERNEL(clamped_silu_mul, npu::ClampedGateArgs, npu::clamped_silu_mul)
