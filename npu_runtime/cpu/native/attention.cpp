// softmax(scale · q kᵀ + mask) v with shared key heads, without a [M, S] matrix in memory.
#include "attention_rows.h"
#include "attention_tiles.h"

namespace npu {
namespace {

// Up to this many queries per head reading keys where they lie beats packing them first.
constexpr int64_t kFewQueries = 4;

void attention(const AttentionArgs& a) {
  with_type(a.q.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    with_codes<T>(a.format, [&](auto* stored) {
      using K = std::remove_pointer_t<decltype(stored)>;
      if (a.queries() <= kFewQueries) attention_by_rows<T, K>(a);
      else attention_by_tiles<T, K>(a);
    });
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(attention, npu::AttentionArgs, npu::attention)
