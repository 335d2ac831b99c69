#include "conv_gemm.h"

#include <array>
#include <utility>

namespace npu::conv {
namespace {

template <int N, bool kPairs, std::size_t... M>
constexpr std::array<Multiply, sizeof...(M)> kernels(std::index_sequence<M...>) {
  return {&multiply<static_cast<int>(M) + 1, N, kPairs>...};
}

template <bool kPairs>
Multiply find_kernel(int64_t m, int64_t n) {
  static constexpr auto one = kernels<1, kPairs>(std::make_index_sequence<kChannelRows>());
  static constexpr auto two = kernels<2, kPairs>(std::make_index_sequence<kChannelRows>());
  return n == 1 ? one[m - 1] : two[m - 1];
}

}  // namespace

Multiply channel_kernel(int64_t m, int64_t n, bool pairs) {
  return pairs ? find_kernel<true>(m, n) : find_kernel<false>(m, n);
}

}  // namespace npu::conv
