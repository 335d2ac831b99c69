// Sums, means and Euclidean norms over dimensions, in float32.
#include <cmath>

#include "rows.h"

namespace npu {
namespace {

enum class Reduction : int64_t { sum, mean, norm };

// out[1, I, J, K] = the sums, means or norms of x[I, J, K, R] along its last dimension.
struct ReductionArgs {
  View x, out;
  Reduction reduction;
};

// So many terms are added up before their sum is added to others, so that little is lost to rounding.
constexpr int64_t kTerms = 512;

template <bool squares>
NPU_INLINE Vec term(Vec x) {
  return squares ? x * x : x;
}

// The sums of `count` neighbours: vectors of them are added.
template <bool squares, class T>
Vec add_neighbours(const T* x, int64_t terms, int64_t stride, int64_t count) {
  Vec sum{};
  for (int64_t first = 0; first < terms; first += kTerms) {
    Vec part{};
    for (int64_t r = first; r < std::min(first + kTerms, terms); ++r) part += term<squares>(load_n(x + r * stride, count));
    sum += part;
  }
  return sum;
}

// One sum: vectors of its terms are added.
template <bool squares, class T>
float add_terms(const T* x, int64_t terms, int64_t stride) {
  Vec sum{};
  for (int64_t first = 0; first < terms; first += kTerms * kLanes) {
    Vec part{};
    for (int64_t r = first; r < std::min(first + kTerms * kLanes, terms); r += kLanes) {
      const T* at = x + r * stride;
      part += term<squares>(stride == 1 ? load_n(at, terms - r) : load_strided<0>(at, stride, terms - r));
    }
    sum += part;
  }
  return sum_lanes(sum);
}

template <Reduction reduction>
void reduce_by(const ReductionArgs& a) {
  constexpr bool squares = reduction == Reduction::norm;
  const int64_t terms = a.x.size[3], stride = a.x.stride[3], step = a.x.stride[2], to_step = a.out.stride[3];
  const auto finish = [&](Vec v) __attribute__((always_inline)) {
    if constexpr (reduction == Reduction::mean) v /= splat(float(terms));
    if constexpr (reduction == Reduction::norm)
      for (int i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
    return v;
  };
  const bool by_neighbours = step == 1 && to_step == 1 && stride != 1;
  const int64_t width = by_neighbours ? int64_t(kLanes) : 1, groups = divide_up(a.out.size[3], width);
  const int64_t tasks = a.out.size[1] * a.out.size[2] * groups;
  with_type(a.x.dtype, [&](auto* type) {
    parallel_for(tasks, rows_in_chunk(tasks, width * terms), [&](int64_t begin, int64_t end, int) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t i = task / groups / a.out.size[2], j = task / groups % a.out.size[2], k = task % groups * width;
        const auto* x = reinterpret_cast<decltype(type)>(a.x.data) + offset(a.x, i, j, 0) + k * step;
        const int64_t to = offset(a.out, 0, i, j) + k * to_step, count = std::min(width, a.out.size[3] - k);
        const Vec sums = by_neighbours ? add_neighbours<squares>(x, terms, stride, count)
                                       : splat(add_terms<squares>(x, terms, stride));
        store_any(a.out.data, a.out.dtype, to, finish(sums), count);
      }
    });
  });
}

void reduce(const ReductionArgs& a) {
  switch (a.reduction) {
    case Reduction::sum: return reduce_by<Reduction::sum>(a);
    case Reduction::mean: return reduce_by<Reduction::mean>(a);
    case Reduction::norm: return reduce_by<Reduction::norm>(a);
  }
}

}  // namespace
}  // namespace npu

NPU_KERNEL(reduce, npu::ReductionArgs, npu::reduce)
