// Rotary position embedding in the half-rotation form: the pair (x[d], x[d + D/2]) is turned by the angle of d.
#include "rows.h"

namespace npu {
namespace {

struct RopeArgs {
  View x, cos, sin, out;  // [B, H, T, D]; the tables' last dimension is D, or D/2 where both halves share the angles
};

void rope(const RopeArgs& a) {
  const int64_t half = a.x.size[3] / 2, second = a.cos.size[3] > half ? half : 0;
  // Runs cover the pairs; both members are read before either is written, so out may be x.
  const int64_t pairs[4] = {a.x.size[0], a.x.size[1], a.x.size[2], half};
  for_runs(pairs, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const int64_t x = offset(a.x, i, j, k), out = offset(a.out, i, j, k);
    const int64_t cos = offset(a.cos, i, j, k), sin = offset(a.sin, i, j, k);
    for (int64_t d = begin; d < end; d += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - d);
      const auto read = [&](const View& view, int64_t at) { return load_any(view.data, view.dtype, at + d, count); };
      const Vec low = read(a.x, x), high = read(a.x, x + half);
      const Vec new_low = low * read(a.cos, cos) - high * read(a.sin, sin);
      const Vec new_high = high * read(a.cos, cos + second) + low * read(a.sin, sin + second);
      store_any(a.out.data, a.out.dtype, out + d, new_low, count);
      store_any(a.out.data, a.out.dtype, out + half + d, new_high, count);
    }
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(rope, npu::RopeArgs, npu::rope)
