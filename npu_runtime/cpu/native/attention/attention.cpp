// softmax(scale · q kᵀ + mask) v with shared key heads, without a [M, S] matrix in memory.
#include "attention/attention_paged.h"

namespace npu {
namespace {

void attention(const AttentionOperands& operands) {
  const AttentionArgs a{operands};
  with_type(a.q.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    with_codes<T>(a.format, [&](auto* stored) {
      using K = std::remove_pointer_t<decltype(stored)>;
      if (a.queries() <= kFewQueries) attention_by_rows<T, K>(a);
      else attention_by_tiles<T, K>(a);
    });
  });
}

void attention_over_pages(const PagedArgs& a) {
  with_type(a.q.dtype, [&](auto* type) { paged_attention<std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(attention, npu::AttentionOperands, npu::attention)
NPU_KERNEL(paged_attention, npu::PagedArgs, npu::attention_over_pages)
