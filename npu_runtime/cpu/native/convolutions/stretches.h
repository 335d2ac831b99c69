// Results along one axis of an image, by the taps of their windows that lie inside it: what reads padding adds nothing.
#pragma once

#include "products/gemm.h"

namespace npu::conv {

// Results that follow each other, of whose windows the same taps lie inside the image.
struct Stretch {
  int64_t begin, end, first_tap, end_tap;

  int64_t size() const { return end - begin; }
  int64_t taps() const { return end_tap - first_tap; }
};

struct Axis {
  int64_t in, kernel, stride, dilation, pad;

  int64_t most_stretches() const { return 2 * kernel + 1; }
  int64_t place(int64_t result, int64_t tap) const { return result * stride - pad + tap * dilation; }

  // Writes the stretches of results [begin, end) to `to`, and returns where they end there.
  Stretch* split(int64_t begin, int64_t end, Stretch* to) const {
    while (begin < end) {
      Stretch stretch{begin, begin + 1, first_tap(begin), end_tap(begin)};
      while (stretch.end < end && first_tap(stretch.end) == stretch.first_tap && end_tap(stretch.end) == stretch.end_tap)
        ++stretch.end;
      *to++ = stretch;
      begin = stretch.end;
    }
    return to;
  }

 private:
  int64_t taps_before(int64_t place, int64_t result) const {
    return std::min(kernel, divide_up(std::max<int64_t>(0, place + pad - result * stride), dilation));
  }
  int64_t first_tap(int64_t result) const { return taps_before(0, result); }
  int64_t end_tap(int64_t result) const { return taps_before(in, result); }
};

}  // namespace npu::conv
