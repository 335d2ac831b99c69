#include "conv_gemm.h"

#include <array>
#include <utility>

namespace npu::conv {
namespace {

template <int N, std::size_t... M>
constexpr std::array<Multiply, sizeof...(M)> kernels(std::index_sequence<M...>) {
  return {&multiply<static_cast<int>(M) + 1, N>...};
}

}  // namespace

Multiply channel_kernel(int64_t m, int64_t n) {
  static constexpr auto one = kernels<1>(std::make_index_sequence<kChannelRows>());
  static constexpr auto two = kernels<2>(std::make_index_sequence<kChannelRows>());
  return n == 1 ? one[m - 1] : two[m - 1];
}

}  // namespace npu::conv
