// Element-wise ops that the vectors of pointwise.cpp are not for: over int32 and booleans, comparisons, selections,
// quotients, and sine and cosine. They come as calls over few elements (positions, masks, tokens) between large ones.
#include <cmath>
#include <type_traits>

#include "rows.h"

namespace npu {
namespace {

enum class Op : int64_t { copy, add, sub, mul, abs, neg, eq, ne, lt, le, gt, ge, where, cos, sin, true_divide };
// NUMBER_DTYPES in numbers.py.
enum class Number : int64_t { f32 = 0, i32 = 5, boolean = 6 };

struct Operand {
  char* data;
  Number dtype;
  int64_t size[4], stride[4];
};

struct ElementwiseArgs {
  Operand condition, a, b, out;  // of out's size; a and b of one dtype, which is out's unless the op is a comparison or copy
  Op op;
};

template <class T>
NPU_INLINE T* row_of(const Operand& x, int64_t i, int64_t j, int64_t k) {
  return reinterpret_cast<T*>(x.data) + i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}

template <class In, class Out, class F>
void apply(const ElementwiseArgs& args, const F& result) {
  const Operand &c = args.condition, &a = args.a, &b = args.b, &out = args.out;
  for_runs(out.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const bool* pick = row_of<bool>(c, i, j, k);
    const In *x = row_of<In>(a, i, j, k), *y = row_of<In>(b, i, j, k);
    Out* to = row_of<Out>(out, i, j, k);
    for (int64_t e = begin; e < end; ++e)
      to[e * out.stride[3]] = result(pick + e * c.stride[3], x[e * a.stride[3]], y + e * b.stride[3]);
  });
}

// Sums of integers wrap around, as those of the reference do.
template <class T>
using Wrapping = std::conditional_t<std::is_same_v<T, int32_t>, uint32_t, T>;

template <class T>
void elementwise_of(const ElementwiseArgs& args) {
  using W = Wrapping<T>;
  using P = const T*;
  switch (args.op) {
    case Op::copy:
      switch (args.out.dtype) {
        case Number::f32: return apply<T, float>(args, [](auto, T x, P) { return float(x); });
        case Number::i32: return apply<T, int32_t>(args, [](auto, T x, P) { return int32_t(x); });
        case Number::boolean: return apply<T, bool>(args, [](auto, T x, P) { return x != T(0); });
      }
      return;
    case Op::add: return apply<T, T>(args, [](auto, T x, P y) { return T(W(x) + W(*y)); });
    case Op::sub: return apply<T, T>(args, [](auto, T x, P y) { return T(W(x) - W(*y)); });
    case Op::mul: return apply<T, T>(args, [](auto, T x, P y) { return T(W(x) * W(*y)); });
    case Op::abs:
      return apply<T, T>(args, [](auto, T x, P) {
        if constexpr (std::is_same_v<T, float>) return std::fabs(x);
        else return x < T(0) ? T(W(0) - W(x)) : x;
      });
    case Op::neg:
      return apply<T, T>(args, [](auto, T x, P) {
        if constexpr (std::is_same_v<T, float>) return -x;
        else return T(W(0) - W(x));
      });
    case Op::eq: return apply<T, bool>(args, [](auto, T x, P y) { return x == *y; });
    case Op::ne: return apply<T, bool>(args, [](auto, T x, P y) { return x != *y; });
    case Op::lt: return apply<T, bool>(args, [](auto, T x, P y) { return x < *y; });
    case Op::le: return apply<T, bool>(args, [](auto, T x, P y) { return x <= *y; });
    case Op::gt: return apply<T, bool>(args, [](auto, T x, P y) { return x > *y; });
    case Op::ge: return apply<T, bool>(args, [](auto, T x, P y) { return x >= *y; });
    case Op::where: return apply<T, T>(args, [](const bool* c, T x, P y) { return *c ? x : *y; });
    case Op::cos: return apply<T, T>(args, [](auto, T x, P) { return T(std::cos(float(x))); });
    case Op::sin: return apply<T, T>(args, [](auto, T x, P) { return T(std::sin(float(x))); });
    case Op::true_divide: return apply<T, T>(args, [](auto, T x, P y) { return T(float(x) / float(*y)); });
  }
}

void elementwise(const ElementwiseArgs& args) {
  switch (args.a.dtype) {
    case Number::f32: return elementwise_of<float>(args);
    case Number::i32: return elementwise_of<int32_t>(args);
    case Number::boolean: return elementwise_of<bool>(args);
  }
}

}  // namespace
}  // namespace npu

NPU_KERNEL(elementwise, npu::ElementwiseArgs, npu::elementwise)
