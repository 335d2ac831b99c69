// out = activation(a), or what `combined` makes of that, b and c: additions, products, gated activations, casts and others
// are one kernel. Gates within limits are another one.
#include "activation.h"
#include "rows.h"

namespace npu {
namespace {

// Numbered as COMBINATIONS in pointwise.py.
enum class Combine : int64_t { none, add, multiply, divide, scale_shift, add_relu, scale_below_zero, at_least };

struct PointwiseArgs {
  View a, b, c, out;  // of out's size; the last stride of out is 1
  Activation activation;
  Combine combine;
};

struct ClampedGateArgs {
  View a, b, out;  // of out's size; the last stride of out is 1
  float alpha, limit;
};

// In these orders of the operands NaN passes through.
template <Combine combine>
NPU_INLINE Vec combined(Vec a, Vec b, Vec c) {
  switch (combine) {
    case Combine::none: return a;
    case Combine::add: return a + b;
    case Combine::multiply: return a * b;
    case Combine::divide: return a / b;
    case Combine::scale_shift: return a * b + c;
    case Combine::add_relu: return max(Vec{}, a + b);
    case Combine::scale_below_zero: return a > 0.0f ? a : a * b;
    case Combine::at_least: return max(b, a);
  }
}

template <Combine kind>
struct CombineTag {
  static constexpr Combine value = kind;
};

// Calls body with the compile-time counterpart of `combine`.
template <class F>
NPU_INLINE void with_combine(Combine combine, const F& body) {
  switch (combine) {
    case Combine::none: return body(CombineTag<Combine::none>());
    case Combine::add: return body(CombineTag<Combine::add>());
    case Combine::multiply: return body(CombineTag<Combine::multiply>());
    case Combine::divide: return body(CombineTag<Combine::divide>());
    case Combine::scale_shift: return body(CombineTag<Combine::scale_shift>());
    case Combine::add_relu: return body(CombineTag<Combine::add_relu>());
    case Combine::scale_below_zero: return body(CombineTag<Combine::scale_below_zero>());
    case Combine::at_least: return body(CombineTag<Combine::at_least>());
  }
}

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
  const View &a = args.a, &b = args.b, &c = args.c, &out = args.out;
  for_runs(out.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const int64_t row_a = offset(a, i, j, k), row_b = offset(b, i, j, k), row_c = offset(c, i, j, k);
    const int64_t row_out = offset(out, i, j, k);
    for (int64_t x = begin; x < end; x += kLanes) {
      const int64_t count = end - x;
      const Vec first = activate<activation>(read_run<Access>(a, row_a, x, count));
      const Vec second = b.data ? read_run<Access>(b, row_b, x, count) : Vec{};
      const Vec third = c.data ? read_run<Access>(c, row_c, x, count) : Vec{};
      with_combine(args.combine, [&](auto tag) {
        Access::write(out, row_out + x, combined<decltype(tag)::value>(first, second, third), count);
      });
    }
  });
}

// What the operands combine to, all of one type: the first one's neighbours follow each other, and the others' do too or are
// one number.
template <class T, Combine combine>
void run_neighbours(const PointwiseArgs& args) {
  const View &a = args.a, &b = args.b, &c = args.c, &out = args.out;
  constexpr bool has_second = combine != Combine::none, has_third = combine == Combine::scale_shift;
  for_runs(out.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const T* x = reinterpret_cast<const T*>(a.data) + offset(a, i, j, k);
    const T* y = reinterpret_cast<const T*>(b.data) + offset(b, i, j, k);
    const T* z = reinterpret_cast<const T*>(c.data) + offset(c, i, j, k);
    T* to = reinterpret_cast<T*>(out.data) + offset(out, i, j, k);
    const bool numbers = has_second && b.stride[3] == 0;
    const Vec number = numbers ? splat(load_n(y, 1)[0]) : Vec{};
    const Vec last = has_third && numbers ? splat(load_n(z, 1)[0]) : Vec{};
    const auto results = [&]<bool kNumbers>(std::bool_constant<kNumbers>) __attribute__((always_inline)) {
      const auto result = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
        Vec second = number, third = last;
        if constexpr (has_second && !kNumbers) second = load_n(y + at, count);
        if constexpr (has_third && !kNumbers) third = load_n(z + at, count);
        return combined<combine>(load_n(x + at, count), second, third);
      };
      int64_t at = begin;
      for (; at + 2 * kLanes <= end; at += 2 * kLanes)
        store_both(to + at, kLanes, result(at, kLanes), result(at + kLanes, kLanes));
      for (; at < end; at += kLanes) store_n(to + at, result(at, end - at), end - at);
    };
    numbers ? results(std::true_type()) : results(std::false_type());
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
  const View &a = args.a, &b = args.b, &c = args.c;
  const Dtype dtype = args.out.dtype;
  const bool same = a.dtype == dtype && (!b.data || b.dtype == dtype) && (!c.data || c.dtype == dtype);
  if (!same || args.activation != Activation::none)
    return with_activation(args.activation, [&](auto tag) { run<Mixed, decltype(tag)::value>(args); });
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool in_squares = args.combine == Combine::add || args.combine == Combine::multiply;
    const bool alike = !c.data || (b.stride[3] == c.stride[3] && c.stride[3] <= 1);
    if (in_squares && (is_turned(a) || is_turned(b))) combine_squares<T>(args);
    else if (a.stride[3] != 1 || (b.data && b.stride[3] > 1) || !alike) run<Same<T>, Activation::none>(args);
    else with_combine(args.combine, [&](auto tag) { run_neighbours<T, decltype(tag)::value>(args); });
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
