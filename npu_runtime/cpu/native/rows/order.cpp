// The places of a row's elements in sorted order.
#include <algorithm>

#include "rows.h"
#include "scratch.h"

namespace npu {
namespace {

struct OrderArgs {
  View x, out;  // matrices with contiguous rows; out is int32
  int64_t descending;
};

// A number that is less the less x is: zeros of both signs are equal, and so are all NaN, which are above all others.
uint32_t rank_of(float x) {
  if (x != x) return ~0u;
  const uint32_t bits = bit_cast<uint32_t>(x == 0 ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// With an element's place behind its rank no two words are equal, so any algorithm keeps the order of equal elements.
void argsort(const OrderArgs& a) {
  const int64_t n = a.x.size[3];
  const uint32_t turn = a.descending ? ~0u : 0;
  for_rows(a.x.size[2], 8 * n, [&](int64_t row) {
    uint64_t* words = thread_scratch().get<uint64_t>(n * sizeof(uint64_t));
    for (int64_t i = 0; i < n; ++i) {
      const float x = load_any(a.x.data, a.x.dtype, row * a.x.stride[2] + i, 1)[0];
      words[i] = uint64_t(rank_of(x) ^ turn) << 32 | uint64_t(i);
    }
    std::sort(words, words + n);
    int32_t* out = reinterpret_cast<int32_t*>(a.out.data) + row * a.out.stride[2];
    for (int64_t i = 0; i < n; ++i) out[i] = int32_t(words[i]);
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(argsort, npu::OrderArgs, npu::argsort)
