// Kernels that move elements without looking at them: strided copies, embedding rows and indexed writes.
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

template <class T>
void copy_plane(const char* from, char* to, int64_t rows, int64_t columns, const int64_t* from_stride,
                const int64_t* to_stride) {
  // Square blocks touch each cache line of a transposed source once, not once per element. A block goes through a
  // local copy, so that the walk across it has constant strides and stays in L1.
  constexpr int64_t kBlock = 32, kSize = sizeof(T);
  T block[kBlock][kBlock];
  const int64_t from_row = from_stride[0], from_column = from_stride[1];
  const int64_t to_row = to_stride[0], to_column = to_stride[1];
  for (int64_t r0 = 0; r0 < rows; r0 += kBlock)
    for (int64_t c0 = 0; c0 < columns; c0 += kBlock) {
      const char* source = from + r0 * from_row + c0 * from_column;
      char* target = to + r0 * to_row + c0 * to_column;
      if (from_row == kSize && to_column == kSize && r0 + kBlock <= rows && c0 + kBlock <= columns) {
        for (int64_t c = 0; c < kBlock; ++c) std::memcpy(block[c], source + c * from_column, sizeof(block[c]));
        for (int64_t r = 0; r < kBlock; ++r)
          for (int64_t c = 0; c < kBlock; ++c) reinterpret_cast<T*>(target + r * to_row)[c] = block[c][r];
        continue;
      }
      for (int64_t r = 0; r < std::min(rows - r0, kBlock); ++r)
        for (int64_t c = 0; c < std::min(columns - c0, kBlock); ++c)
          *reinterpret_cast<T*>(target + r * to_row + c * to_column) =
              *reinterpret_cast<const T*>(source + r * from_row + c * from_column);
    }
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
  int64_t bytes;
  int64_t size[3], row_stride[3], indexed_stride[3];
};

// An index out of range writes nothing, or reads zeros: a kernel cannot raise, but it must not touch foreign memory.
void copy_indexed(const IndexedArgs& a) {
  for_rows(a.size[0] * a.size[1] * a.size[2], a.bytes, [&](int64_t row) {
    const int64_t i = row / (a.size[1] * a.size[2]), j = row / a.size[2] % a.size[1], k = row % a.size[2];
    const int64_t index = a.index_size == 8 ? load_bits<int64_t>(a.index + 8 * k) : load_bits<int32_t>(a.index + 4 * k);
    char* plain = a.rows + i * a.row_stride[0] + j * a.row_stride[1] + k * a.row_stride[2];
    char* named = a.indexed + i * a.indexed_stride[0] + j * a.indexed_stride[1] + index * a.indexed_stride[2];
    const bool exists = index >= 0 && index < a.limit;
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

}  // namespace
}  // namespace npu

NPU_KERNEL(copy, npu::CopyArgs, npu::copy)
NPU_KERNEL(copy_indexed, npu::IndexedArgs, npu::copy_indexed)
NPU_KERNEL(copy_indexed_pair, npu::IndexedPairArgs, npu::copy_indexed_pair)
