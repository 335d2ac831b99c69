// Reductions over the taps of a sliding window, one channel at a time: depthwise convolution and pooling.
//
// On phase planes (planes.h) a tap is one constant offset for all output pixels, whatever the stride. So rows are run
// together as one long vector; the few results that fall between two rows are computed and dropped.
#pragma once

#include "convolutions/conv_epilogue.h"
#include "convolutions/planes.h"
#include "pool.h"
#include "products/gemm.h"
#include "scratch.h"

namespace npu::conv {

inline PhaseShape window_phases(const ConvArgs& a) {
  return {a.stride_h, a.stride_w, a.out_h + (a.kernel_h - 1) * a.dilation_h / a.stride_h,
          a.out_w + (a.kernel_w - 1) * a.dilation_w / a.stride_w};
}

inline constexpr int64_t kMostTaps = 1024;
inline constexpr int64_t kMostTogether = 16, kTogetherFloats = 4096;  // channels, and what they take of L1

// to[i] = the reduction over taps t of from[i + offset[t]], begun with `first` and brought within the bounds, for
// `columns` elements of each row: four rows together, whose vectors share a tap's weight. Short rows are written in whole
// vectors too; the next row overwrites the rest.
template <class Reduce, int kTaps>
void reduce_rows(const float* from, int64_t from_pitch, const int64_t* offset, const float* weight, int64_t taps,
                 float first, const Bounds& bounds, float* to, int64_t to_pitch, int64_t rows, int64_t columns) {
  const int64_t n = kTaps ? kTaps : taps;
  const Vec start = splat(first), low = splat(bounds.low), high = splat(bounds.high);
  const auto reduce = [&]<int kRows>(std::integral_constant<int, kRows>) __attribute__((always_inline)) {
    for_overlapping(columns, [&](int64_t x) __attribute__((always_inline)) {
      Vec sum[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = start;
#pragma GCC unroll 25
      for (int64_t t = 0; t < n; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sum[r] = Reduce::step(sum[r], load(from + offset[t] + x + r * from_pitch), weight + t);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec result = min(high, max(low, sum[r]));
        if constexpr (kRows == 1) store_n(to + x, result, rows * to_pitch - x);
        else store(to + x + r * to_pitch, result);
      }
    });
    rows -= kRows;
    from += kRows * from_pitch;
    to += kRows * to_pitch;
  };
  while (rows >= 4 && (rows - 3) * to_pitch >= kLanes) reduce(std::integral_constant<int, 4>());
  if (rows >= 2 && (rows - 1) * to_pitch >= kLanes) reduce(std::integral_constant<int, 2>());
  while (rows) reduce(std::integral_constant<int, 1>());
}

template <class Reduce>
void reduce_rows(const float* from, int64_t from_pitch, const int64_t* offset, const float* weight, int64_t taps,
                 float first, const Bounds& bounds, float* to, int64_t to_pitch, int64_t rows, int64_t columns) {
  auto* body = taps == 9 ? reduce_rows<Reduce, 9> : reduce_rows<Reduce, 0>;
  if constexpr (Reduce::kMostUnrolled >= 25) body = taps == 25 ? reduce_rows<Reduce, 25> : body;
  body(from, from_pitch, offset, weight, taps, first, bounds, to, to_pitch, rows, columns);
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
  const int64_t grain = std::clamp<int64_t>(channels / (8 * num_threads()), 1, kMostTogether);
  // Small channels are prepared, reduced and finished several at a time: what was just stored one way and is loaded
  // another way has to reach the cache first.
  const int64_t sums_floats = round_up(std::min(band, a.out_h) * shape.pitch + PhaseShape::kReadAhead, kLanes);
  const int64_t each = shape.floats() + sums_floats;
  const int64_t together = band < a.out_h ? 1 : std::clamp<int64_t>(kTogetherFloats / each, 1, grain);
  const Bounds bounds = bounds_of(a);
  const bool direct = bounds.suffice && !a.residual && !Reduce::kAdjusts;
  constexpr Bounds kUnlimited{-kInfinity, kInfinity, false};
  parallel_for(channels, grain, [&](int64_t begin, int64_t end, int) {
    float* memory = thread_scratch().get<float>(together * each * sizeof(float));
    float* sums = memory + together * shape.floats();
    PhasePlanes planes[kMostTogether];
    for (int64_t i = 0; i < together; ++i)
      planes[i] = {shape, {a.in_h, a.in_w, a.pad_top, a.pad_left, 0}, Reduce::kFill, memory + i * shape.floats()};
    for (int64_t first = begin; first < end; first += together) {
      const int64_t last = std::min(first + together, end);
      for (int64_t i = first; i < last; ++i)
        planes[i - first].set(reinterpret_cast<const T*>(a.x) + i / a.groups * a.x_batch_stride +
                              i % a.groups * a.in_h * a.in_w);
      for (int64_t output = 0; output < a.out_channels; ++output)
        for (int64_t row = 0; row < a.out_h; row += band) {
          const int64_t rows = std::min(band, a.out_h - row);
          for (int64_t i = first; i < last; ++i) {
            const int64_t channel = i % a.groups * a.out_channels + output;
            const float* tap_weight = weight ? weight + channel * taps : nullptr;
            const float* from = planes[i - first].data() + row * shape.pitch;
            if (direct) {
              float* out = reinterpret_cast<float*>(a.out) + i / a.groups * a.out_batch_stride;
              reduce_rows<Reduce>(from, shape.pitch, offset, tap_weight, taps, Reduce::kFill + a.bias[channel], bounds,
                                  out + (channel * a.out_h + row) * a.out_w, a.out_w, rows, a.out_w);
            } else {
              float* own = sums + (i - first) * sums_floats;
              reduce_rows<Reduce>(from, shape.pitch, offset, tap_weight, taps, Reduce::kFill, kUnlimited, own,
                                  shape.pitch, rows, a.out_w);
            }
          }
          if (direct) continue;
          for (int64_t i = first; i < last; ++i) {
            float* own = sums + (i - first) * sums_floats;
            adjust(own, row, rows, shape.pitch);
            finish(a, i / a.groups, {own, shape.pitch, rows, a.out_w, i % a.groups * a.out_channels + output,
                                     row * a.out_w, 0, a.out_w});
          }
        }
    }
  });
}

}  // namespace npu::conv
