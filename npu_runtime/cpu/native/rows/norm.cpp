// Normalizations along the last dimension of a matrix: RMS norm, layer norm and softmax, in float32.
#include "rows.h"
#include "scratch.h"

namespace npu {
namespace {

struct NormArgs {
  View x, weight, bias, out;  // matrices with contiguous rows; weight and bias are single rows
  int64_t subtracts_mean;
  float eps, weight_offset;
};

struct SoftmaxArgs {
  View x, out;
  float scale;
};

// Reads a matrix row; a missing operand reads as `missing`.
NPU_INLINE Vec read(const View& view, int64_t row, int64_t i, int64_t count, float missing = 0.0f) {
  return view.data ? load_any(view.data, view.dtype, row * view.stride[2] + i, count) : splat(missing);
}
NPU_INLINE void write(const View& view, int64_t row, int64_t i, Vec v, int64_t count) {
  store_any(view.data, view.dtype, row * view.stride[2] + i, v, count);
}

// Calls body(i, count) for the vectors of a row.
template <class F>
NPU_INLINE void for_vectors(int64_t n, const F& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, int64_t(kLanes));
  if (i < n) body(i, n - i);
}

// RMS norm, or layer norm where the mean is subtracted; the variance is a second pass over the deviations.
void norm(const NormArgs& a) {
  const int64_t n = a.x.size[3];
  for_rows(a.x.size[2], n, [&](int64_t row) {
    float* values = thread_scratch().get<float>(round_up(n, kLanes) * sizeof(float));
    Vec total{}, squares{};
    for_vectors(n, [&](int64_t i, int64_t count) {
      const Vec x = read(a.x, row, i, count);
      store(values + i, x);
      total += x;
      squares += x * x;
    });
    float mean = 0;
    if (a.subtracts_mean) {
      mean = sum_lanes(total) / n;
      squares = Vec{};
      for_vectors(n, [&](int64_t i, int64_t count) {
        Vec x = load(values + i) - mean;
        if (count < kLanes) x = lane_numbers() < float(count) ? x : Vec{};
        squares += x * x;
      });
    }
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / n + a.eps);
    for_vectors(n, [&](int64_t i, int64_t count) {
      const Vec weight = read(a.weight, 0, i, count, 1.0f) + a.weight_offset;
      const Vec y = (load(values + i) - mean) * factor * weight;
      write(a.out, row, i, a.bias.data ? y + read(a.bias, 0, i, count) : y, count);
    });
  });
}

void softmax(const SoftmaxArgs& a) {
  const int64_t n = a.x.size[3];
  for_rows(a.x.size[2], n, [&](int64_t row) {
    float* values = thread_scratch().get<float>(round_up(n, kLanes) * sizeof(float));
    Vec highest = splat(-kInfinity);
    for_vectors(n, [&](int64_t i, int64_t count) {
      Vec x = read(a.x, row, i, count) * a.scale;
      if (count < kLanes) x = lane_numbers() < float(count) ? x : splat(-kInfinity);
      store(values + i, x);
      highest = max(x, highest);
    });
    const float shift = max_lanes(highest);
    Vec total{};
    for_vectors(n, [&](int64_t i, int64_t) {
      const Vec weight = exp(load(values + i) - shift);
      store(values + i, weight);
      total += weight;
    });
    const float factor = 1.0f / sum_lanes(total);
    for_vectors(n, [&](int64_t i, int64_t count) { write(a.out, row, i, load(values + i) * factor, count); });
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(norm, npu::NormArgs, npu::norm)
NPU_KERNEL(softmax, npu::SoftmaxArgs, npu::softmax)
