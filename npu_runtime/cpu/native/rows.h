// Splits elementwise work over threads: the index space of a four-dimensional operand in runs along its last dimension.
#pragma once

#include "pool.h"
#include "products/gemm.h"

namespace npu {

// Elements that one thread gets through in about the time that a second one needs to join; the fewest of a chunk.
inline constexpr int64_t kSerialElements = 16384, kLeastElements = 2048;

// Rows of n elements in a chunk: a few chunks for each thread, so that all end at about the same time.
inline int64_t rows_in_chunk(int64_t rows, int64_t n) {
  if (rows * n <= kSerialElements) return rows;
  return std::max(divide_up(rows, 4 * num_threads()), divide_up(kLeastElements, n));
}

// Calls body(i, j, k, begin, end) such that the runs [begin, end) of the last dimension cover the whole index space.
// Runs end on multiples of 16 or at the dimension's end.
template <class F>
NPU_INLINE void for_runs(const int64_t (&size)[4], const F& body) {
  const int64_t rows = size[0] * size[1] * size[2], n = size[3];
  const auto run = [&](int64_t row, int64_t begin, int64_t end) {
    body(row / (size[1] * size[2]), row / size[2] % size[1], row % size[2], begin, end);
  };
  if (rows * n <= kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) run(row, 0, n);
    return;
  }
  const int64_t runs = divide_up(n, kSerialElements), length = round_up(divide_up(n, runs), kLanes);
  parallel_for(rows * runs, rows_in_chunk(rows * runs, length), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % runs * length;
      if (first < n) run(i / runs, first, std::min(n, first + length));
    }
  });
}

// Calls body(row) for every row of a matrix whose rows belong together.
template <class F>
NPU_INLINE void for_rows(int64_t rows, int64_t n, const F& body) {
  parallel_for(rows, rows_in_chunk(rows, n), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace npu
