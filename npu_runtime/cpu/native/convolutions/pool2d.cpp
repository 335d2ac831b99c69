// Maximum and average pooling. Pooled channels are groups of one channel without bias, residual or activation.
#include <limits>

#include "convolutions/taps.h"

namespace npu::conv {
namespace {

struct Maximum {
  static constexpr float kFill = -kInfinity;
  static constexpr bool kAdjusts = false;
  static constexpr int kMostUnrolled = 9;
  // A NaN wins whichever side it is on, as in torch.
  static NPU_INLINE Vec step(Vec most, Vec x, const float*) { return (x > most) | (x != x) ? x : most; }
};

struct Sum {
  static constexpr float kFill = 0.0f;
  static constexpr bool kAdjusts = true;
  static constexpr int kMostUnrolled = 9;
  static NPU_INLINE Vec step(Vec sum, Vec x, const float*) { return sum + x; }
};

template <class T>
float sum_of(const T* x, int64_t count) {
  Vec sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int v = 0; v < 4; ++v) sum[v] += load(x + i + v * kLanes);
  for (; i < count; i += kLanes) sum[0] += load_n(x + i, count - i);
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// One window that is the whole map.
template <class T>
void average_maps(const ConvArgs& a) {
  const int64_t size = a.in_h * a.in_w;
  parallel_for(a.batch * a.groups, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t item = i / a.groups, channel = i % a.groups;
      const T* x = reinterpret_cast<const T*>(a.x) + item * a.x_batch_stride + channel * size;
      float average[kLanes] = {sum_of(x, size) * a.weight[0]};
      finish(a, item, {average, kLanes, 1, 1, channel, 0});
    }
  });
}

// `weight` has the reciprocal of each output pixel's divisor, and room for a vector after them.
template <class T>
void average(const ConvArgs& a) {
  const bool whole = a.kernel_h == a.in_h && a.kernel_w == a.in_w && !a.pad_top && !a.pad_left;
  if (whole && a.out_h * a.out_w == 1) return average_maps<T>(a);
  run_taps<Sum, T>(a, nullptr, [&](float* sums, int64_t first, int64_t rows, int64_t pitch) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t x = 0; x < a.out_w; x += kLanes) {
        float* at = sums + row * pitch + x;
        const int64_t count = a.out_w - x;
        store_n(at, load(at) * load(a.weight + (first + row) * a.out_w + x), count);
      }
  });
}

void run_max(const ConvArgs& a) {
  with_type(a.x_type, [&](auto* type) {
    run_taps<Maximum, std::remove_pointer_t<decltype(type)>>(a, nullptr, [](float*, int64_t, int64_t, int64_t) {});
  });
}

void run_average(const ConvArgs& a) {
  with_type(a.x_type, [&](auto* type) { average<std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu::conv

NPU_KERNEL(max_pool2d, npu::conv::ConvArgs, npu::conv::run_max)
NPU_KERNEL(avg_pool2d, npu::conv::ConvArgs, npu::conv::run_average)
