// Sums over dimensions, in float32.
#include "rows.h"

namespace npu {
namespace {

// out[1, I, J, K] = the sums of x[I, J, K, R] along its last dimension.
struct SumArgs {
  View x, out;
};

// The sums of `count` neighbours: vectors of them are added.
template <class T>
Vec add_neighbours(const T* x, int64_t terms, int64_t stride, int64_t count) {
  Vec sum{};
  for (int64_t r = 0; r < terms; ++r) sum += load_n(x + r * stride, count);
  return sum;
}

// One sum: vectors of its terms are added.
template <class T>
float add_terms(const T* x, int64_t terms, int64_t stride) {
  Vec sum{};
  for (int64_t r = 0; r < terms; r += kLanes) {
    const T* first = x + r * stride;
    sum += stride == 1 ? load_n(first, terms - r) : load_strided<0>(first, stride, terms - r);
  }
  return sum_lanes(sum);
}

void sum(const SumArgs& a) {
  const int64_t terms = a.x.size[3], stride = a.x.stride[3], step = a.x.stride[2], to_step = a.out.stride[3];
  with_type(a.x.dtype, [&](auto* type) {
    for_runs(a.out.size, [&](int64_t, int64_t i, int64_t j, int64_t begin, int64_t end) {
      const auto* x = reinterpret_cast<decltype(type)>(a.x.data) + offset(a.x, i, j, 0);
      const int64_t to = offset(a.out, 0, i, j);
      if (step == 1 && to_step == 1 && stride != 1) {
        for (int64_t k = begin; k < end; k += kLanes)
          store_any(a.out.data, a.out.dtype, to + k, add_neighbours(x + k, terms, stride, end - k), end - k);
      } else {
        for (int64_t k = begin; k < end; ++k)
          store_any(a.out.data, a.out.dtype, to + k * to_step, splat(add_terms(x + k * step, terms, stride)), 1);
      }
    });
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(sum, npu::SumArgs, npu::sum)
