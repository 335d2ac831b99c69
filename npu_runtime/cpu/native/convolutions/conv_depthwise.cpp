// Convolution whose groups have one input channel each.
#include "convolutions/taps.h"

namespace npu::conv {
namespace {

struct MultiplyAdd {
  static constexpr float kFill = 0.0f;
  static constexpr bool kAdjusts = false;
  static constexpr int kMostUnrolled = 25;
  static NPU_INLINE Vec step(Vec sum, Vec x, const float* weight) { return sum + x * *weight; }
};

void convolve_depthwise(const ConvArgs& a) {
  with_type(a.x_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    run_taps<MultiplyAdd, T>(a, a.weight, [](float*, int64_t, int64_t, int64_t) {});
  });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(conv2d_depthwise, npu::conv::ConvArgs, npu::conv::convolve_depthwise)
