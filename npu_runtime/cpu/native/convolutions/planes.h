// A padded float32 copy of one channel, split by stride: the elements a strided window reads at neighbouring positions
// end up next to each other, so kernels over it need neither bounds checks nor gathers.
#pragma once

#include <algorithm>

#include "vec.h"

namespace npu::conv {

// Element (y, x) of the padded channel is at phase (y % step_h, x % step_w), row y / step_h, column x / step_w.
struct PhaseShape {
  int64_t step_h, step_w;
  int64_t rows, pitch;
  static constexpr int64_t kReadAhead = 4 * kLanes;  // how far past the last element kernels may read

  int64_t plane() const { return rows * pitch; }
  int64_t floats() const { return step_h * step_w * plane() + kReadAhead; }
  int64_t offset(int64_t y, int64_t x) const {
    return (y % step_h * step_w + x % step_w) * plane() + y / step_h * pitch + x / step_w;
  }
};

// Where a channel's data goes within its padding.
struct Placement {
  int64_t in_h, in_w, pad_top, pad_left;
  int64_t first_row;  // the padded row that becomes row 0
};

// One thread's planes. The padding is written once, and every channel then only replaces what is inside.
class PhasePlanes {
 public:
  PhasePlanes() = default;
  PhasePlanes(const PhaseShape& shape, const Placement& place, float fill, float* memory)
      : shape(shape), place(place), planes(memory) {
    std::fill(memory, memory + shape.floats(), fill);
  }

  const float* data() const { return planes; }

  template <class T>
  void set(const T* channel) {
    const int64_t step = shape.step_h == shape.step_w ? shape.step_w : 0;
    if (step == 1) set_rows<1>(channel);
    else if (step == 2) set_rows<2>(channel);
    else if (step == 4) set_rows<4>(channel);
    else set_rows<0>(channel);
  }

 private:
  // kStep is both steps, or 0 where they differ.
  template <int kStep, class T>
  void set_rows(const T* channel) {
    PhaseShape steps = shape;
    if (kStep) steps.step_h = steps.step_w = kStep;  // constants, by which nothing needs to be divided at run time
    const int64_t step = steps.step_w;
    const int64_t inside = std::min(place.in_w, shape.pitch * step - place.pad_left);
    const int64_t offset = place.first_row - place.pad_top;
    const int64_t end = std::min(shape.rows * steps.step_h, place.in_h - offset);
    for (int64_t y = std::max<int64_t>(0, -offset); y < end; ++y) {
      const T* row = channel + (y + offset) * place.in_w;
      for (int64_t phase = 0; phase < std::min(step, inside); ++phase) {
        const int64_t count = (inside - phase + step - 1) / step;
        float* to = planes + steps.offset(y, place.pad_left + phase);
        for_overlapping(count, [&](int64_t i) __attribute__((always_inline)) {
          store_n(to + i, load_strided<kStep>(row + phase + i * step, step, count - i), count - i);
        });
      }
    }
  }

  PhaseShape shape;
  Placement place;
  float* planes;
};

}  // namespace npu::conv
