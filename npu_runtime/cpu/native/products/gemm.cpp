// The micro-kernels of gemm.h, compiled once for every number of rows.
#include "products/gemm.h"

#include <array>

namespace npu {
namespace {

// Steps from one update of the addresses to the next. With few registers a step is short, and an update a fifth of its
// instructions: too many for a core that issues those of another thread in every other cycle.
constexpr int kStepsTogether = kRegisters == 16 ? 4 : 1;
// Rows that share an address: three are as far from it as instructions reach.
constexpr int kRowsTogether = kRegisters == 16 ? 3 : 4;

// Packed rows of x are interleaved, others `row_stride` values apart. Each of `count` parts has `steps` steps. Columns beyond a
// panel are those of the next one, `next_panel` values away.
//
// A product of few steps takes hardly longer than what comes before and after it. So its addresses fit into the general
// registers: what is kept in others waits there until the multiply-adds of the product before are done.
template <class W, class Out, bool kPacked, int kColumns, int kRows>
void multiply_rows(const Part<W>* parts, int64_t count, int64_t row_stride, int64_t steps, const Results<Out>& results,
                   const Range& range, [[maybe_unused]] int64_t next_panel) {
  using S = Step<W>;
  if constexpr (kPacked) row_stride = S::kWidth;
  constexpr int kVecs = divide_up(kColumns, kLanes), kWhole = kColumns / kLanes;
  constexpr bool kEndsInHalf = kWhole < kVecs;
  constexpr int kStepOffset = kPacked ? kRows * S::kWidth : S::kWidth;
  // Few rows are few accumulators; further independent sums then hide the multiply-add's latency.
  constexpr int kChains = kRows == 1 ? 4 : 2 * kRows * kVecs + 3 <= kRegisters ? 2 : 1;
  struct RowSums {
    Vec whole[kVecs];  // of which the last is left out where `half` stands for it
    HalfVec half;
  } sum[kChains][kRows] = {};
  Vec sums[kRows][kVecs];
  begin_sums(sums, results, range);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < kVecs; ++v) {
      if (v < kWhole) sum[0][r].whole[v] = sums[r][v];
      else sum[0][r].half = first_half(sums[r][v]);
    }
  constexpr bool kWide = kColumns > kPanel;
  constexpr int kApart = kPacked ? kRows : kWide ? 1 : kRowsTogether, kPlaces = divide_up(kRows, kApart);
  const typename S::X* x[kPlaces];  // each kApart'th row
  const W *w, *next;
  // Several rows use the same registers: g++ would rather read memory for each of them.
  const auto once = [](auto vec) __attribute__((always_inline)) {
    if constexpr (kRows > 1) return in_register(vec);
    else return vec;
  };
  // The step that is that many after the ones before.
  const auto step = [&](RowSums(&part)[kRows], int at) __attribute__((always_inline)) {
    Vec panel[kVecs];
    HalfVec half_panel;
#pragma GCC unroll 3
    for (int v = 0; v < kWhole; ++v) {
      const Vec values = S::load_panel((v < 2 ? w : next) + (at * kPanel + v % 2 * kLanes) * S::kWidth);
      panel[v] = v < 2 ? once(values) : values;  // the third one from memory, or there are too few registers
    }
    if constexpr (kEndsInHalf) half_panel = once(load_bits<HalfVec>(w + (at * kPanel + kWhole * kLanes) * S::kWidth));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec value = S::broadcast(x[r / kApart] + r % kApart * row_stride + at * kStepOffset);
#pragma GCC unroll 3
      for (int v = 0; v < kWhole; ++v) part[r].whole[v] = S::multiply_add(part[r].whole[v], value, panel[v]);
      if constexpr (kEndsInHalf) part[r].half = S::multiply_add(part[r].half, first_half(value), half_panel);
    }
    if constexpr (kRows <= 4 && !kWide)  // few rows are a stream from memory
      prefetch_page_ahead<kPanel * S::kWidth * sizeof(W)>(w + at * kPanel * S::kWidth);
  };
  const auto advance = [&](int by) __attribute__((always_inline)) {
    w = not_known(w + by * kPanel * S::kWidth);
    if constexpr (kWide) next = not_known(next + by * kPanel * S::kWidth);
#pragma GCC unroll 4
    for (int i = 0; i < kPlaces; ++i) x[i] = not_known(x[i] + by * kStepOffset);
  };
  constexpr int kTogether = std::max(kChains, kStepsTogether);
  for (; count; --count, ++parts) {
    x[0] = parts->x, w = parts->panel;
    if constexpr (kWide) next = w + next_panel;
#pragma GCC unroll 4
    for (int i = 1; i < kPlaces; ++i) x[i] = not_known(x[i - 1]) + kApart * row_stride;
    int64_t s = 0;
    for (; s + kTogether <= steps; s += kTogether) {
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        step(sum[i % kChains], i);
        if constexpr (kWide) read_from_here_on();  // values loaded sooner would take registers from the sums
      }
      advance(kTogether);
    }
    for (; s < steps; ++s) {
      step(sum[0], 0);
      advance(1);
    }
  }
  read_from_here_on();  // `results` and `range`
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    RowSums& row = sum[0][r];
#pragma GCC unroll 4
    for (int c = 1; c < kChains; ++c) {
#pragma GCC unroll 3
      for (int v = 0; v < kWhole; ++v) row.whole[v] += sum[c][r].whole[v];
      if constexpr (kEndsInHalf) row.half += sum[c][r].half;
    }
    if constexpr (kEndsInHalf) row.whole[kWhole] = followed_by_zeros(row.half);
#pragma GCC unroll 3
    for (int v = 0; v < kVecs; ++v) sums[r][v] = row.whole[v];
  }
  finish_sums<kPairsFlush && S::kWidth == 2 && kChains == 1>(sums, results, range);
}

template <class W, class Out>
using Multiply = void (*)(const Part<W>*, int64_t, int64_t, int64_t, const Results<Out>&, const Range&, int64_t);

// By columns, in units of kColumnStep, and by rows.
template <class W, class Out>
struct Table {
  Multiply<W, Out> packed[kPanel / kColumnStep][kMaxRows], unpacked[kPanel / kColumnStep][kMaxRows];
};

template <class W, class Out, int kColumns, int... i>
constexpr void fill_table(Table<W, Out>& table, std::integer_sequence<int, i...>) {
  constexpr bool kWidened = !std::is_same_v<typename Step<W>::X, W>;
  constexpr int kIndex = kColumns / kColumnStep - 1;
  // Panels that are widened in registers are streamed once, whole: only what is multiplied as it is comes in other forms.
  if constexpr (!kWidened) ((table.unpacked[kIndex][i] = multiply_rows<W, Out, false, kColumns, i + 1>), ...);
  if constexpr (std::is_same_v<Out, float> && (!kWidened || kColumns == kPanel))
    ((table.packed[kIndex][i] = multiply_rows<W, Out, true, kColumns, i + 1>), ...);
  if constexpr (kColumns < kPanel) fill_table<W, Out, kColumns + kColumnStep>(table, std::integer_sequence<int, i...>());
}

template <class W, class Out>
constexpr Table<W, Out> make_table() {
  Table<W, Out> table{};
  fill_table<W, Out, kColumnStep>(table, std::make_integer_sequence<int, kMaxRows>());
  return table;
}

template <class W, class Out>
constexpr Table<W, Out> kTable = make_table<W, Out>();

// By rows.
template <class W, class Out, int... i>
constexpr std::array<Multiply<W, Out>, sizeof...(i)> make_wide_table(std::integer_sequence<int, i...>) {
  return {multiply_rows<W, Out, false, kWidePanel, i + 1>...};
}
template <class W, class Out>
constexpr auto kWideTable = make_wide_table<W, Out>(std::make_integer_sequence<int, kWideRows>());

// The index of the kernels that multiply that many columns; more than a panel's count as those.
int64_t column_index(int64_t columns) { return divide_up(std::min(columns, kPanel), kColumnStep) - 1; }

// out[c * pitch + r] = row[r][c], with zeros for rows from `rows` to `pitch`.
template <class From, class To>
void interleave(const From* const* row, int64_t rows, int64_t pitch, int64_t columns, To* out) {
  const auto turn = [&](int64_t c0, int64_t count) __attribute__((always_inline)) {
    Vec block[divide_up(std::max<int64_t>(kMaxRows, kPanel), kLanes)][kLanes];
    const int64_t groups = divide_up(pitch, kLanes);
    for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t r = g * kLanes + i;
        block[g][i] = r < rows ? load_n(row[r] + c0, count) : Vec{};
      }
      transpose(block[g]);
    }
    for (int64_t c = 0; c < count; ++c)
      for (int64_t g = 0; g < groups; ++g) store(out + (c0 + c) * pitch + g * kLanes, block[g][c]);
  };
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) turn(c, kLanes);
  if (c < columns) turn(c, columns - c);
}

}  // namespace

template <class From, class To>
void pack_rows(const From* const* row, int64_t rows, int64_t pitch, int64_t k, To* out) {
  if constexpr (Step<To>::kWidth == 1) return interleave(row, rows, pitch, k, out);
  interleave(reinterpret_cast<const float* const*>(row), rows, pitch, k / 2, reinterpret_cast<float*>(out));
  if (k % 2 == 0) return;
  for (int64_t r = 0; r < pitch; ++r) {
    out[(k - 1) * pitch + 2 * r] = r < rows ? load_bits<To>(row[r] + k - 1) : To{};
    out[(k - 1) * pitch + 2 * r + 1] = To{};
  }
}

template <class From, class To>
void pack_panel(const From* w, int64_t n_stride, int64_t k_stride, int64_t columns, int64_t k, To* panel) {
  constexpr int kWidth = Step<To>::kWidth;
  if (k_stride == 1) {
    const From* row[kPanel];
    for (int64_t n = 0; n < columns; ++n) row[n] = w + n * n_stride;
    return pack_rows(row, columns, kPanel, k, panel);
  }
  for (int64_t k0 = 0; k0 < k; k0 += kWidth, w += kWidth * k_stride)
    for (int64_t n = 0; n < kPanel; n += kLanes, panel += kLanes * kWidth) {
      const auto values = [&](int64_t i) __attribute__((always_inline)) {
        if (n >= columns || k0 + i >= k) return Vec{};
        const From* first = w + n * n_stride + i * k_stride;
        return n_stride == 1 ? load_n(first, columns - n) : load_strided<0>(first, n_stride, columns - n);
      };
      if constexpr (kWidth == 1) store(panel, values(0));
      else store(reinterpret_cast<float*>(panel),
                 bit_cast<Vec>(bit_cast<UVec>(values(0)) >> 16 | bit_cast<UVec>(values(1))));
    }
}

#define NPU_PACK(From, To)                                                                      \
  template void pack_rows<From, To>(const From* const*, int64_t, int64_t, int64_t, To*);        \
  template void pack_panel<From, To>(const From*, int64_t, int64_t, int64_t, int64_t, To*);
NPU_PACK(float, float)
NPU_PACK(bf16, float)
NPU_PACK(f16, float)
NPU_PACK(bf16, bf16)
NPU_PACK(f16, f16)

template <class W>
void multiply(int64_t rows, const typename Step<W>::X* x, const W* panel, int64_t steps, const Sums& sums, const Range& range,
              int64_t columns) {
  const Part<W> part{x, panel};
  kTable<W, float>.packed[column_index(columns)][rows - 1](&part, 1, 0, steps, sums, range, 0);
}
template void multiply<float>(int64_t, const float*, const float*, int64_t, const Sums&, const Range&, int64_t);
template void multiply<bf16>(int64_t, const Step<bf16>::X*, const bf16*, int64_t, const Sums&, const Range&, int64_t);
template void multiply<f16>(int64_t, const float*, const f16*, int64_t, const Sums&, const Range&, int64_t);

template <class W, class Out>
void multiply_parts(int64_t rows, const Part<W>* parts, int64_t count, int64_t row_stride, int64_t steps,
                    const Results<Out>& results, const Range& range, int64_t columns) {
  kTable<W, Out>.unpacked[column_index(columns)][rows - 1](parts, count, row_stride, steps, results, range, 0);
}

template <class W, class Out>
void multiply_wide(int64_t rows, const Part<W>* parts, int64_t count, int64_t row_stride, int64_t steps,
                   const Results<Out>& results, const Range& range, int64_t next_panel) {
  if constexpr (kWideRows > 0 && std::is_same_v<typename Step<W>::X, W>)
    kWideTable<W, Out>[rows - 1](parts, count, row_stride, steps, results, range, next_panel);
}
#define NPU_PARTS(W, Out)                                                                                                  \
  template void multiply_parts<W, Out>(int64_t, const Part<W>*, int64_t, int64_t, int64_t, const Results<Out>&, const Range&, \
                                       int64_t);                                                                           \
  template void multiply_wide<W, Out>(int64_t, const Part<W>*, int64_t, int64_t, int64_t, const Results<Out>&, const Range&, \
                                      int64_t);
NPU_PARTS(float, float)
NPU_PARTS(bf16, float)
NPU_PARTS(bf16, bf16)

}  // namespace npu
