// The register-blocked product that linear layers, matrix products, attention and convolutions share: rows of x times one
// panel of packed columns.
//
// A matrix w[N, K] is stored as panels of kPanel outputs. A panel holds, for one step of K after the other, the outputs'
// values of that step, so a panel is one sequential stream at any number of rows. A step is two consecutive values of k
// for bfloat16 where the machine multiplies pairs of them, and one otherwise. N and K are padded with zeros to whole
// panels and steps.
//
// x is stored in blocks of up to kMaxRows rows, step by step within the block; packing one writes up to a vector beyond
// its end.
#pragma once

#include "vec.h"

namespace npu {

inline constexpr int64_t kPanel = 2 * kLanes;
// A product leaves out columns at the end of a panel in multiples of this.
inline constexpr int64_t kColumnStep = kHasHalves ? kLanes / 2 : kLanes;
// Two accumulators a row, and registers for the panel's two vectors and the broadcast of x.
inline constexpr int kMaxRows = kRegisters == 32 ? 12 : 6;

// Maximum number of rows to multiply with a panel and the first vector of the next one: three accumulators a row, which takes
// fewer loads than the two panels by themselves where registers are few. 0: no product does so.
inline constexpr int kWideRows = kRegisters == 16 ? 4 : 0;
inline constexpr int64_t kWidePanel = kPanel + kLanes;
// Whether as many columns are the last ones of such a product.
constexpr bool is_wide(int64_t columns) { return kWideRows > 0 && columns > kPanel && columns <= kWidePanel; }

// Maximum number of rows to multiply together, by the bytes from one to the next. Rows a whole number of pages apart share
// one set of L1, which has eight lines at least.
constexpr int64_t rows_together(int64_t row_bytes) {
  return row_bytes % 4096 ? kMaxRows : std::min<int64_t>(kMaxRows, 8);
}

// What a panel's share of a product over many rows takes at most: of L1, or of a large L2 where vectors are long.
inline constexpr int64_t kSliceBytes = kLanes == 16 ? 128 << 10 : 32 << 10;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// How one step is loaded and multiplied, by the panel's storage type: 16-bit floats are widened in registers, or
// multiplied in pairs. X is the type of the other operand.
template <class W>
struct FloatStep {
  using X = float;
  static constexpr int kWidth = 1;
  static NPU_INLINE Vec load_panel(const W* w) { return load(w); }
  static NPU_INLINE Vec broadcast(const float* x) { return splat(*x); }
  template <class V>
  static NPU_INLINE V multiply_add(V sum, V x, V w) {
    return add_product(sum, x, w);
  }
};
template <class W>
struct PairStep {
  using X = W;
  static constexpr int kWidth = 2;
  static NPU_INLINE Vec load_panel(const W* w) { return load_bits<Vec>(w); }
  static NPU_INLINE Vec broadcast(const W* x) { return splat(load_bits<float>(x)); }
  template <class V>
  static NPU_INLINE V multiply_add(V sum, V x, V w) {
    return add_pairs(sum, x, w);
  }
};
template <class W>
using Step = std::conditional_t<kHasPairs && std::is_same_v<W, bf16>, PairStep<W>, FloatStep<W>>;

// Where sums go, floats or rounded: vector v of row r to data + r * row_stride + v * vec_stride. They begin with `added` too, if
// there is one. Of a row, `columns` are written and read.
//
// Functions take it by reference: a copy in the arguments of a call is loaded by wider moves than those that have just stored
// its members, and waits until these have reached the cache.
template <class T>
struct Results {
  T* data;
  int64_t row_stride = kPanel, vec_stride = kLanes;
  const T* added = nullptr;
  int64_t added_row_stride = 0;
  int64_t columns = kPanel;
};
using Sums = Results<float>;

// What sums begin with, strided as they are, and the limits that they are brought within at the end.
inline constexpr float kZeros[kPanel] = {};
struct Range {
  const float* start = kZeros;
  int64_t row_stride = 0, vec_stride = 0;
  float low = -kInfinity, high = kInfinity;
};

// Adds to the sums of some rows what they begin with besides. kWhole: all columns of these vectors are results.
template <bool kWhole, int kRows, int kVecs, class T>
NPU_INLINE void add_results(Vec (&sums)[kRows][kVecs], const Results<T>& results) {
  const T* added = results.added;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, added += results.added_row_stride)
#pragma GCC unroll 3
    for (int v = 0; v < kVecs; ++v) {
      const int64_t count = kWhole ? kLanes : results.columns - v * kLanes;
      if (count > 0) sums[r][v] += load_n(added + v * kLanes, count);
    }
}

// Begins the sums of some rows. What is added to them is so before the products are: these then hide the additions, and
// flush subnormal sums where any do.
template <int kRows, int kVecs, class T>
NPU_INLINE void begin_sums(Vec (&sums)[kRows][kVecs], const Results<T>& results, const Range& range) {
  const auto load_from = [&](int64_t row_stride) __attribute__((always_inline)) {
    const float* start = range.start;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, start += row_stride)
#pragma GCC unroll 3
      for (int v = 0; v < kVecs; ++v) sums[r][v] = load(start + v * range.vec_stride);
  };
  range.row_stride ? load_from(range.row_stride) : load_from(0);
  if (results.added) results.columns >= kVecs * kLanes ? add_results<true>(sums, results) : add_results<false>(sums, results);
}

// Puts the sums of some rows where they go. kWhole: all columns of these vectors are results, and none would be flushed.
template <bool kWhole, int kRows, int kVecs, class T>
NPU_INLINE void put(Vec (&sums)[kRows][kVecs], const Results<T>& results) {
  T* to = results.data;
  const int64_t row_stride = results.row_stride, vec_stride = results.vec_stride, columns = results.columns;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, to += row_stride) {
    if constexpr (kWhole && kVecs == 2) {
      store_both<true>(to, vec_stride, sums[r][0], sums[r][1]);
      continue;
    }
#pragma GCC unroll 3
    for (int v = 0; v < kVecs; ++v) {
      const int64_t count = kWhole ? kLanes : columns - v * kLanes;
      if (count > 0) store_n(to + v * vec_stride, sums[r][v], count);
    }
  }
}

// Puts the sums of some rows where they go, within limits. kFlushed: none is subnormal.
template <bool kFlushed, int kRows, int kVecs, class T>
NPU_INLINE void finish_sums(Vec (&sums)[kRows][kVecs], const Results<T>& results, const Range& range) {
  const auto for_sums = [&](const auto& change) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
      for (int v = 0; v < kVecs; ++v) sums[r][v] = change(sums[r][v]);
  };
  const bool whole = results.columns >= kVecs * kLanes;
  if (range.low > -kInfinity) {
    const Vec low = splat(range.low);
    for_sums([&](Vec v) __attribute__((always_inline)) { return max(low, v); });  // NaN passes
  }
  if (range.high < kInfinity) {
    const Vec high = splat(range.high);
    for_sums([&](Vec v) __attribute__((always_inline)) { return min(high, v); });
  }
  if (!whole) return put<false>(sums, results);
  if constexpr (kFlushes<T>) {
    if (!kFlushed && any_subnormal(sums)) {
      for_sums([&](Vec v) __attribute__((always_inline)) { return in_register(v); });  // or g++ keeps all tests' results
      return put<false>(sums, results);
    }
  }
  put<true>(sums, results);
}

// Sums that add to what is there.
inline Range onto(const Sums& sums) { return {sums.data, sums.row_stride, sums.vec_stride}; }

// sums = start + x · panel over `steps` steps, for 1 to kMaxRows rows of x and the first `columns` columns of a panel,
// rounded up to kColumnStep; all of them where W is widened. Whole vectors of sums are written.
template <class W>
void multiply(int64_t rows, const typename Step<W>::X* x, const W* panel, int64_t steps, const Sums& sums, const Range& range,
              int64_t columns = kPanel);

// Columns of x, and the steps of a panel that they are multiplied with.
template <class W>
struct Part {
  const typename Step<W>::X* x;
  const W* panel;
};

// The same for an x that is an ordinary matrix with rows `row_stride` values apart, and a W that is not widened. Its columns
// lie in `count` places, `parts`, of `steps` steps each. Out is float or W.
template <class W, class Out = float>
void multiply_parts(int64_t rows, const Part<W>* parts, int64_t count, int64_t row_stride, int64_t steps,
                    const Results<Out>& results, const Range& range, int64_t columns = kPanel);
template <class W, class Out = float>
void multiply_unpacked(int64_t rows, const typename Step<W>::X* x, int64_t row_stride, const W* panel, int64_t steps,
                       const Results<Out>& results, const Range& range, int64_t columns = kPanel) {
  const Part<W> part{x, panel};
  multiply_parts<W, Out>(rows, &part, 1, row_stride, steps, results, range, columns);
}

// Multiplies as multiply_parts does, kWidePanel columns and 1 to kWideRows rows. The next panel is `next_panel` values away.
template <class W, class Out = float>
void multiply_wide(int64_t rows, const Part<W>* parts, int64_t count, int64_t row_stride, int64_t steps,
                   const Results<Out>& results, const Range& range, int64_t next_panel);

// The split of m rows into blocks of up to `most`, whose sizes differ by one at most, the larger ones first.
struct RowBlocks {
  int64_t rows, count, least, larger;
  explicit RowBlocks(int64_t m, int64_t most = kMaxRows)
      : rows(m), count(divide_up(m, most)), least(count ? m / count : 0), larger(count ? m % count : 0) {}
  int64_t begin(int64_t block) const { return block * least + std::min(block, larger); }
  int64_t size(int64_t block) const { return least + (block < larger); }
  // Where a packed block begins, in steps: after each there is room for what packing writes beyond its end.
  int64_t packed_begin(int64_t block, int64_t steps) const { return begin(block) * steps + block * kLanes; }
};

// Packs rows of k values for `multiply`, and as many rows of zeros as make `pitch` rows, at most kMaxRows or kPanel. Whole
// vectors are written: up to one beyond the end, unless `pitch` is a multiple of kLanes.
template <class From, class To>
void pack_rows(const From* const* row, int64_t rows, int64_t pitch, int64_t k, To* out);

// Packs outputs [0, columns) of w, element (n, k) at w[n * n_stride + k * k_stride], as one panel.
template <class From, class To>
void pack_panel(const From* w, int64_t n_stride, int64_t k_stride, int64_t columns, int64_t k, To* panel);

}  // namespace npu
