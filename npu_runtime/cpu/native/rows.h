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
  const int64_t runs = rows * n <= kSerialElements ? 1 : divide_up(n, kSerialElements);
  const int64_t length = runs == 1 ? n : round_up(divide_up(n, runs), kLanes);
  parallel_for(rows * runs, rows_in_chunk(rows * runs, length), [&](int64_t begin, int64_t end, int) {
    // Counted, as rows may be so short that a division would take as long as one of them.
    const int64_t row = begin / runs;
    int64_t part = begin % runs, i = row / (size[1] * size[2]), j = row / size[2] % size[1], k = row % size[2];
    for (int64_t left = end - begin; left; --left) {
      const int64_t first = part * length;
      if (first < n) body(i, j, k, first, std::min(n, first + length));
      if (++part < runs) continue;
      part = 0;
      if (++k < size[2]) continue;
      k = 0;
      if (++j < size[1]) continue;
      j = 0;
      ++i;
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
