// Normalizations along the last dimension of a matrix: RMS norm, layer norm and softmax, and of groups of planes, in float32.
#include <initializer_list>

#include "rows.h"
#include "scratch.h"

namespace npu {
namespace {

struct NormArgs {
  View x, weight, bias, out;  // matrices with contiguous rows; weight and bias are single rows
  int64_t subtracts_mean;
  float eps, weight_offset;
};

struct GroupNormArgs {
  View x, weight, bias, statistics, out;  // x and out [1, 1, planes, pixels]; statistics 2 floats for each plane
  int64_t planes_of_group, planes_of_image;
  float eps;
};

struct SoftmaxArgs {
  View x, out;
  float scale;
};

// Reads a matrix row of type T, or, where that is void, of the operand's own; a missing operand reads as `missing`.
template <class T>
NPU_INLINE Vec read(const View& view, int64_t row, int64_t i, int64_t count, float missing = 0.0f) {
  const int64_t at = row * view.stride[2] + i;
  if (!view.data) return splat(missing);
  if constexpr (std::is_void_v<T>) return load_any(view.data, view.dtype, at, count);
  else return load_n(reinterpret_cast<const T*>(view.data) + at, count);
}
template <class T>
NPU_INLINE void write(const View& view, int64_t row, int64_t i, Vec v, int64_t count) {
  const int64_t at = row * view.stride[2] + i;
  if constexpr (std::is_void_v<T>) store_any(view.data, view.dtype, at, v, count);
  else store_n(reinterpret_cast<T*>(view.data) + at, v, count);
}

// Calls body with a null pointer of the type that all operands have, or of void where there is no such type.
template <class F>
NPU_INLINE void with_common_type(std::initializer_list<View> operands, const F& body) {
  const Dtype dtype = operands.begin()->dtype;
  for (const View& view : operands)
    if (view.data && view.dtype != dtype) return body(static_cast<void*>(nullptr));
  with_type(dtype, body);
}

// Calls body(i, count) for the vectors of a row.
template <class F>
NPU_INLINE void for_vectors(int64_t n, const F& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, int64_t(kLanes));
  if (i < n) body(i, n - i);
}

// RMS norm, or layer norm where the mean is subtracted; the variance is a second pass over the deviations.
template <class T>
void norm_rows(const NormArgs& a) {
  const int64_t n = a.x.size[3];
  for_rows(a.x.size[2], n, [&](int64_t row) {
    float* values = thread_scratch().get<float>(round_up(n, kLanes) * sizeof(float));
    Vec total{}, squares{};
    for_vectors(n, [&](int64_t i, int64_t count) {
      const Vec x = read<T>(a.x, row, i, count);
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
      const Vec weight = read<T>(a.weight, 0, i, count, 1.0f) + a.weight_offset;
      const Vec y = (load(values + i) - mean) * factor * weight;
      write<T>(a.out, row, i, a.bias.data ? y + read<T>(a.bias, 0, i, count) : y, count);
    });
  });
}

void norm(const NormArgs& a) {
  with_common_type({a.x, a.weight, a.bias, a.out}, [&](auto* type) { norm_rows<std::remove_pointer_t<decltype(type)>>(a); });
}

// Mean and squares of the deviations from it of each plane, and from those of a group's planes its own.
template <class T>
void group_norm_planes(const GroupNormArgs& a) {
  const int64_t planes = a.x.size[2], n = a.x.size[3], of_group = a.planes_of_group;
  float* statistics = reinterpret_cast<float*>(a.statistics.data);
  for_rows(planes, n, [&](int64_t plane) {
    Vec total{}, squares{};
    for_vectors(n, [&](int64_t i, int64_t count) { total += read<T>(a.x, plane, i, count); });
    const float mean = sum_lanes(total) / n;
    for_vectors(n, [&](int64_t i, int64_t count) {
      Vec x = read<T>(a.x, plane, i, count) - mean;
      if (count < kLanes) x = lane_numbers() < float(count) ? x : Vec{};
      squares += x * x;
    });
    statistics[2 * plane] = mean;
    statistics[2 * plane + 1] = sum_lanes(squares);
  });
  for (int64_t first = 0; first < planes; first += of_group) {
    float mean = 0, squares = 0;
    for (int64_t plane = first; plane < first + of_group; ++plane) mean += statistics[2 * plane] / of_group;
    for (int64_t plane = first; plane < first + of_group; ++plane) {
      const float away = statistics[2 * plane] - mean;
      squares += statistics[2 * plane + 1] + n * away * away;
    }
    const float factor = 1.0f / std::sqrt(squares / (float(n) * of_group) + a.eps);
    for (int64_t plane = first; plane < first + of_group; ++plane) {
      statistics[2 * plane] = mean;
      statistics[2 * plane + 1] = factor;
    }
  }
  for_rows(planes, n, [&](int64_t plane) {
    const int64_t channel = plane % a.planes_of_image;
    const float mean = statistics[2 * plane];
    const float scale = statistics[2 * plane + 1] * read<T>(a.weight, 0, channel, 1, 1.0f)[0];
    const float shift = read<T>(a.bias, 0, channel, 1)[0];
    for_vectors(n, [&](int64_t i, int64_t count) {
      write<T>(a.out, plane, i, (read<T>(a.x, plane, i, count) - mean) * scale + shift, count);
    });
  });
}

void group_norm(const GroupNormArgs& a) {
  with_common_type({a.x, a.weight, a.bias, a.out}, [&](auto* type) {
    group_norm_planes<std::remove_pointer_t<decltype(type)>>(a);
  });
}

template <class T>
void softmax_rows(const SoftmaxArgs& a) {
  const int64_t n = a.x.size[3];
  for_rows(a.x.size[2], n, [&](int64_t row) {
    float* values = thread_scratch().get<float>(round_up(n, kLanes) * sizeof(float));
    Vec highest = splat(-kInfinity);
    for_vectors(n, [&](int64_t i, int64_t count) {
      Vec x = read<T>(a.x, row, i, count) * a.scale;
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
    for_vectors(n, [&](int64_t i, int64_t count) { write<T>(a.out, row, i, load(values + i) * factor, count); });
  });
}

void softmax(const SoftmaxArgs& a) {
  with_common_type({a.x, a.out}, [&](auto* type) { softmax_rows<std::remove_pointer_t<decltype(type)>>(a); });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(norm, npu::NormArgs, npu::norm)
NPU_KERNEL(group_norm, npu::GroupNormArgs, npu::group_norm)
NPU_KERNEL(softmax, npu::SoftmaxArgs, npu::softmax)
