// out = activation(a), or that plus or times b: additions, products, gated activations and casts are one kernel.
#include "activation.h"
#include "rows.h"

namespace npu {
namespace {

enum class Combine : int64_t { none = 0, add = 1, multiply = 2 };

struct PointwiseArgs {
  View a, b, out;  // of out's size; the last stride of a and b is 1 or 0, that of out is 1
  Activation activation;
  Combine combine;
};

// Operands of one type, known at compile time, and of several types.
template <class T>
struct Same {
  static NPU_INLINE Vec read(const View& view, int64_t at, int64_t count) {
    return load_n(reinterpret_cast<const T*>(view.data) + at, count);
  }
  static NPU_INLINE void write(const View& view, int64_t at, Vec v, int64_t count) {
    store_n(reinterpret_cast<T*>(view.data) + at, v, count);
  }
};
struct Mixed {
  static NPU_INLINE Vec read(const View& view, int64_t at, int64_t count) {
    return load_any(view.data, view.dtype, at, count);
  }
  static NPU_INLINE void write(const View& view, int64_t at, Vec v, int64_t count) {
    store_any(view.data, view.dtype, at, v, count);
  }
};

template <class Access>
NPU_INLINE Vec read_run(const View& view, int64_t row, int64_t i, int64_t count) {
  if (view.stride[3] == 0) return splat(Access::read(view, row, 1)[0]);
  return Access::read(view, row + i, count);
}

template <class Access, Activation activation>
void run(const PointwiseArgs& args) {
  const View &a = args.a, &b = args.b, &out = args.out;
  for_runs(out.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const int64_t row_a = offset(a, i, j, k), row_b = offset(b, i, j, k), row_out = offset(out, i, j, k);
    const auto step = [&](int64_t x, int64_t count) __attribute__((always_inline)) {
      Vec value = activate<activation>(read_run<Access>(a, row_a, x, count));
      if (args.combine == Combine::add) value += read_run<Access>(b, row_b, x, count);
      if (args.combine == Combine::multiply) value *= read_run<Access>(b, row_b, x, count);
      Access::write(out, row_out + x, value, count);
    };
    int64_t x = begin;
    for (; x + kLanes <= end; x += kLanes) step(x, kLanes);
    if (x < end) step(x, end - x);
  });
}

template <class Access>
void dispatch(const PointwiseArgs& args) {
  with_activation(args.activation, [&](auto tag) { run<Access, decltype(tag)::value>(args); });
}

void pointwise(const PointwiseArgs& args) {
  const Dtype dtype = args.out.dtype;
  if (args.a.dtype != dtype || (args.combine != Combine::none && args.b.dtype != dtype)) return dispatch<Mixed>(args);
  with_type(dtype, [&](auto* type) { dispatch<Same<std::remove_pointer_t<decltype(type)>>>(args); });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(pointwise, npu::PointwiseArgs, npu::pointwise)
