// Kernels that move elements without looking at them: strided copies, embedding rows, indexed reads and writes.
#include <stdexcept>
#include <string>

#include "rows.h"

namespace npu {
namespace {

constexpr int kMaxDims = 8;

// Sizes and byte strides, outermost first. The last dimension is the destination's fastest; the one before it the
// source's fastest, where that is another.
struct CopyArgs {
  const char* from;
  char* to;
  int64_t item_size;
  int64_t size[kMaxDims], from_stride[kMaxDims], to_stride[kMaxDims];
};

// A vector of elements as they are, each in the low bits of a lane.
template <class T>
NPU_INLINE Vec load_raw(const char* from) {
  if constexpr (sizeof(T) == 4) return load_bits<Vec>(from);
  else return bit_cast<Vec>(__builtin_convertvector(load_bits<HalfBits>(from), UVec));
}
template <class T>
NPU_INLINE void store_raw(char* to, Vec v) {
  if constexpr (sizeof(T) == 4) {
    std::memcpy(to, &v, sizeof(v));
  } else {
    const HalfBits bits = __builtin_convertvector(bit_cast<UVec>(v), HalfBits);
    std::memcpy(to, &bits, sizeof(bits));
  }
}

// Copies a plane; the strides are those of rows and columns, in bytes. Where neighbours are in a column of the source and
// in a row of the target, it is turned.
template <class T>
void copy_plane(const char* from, char* to, int64_t rows, int64_t columns, const int64_t* from_stride,
                const int64_t* to_stride) {
  constexpr int64_t kSize = sizeof(T);
  const int64_t from_row = from_stride[0], from_column = from_stride[1];
  const int64_t to_row = to_stride[0], to_column = to_stride[1];
  const auto copy_each = [&](int64_t r, int64_t c, int64_t r_end, int64_t c_end) {
    for (int64_t i = r; i < r_end; ++i)
      for (int64_t j = c; j < c_end; ++j)
        std::memcpy(to + i * to_row + j * to_column, from + i * from_row + j * from_column, kSize);
  };
  if constexpr (kSize == 4 || kSize == 2) {
    if (from_row == kSize && to_column == kSize) {
      // Squares of a vector's length, turned in registers.
      const int64_t whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
      for (int64_t r = 0; r < whole_rows; r += kLanes)
        for (int64_t c = 0; c < whole_columns; c += kLanes) {
          Vec square[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) square[i] = load_raw<T>(from + r * kSize + (c + i) * from_column);
          transpose(square);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) store_raw<T>(to + (r + i) * to_row + c * kSize, square[i]);
        }
      copy_each(0, whole_columns, whole_rows, columns);
      return copy_each(whole_rows, 0, rows, columns);
    }
  }
  // Square blocks touch each cache line of a transposed source once, not once per element.
  constexpr int64_t kBlock = 32;
  for (int64_t r = 0; r < rows; r += kBlock)
    for (int64_t c = 0; c < columns; c += kBlock)
      copy_each(r, c, std::min(rows, r + kBlock), std::min(columns, c + kBlock));
}

void copy(const CopyArgs& a) {
  const int64_t rows = a.size[kMaxDims - 2], columns = a.size[kMaxDims - 1];
  const int64_t *from_stride = a.from_stride + kMaxDims - 2, *to_stride = a.to_stride + kMaxDims - 2;
  const bool whole_rows = from_stride[1] == a.item_size && to_stride[1] == a.item_size;
  int64_t planes = 1;
  for (int d = 0; d < kMaxDims - 2; ++d) planes *= a.size[d];
  // Work is split by blocks of rows; a single long row is split by its columns instead.
  const bool split_columns = rows == 1 && columns * a.item_size > 65536;
  const int64_t extent = split_columns ? columns : rows;
  const int64_t piece =
      std::max<int64_t>(1, std::min(extent, 65536 / (a.item_size * (split_columns ? 1 : columns))));
  const int64_t pieces = divide_up(extent, piece);
  const bool small = planes * rows * columns * a.item_size <= 65536;
  parallel_for(planes * pieces, small ? planes * pieces : 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const char* from = a.from;
      char* to = a.to;
      int64_t plane = i / pieces;
      for (int d = kMaxDims - 3; d >= 0; --d) {
        from += plane % a.size[d] * a.from_stride[d];
        to += plane % a.size[d] * a.to_stride[d];
        plane /= a.size[d];
      }
      const int64_t first = i % pieces * piece, count = std::min(piece, extent - first);
      from += first * from_stride[split_columns];
      to += first * to_stride[split_columns];
      const int64_t r = split_columns ? 1 : count, c = split_columns ? count : columns;
      if (whole_rows) {
        for (int64_t row = 0; row < r; ++row)
          std::memcpy(to + row * to_stride[0], from + row * from_stride[0], c * a.item_size);
        continue;
      }
      switch (a.item_size) {
        case 1: copy_plane<uint8_t>(from, to, r, c, from_stride, to_stride); break;
        case 2: copy_plane<uint16_t>(from, to, r, c, from_stride, to_stride); break;
        case 4: copy_plane<uint32_t>(from, to, r, c, from_stride, to_stride); break;
        default: copy_plane<uint64_t>(from, to, r, c, from_stride, to_stride); break;
      }
    }
  });
}

// For row (i, j, k) of `rows`: a copy of `bytes` from or to the row that the index of k names. Strides count bytes.
struct IndexedArgs {
  char* rows;
  char* indexed;
  const char* index;
  int64_t index_size;  // 4 or 8 bytes
  int64_t writes;      // whether `indexed` is the destination
  int64_t limit;       // how many rows there are to name
  int64_t checked;     // whether the index is known to be in range, as far as callers can be trusted
  int64_t bytes;
  int64_t size[3], row_stride[3], indexed_stride[3];
};

// An index out of range fails the kernel; where the index has been checked, it writes nothing, or reads zeros.
void copy_indexed(const IndexedArgs& a) {
  for_rows(a.size[0] * a.size[1] * a.size[2], a.bytes, [&](int64_t row) {
    const int64_t i = row / (a.size[1] * a.size[2]), j = row / a.size[2] % a.size[1], k = row % a.size[2];
    const int64_t index = a.index_size == 8 ? load_bits<int64_t>(a.index + 8 * k) : load_bits<int32_t>(a.index + 4 * k);
    char* plain = a.rows + i * a.row_stride[0] + j * a.row_stride[1] + k * a.row_stride[2];
    char* named = a.indexed + i * a.indexed_stride[0] + j * a.indexed_stride[1] + index * a.indexed_stride[2];
    const bool exists = index >= 0 && index < a.limit;
    if (!exists && !a.checked) {
      const std::string rows = std::to_string(a.limit);
      throw std::out_of_range("index " + std::to_string(index) + " is out of range for " + rows + " rows");
    }
    if (a.writes && exists) std::memcpy(named, plain, a.bytes);
    if (!a.writes && exists) std::memcpy(plain, named, a.bytes);
    if (!a.writes && !exists) std::memset(plain, 0, a.bytes);
  });
}

struct IndexedPairArgs {
  IndexedArgs first, second;
};

void copy_indexed_pair(const IndexedPairArgs& a) {
  copy_indexed(a.first);
  copy_indexed(a.second);
}

// Element (i, j, k, l) of `out` is that of `x` at the same place, moved by as many `step`s as the index there says. Strides
// and steps count bytes.
struct GatherArgs {
  const char *x, *index;
  char* out;
  int64_t item_size, index_size, limit, step;
  int64_t size[4], x_stride[4], index_stride[4], out_stride[4];
};

NPU_INLINE int64_t gathered_index(const GatherArgs& a, const char* index) {
  const int64_t number = a.index_size == 8 ? load_bits<int64_t>(index) : load_bits<int32_t>(index);
  if (number >= 0 && number < a.limit) return number;
  throw std::out_of_range("index " + std::to_string(number) + " is out of range for " + std::to_string(a.limit) + " rows");
}

void gather_elements(const GatherArgs& a) {
  for_runs(a.size, [&](int64_t i, int64_t j, int64_t k, int64_t begin, int64_t end) {
    const auto row = [&](const int64_t* stride) { return i * stride[0] + j * stride[1] + k * stride[2]; };
    const char *x = a.x + row(a.x_stride), *index = a.index + row(a.index_stride);
    char* out = a.out + row(a.out_stride);
    for (int64_t l = begin; l < end; ++l) {
      const char* from = x + l * a.x_stride[3] + gathered_index(a, index + l * a.index_stride[3]) * a.step;
      std::memcpy(out + l * a.out_stride[3], from, a.item_size);
    }
  });
}

}  // namespace
}  // namespace npu

NPU_KERNEL(copy, npu::CopyArgs, npu::copy)
NPU_KERNEL(gather, npu::GatherArgs, npu::gather_elements)
NPU_KERNEL(copy_indexed, npu::IndexedArgs, npu::copy_indexed)
NPU_KERNEL(copy_indexed_pair, npu::IndexedPairArgs, npu::copy_indexed_pair)
