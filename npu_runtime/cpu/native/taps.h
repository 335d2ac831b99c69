// Reductions over the taps of a sliding window, one channel at a time: depthwise convolution and pooling.
//
// On phase planes (planes.h) a tap is one constant offset for all output pixels, whatever the stride. So rows are run
// together as one long vector; the few results that fall between two rows are computed and dropped.
#pragma once

#include "conv_epilogue.h"
#include "planes.h"
#include "pool.h"
#include "scratch.h"

namespace npu::conv {

inline PhaseShape window_phases(const ConvArgs& a) {
  return {a.stride_h, a.stride_w, a.out_h + (a.kernel_h - 1) * a.dilation_h / a.stride_h,
          a.out_w + (a.kernel_w - 1) * a.dilation_w / a.stride_w};
}

inline constexpr int64_t kMostTaps = 1024;

// to[i] = the reduction over taps t of from[i + offset[t]], for kVecs vectors.
template <class Reduce, int kTaps, int kVecs>
NPU_INLINE void reduce_vectors(const float* from, const int64_t* offset, const float* weight, int64_t taps, float* to) {
  const int64_t n = kTaps ? kTaps : taps;
  Vec sum[kVecs];
  for (Vec& s : sum) s = Reduce::start();
#pragma GCC unroll 25
  for (int64_t t = 0; t < n; ++t)
    for (int v = 0; v < kVecs; ++v) sum[v] = Reduce::step(sum[v], load(from + offset[t] + v * kLanes), weight + t);
  for (int v = 0; v < kVecs; ++v) store(to + v * kLanes, sum[v]);
}

// The same for `count` elements, rounded up to whole vectors.
template <class Reduce, int kTaps>
void reduce_taps(const float* from, const int64_t* offset, const float* weight, int64_t taps, int64_t count,
                 float* to) {
  int64_t i = 0;
  for (; i + 3 * kLanes < count; i += 4 * kLanes)
    reduce_vectors<Reduce, kTaps, 4>(from + i, offset, weight, taps, to + i);
  if (i + kLanes < count) {
    reduce_vectors<Reduce, kTaps, 2>(from + i, offset, weight, taps, to + i);
    i += 2 * kLanes;
  }
  if (i < count) reduce_vectors<Reduce, kTaps, 1>(from + i, offset, weight, taps, to + i);
}

template <class Reduce>
void reduce_taps(const float* from, const int64_t* offset, const float* weight, int64_t taps, int64_t count,
                 float* to) {
  if (taps == 9) return reduce_taps<Reduce, 9>(from, offset, weight, taps, count, to);
  if (taps == 25) return reduce_taps<Reduce, 25>(from, offset, weight, taps, count, to);
  reduce_taps<Reduce, 0>(from, offset, weight, taps, count, to);
}

// Runs Reduce over every output channel; each input channel has a.out_channels of them. `weight` has one float per tap
// and output channel, and `adjust(sums, first row, rows, pitch)` may change finished sums.
template <class Reduce, class T, class Adjust>
void run_taps(const ConvArgs& a, const float* weight, const Adjust& adjust) {
  const PhaseShape shape = window_phases(a);
  const int64_t taps = a.kernel_h * a.kernel_w;
  int64_t offset[kMostTaps];
  for (int64_t t = 0; t < taps; ++t)
    offset[t] = shape.offset(t / a.kernel_w * a.dilation_h, t % a.kernel_w * a.dilation_w);
  const int64_t band = std::max<int64_t>(1, 2048 / shape.pitch);  // rows whose sums stay in the first-level cache
  const int64_t channels = a.batch * a.groups;
  const int64_t grain = std::clamp<int64_t>(channels / (8 * num_threads()), 1, 16);
  parallel_for(channels, grain, [&](int64_t begin, int64_t end, int) {
    const int64_t sums_floats = band * shape.pitch + PhaseShape::kReadAhead;
    float* sums = thread_scratch().get<float>((sums_floats + shape.floats()) * sizeof(float));
    PhasePlanes planes(shape, {a.in_h, a.in_w, a.pad_top, a.pad_left, 0}, Reduce::kFill, sums + sums_floats);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t item = i / a.groups, input = i % a.groups;
      planes.set(reinterpret_cast<const T*>(a.x) + item * a.x_batch_stride + input * a.in_h * a.in_w);
      for (int64_t channel = input * a.out_channels; channel < (input + 1) * a.out_channels; ++channel)
        for (int64_t row = 0; row < a.out_h; row += band) {
          const int64_t rows = std::min(band, a.out_h - row);
          const float* tap_weight = weight ? weight + channel * taps : nullptr;
          reduce_taps<Reduce>(planes.data() + row * shape.pitch, offset, tap_weight, taps,
                              (rows - 1) * shape.pitch + a.out_w, sums);
          adjust(sums, row, rows, shape.pitch);
          finish(a, item, {sums, shape.pitch, rows, a.out_w, channel, row * a.out_w, 0, a.out_w});
        }
    }
  });
}

}  // namespace npu::conv
