// The place of a row's greatest or least element.
#include "rows.h"

namespace npu {
namespace {

struct ExtremeArgs {
  const char* data;  // rows that follow each other
  int32_t* out;
  int64_t rows, columns;
  Dtype dtype;
  int64_t least;
};

// The first place of the greatest of sign * x, or of the first NaN.
template <class T>
int32_t place_of_greatest(const T* row, int64_t n, float sign) {
  Vec best = splat(-INFINITY);
  IVec missing{};  // lanes that have met a NaN
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec x = load(row + i) * sign;
    missing |= x != x;
    best = x > best ? x : best;
  }
  float greatest = max_lanes(best);
  bool has_nan = any(missing);
  for (; i < n; ++i) {
    const float x = load_n(row + i, 1)[0] * sign;
    has_nan |= x != x;
    greatest = std::max(greatest, x);
  }
  const auto is_wanted = [&](auto x) { return has_nan ? x != x : x == greatest; };
  for (i = 0; i + kLanes <= n && !any(is_wanted(load(row + i) * sign)); i += kLanes) {
  }
  while (i < n && !is_wanted(load_n(row + i, 1)[0] * sign)) ++i;
  return int32_t(i);
}

void place_of_extreme(const ExtremeArgs& a) {
  with_type(a.dtype, [&](auto* type) {
    const auto* data = reinterpret_cast<decltype(+type)>(const_cast<char*>(a.data));
    for_rows(a.rows, a.columns, [&](int64_t row) {
      a.out[row] = place_of_greatest(data + row * a.columns, a.columns, a.least ? -1.0f : 1.0f);
    });
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(place_of_extreme, npu::ExtremeArgs, npu::place_of_extreme)
