// The micro-kernel of quantized_bytes.h, compiled once for every number of rows.
#include "quantized/quantized_bytes.h"

#include "quantized/quantized_groups.h"
#include "scratch.h"

namespace npu {
namespace {

NPU_INLINE void load_unit(const char* panel, UVec (&unit)[2]) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) unit[v] = in_register(load_bits<UVec>(panel + v * kUnitBytes / 2));
}

// small[r][v] += the codes of `units` units of int4 times those of each row; both pointers move behind them.
template <int kRows>
NPU_INLINE void add_small_units(int64_t units, const char*& panel, const int32_t*& quads, SmallSums (&small)[kRows][2]) {
  for (const char* end = panel + units * kUnitBytes; panel < end; panel += kUnitBytes) {
    UVec unit[2];
    load_unit(panel, unit);
#pragma GCC unroll 2
    for (int step = 0; step < 2; ++step, quads += kRows) {
      ByteVec codes[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) codes[v] = half_bytes<Codes::int4>(unit[v], step);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const ByteVec value = bit_cast<ByteVec>(splat_bits(quads[r]));
        small[r][0] = add_small_quads(small[r][0], codes[0], value);
        small[r][1] = add_small_quads(small[r][1], codes[1], value);
      }
    }
    if (kRows == 1) prefetch_page_ahead<64>(panel);
  }
}

// sum[r][v] = the codes of a group times those of each row; both pointers move behind it. kIsShort: the group has no more
// steps than small sums hold.
template <Codes kCodes, bool kIsShort, int kRows>
NPU_INLINE void multiply_group(int64_t units, const char*& panel, const int32_t*& quads, IVec (&sum)[kRows][2]) {
  if constexpr (kCodes == Codes::int4) {
    if (!kIsShort) std::fill(&sum[0][0], &sum[0][0] + 2 * kRows, IVec{});
    for (int64_t left = units; left > 0; left -= kSmallSteps / 2) {
      SmallSums small[kRows][2] = {};
      add_small_units<kRows>(kIsShort ? left : std::min(left, kSmallSteps / 2), panel, quads, small);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sum[r][v] = kIsShort ? whole_sums(small[r][v]) : sum[r][v] + whole_sums(small[r][v]);
      if (kIsShort) break;
    }
  } else {
    constexpr int kSteps = have_table(kCodes) ? 2 : 1;
    std::fill(&sum[0][0], &sum[0][0] + 2 * kRows, IVec{});
    for (int64_t u = 0; u < units; ++u, panel += kUnitBytes) {
      UVec unit[2];
      load_unit(panel, unit);
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; ++step, quads += kRows) {
        ByteVec codes[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          if constexpr (have_table(kCodes)) codes[v] = half_bytes<kCodes>(unit[v], step);
          else codes[v] = bit_cast<ByteVec>(unit[v]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const ByteVec value = bit_cast<ByteVec>(splat_bits(quads[r]));
          sum[r][0] = add_quads(sum[r][0], codes[0], value);
          sum[r][1] = add_quads(sum[r][1], codes[1], value);
        }
      }
      if (kRows == 1) prefetch_page_ahead<64>(panel);
    }
  }
}

template <Codes kCodes, Offsets kOffsets, bool kIsShort, int kRows>
void multiply_bytes_of(const QuantizedFormat& f, const ByteRows& x, const char* panel, float* sums) {
  constexpr int32_t kBias = kCodes == Codes::int4 ? 0 : kQuadBias;
  constexpr bool kHasZero = kBias || kOffsets == Offsets::zero_point || (kCodes == Codes::int4 && kOffsets == Offsets::none);
  const int64_t units = f.group_blocks() * f.block / kUnit<kCodes>;
  const int32_t *quads = x.quads, *x_sums = x.sums;
  Vec total[kRows][2] = {};
  for (int64_t g = 0; g < f.groups; ++g, x_sums += kRows) {
    const GroupScales<kCodes, kOffsets> group(f, panel);
    panel += f.header_bytes();
    IVec sum[kRows][2];
    multiply_group<kCodes, kIsShort, kRows>(units, panel, quads, sum);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const float float_sum = bit_cast<float>(x_sums[r]);  // whole, and below 2^24
        const int32_t x_sum = kOffsets == Offsets::minimum ? int32_t(float_sum) : x_sums[r];
        if constexpr (kHasZero) sum[r][v] -= (group.zero[v] + kBias) * x_sum;
        total[r][v] += to_floats(sum[r][v]) * group.scale[v];
        if constexpr (kOffsets == Offsets::minimum) total[r][v] += group.minimum[v] * float_sum;
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(sums + r * kPanel + v * kLanes, total[r][v]);
}

using Multiply = void (*)(const QuantizedFormat&, const ByteRows&, const char*, float*);
struct Rows {
  Multiply of[kMaxByteRows];
};
template <Codes kCodes, Offsets kOffsets, bool kIsShort, int... i>
constexpr Rows make_rows(std::integer_sequence<int, i...>) {
  return {{multiply_bytes_of<kCodes, kOffsets, kIsShort, i + 1>...}};
}
template <Codes kCodes, Offsets kOffsets, bool kIsShort>
constexpr Rows kRowTable = make_rows<kCodes, kOffsets, kIsShort>(std::make_integer_sequence<int, kMaxByteRows>());

// The codes of a unit in the order of its quads: of int4 those whose half bytes lie at the same place.
template <Codes kCodes>
void order_codes(const int8_t* codes, int64_t count, int8_t* out) {
  typedef int8_t Eight __attribute__((vector_size(8)));
  for (int64_t i = 0; i < count; i += 8) {
    const Eight from = load_bits<Eight>(codes + i);
    const Eight to = code_bits(kCodes) == 4 ? __builtin_shufflevector(from, from, 0, 4, 1, 5, 2, 6, 3, 7)
                                           : __builtin_shufflevector(from, from, 0, 2, 1, 3, 4, 6, 5, 7);
    std::memcpy(out + i, &to, sizeof(to));
  }
}

}  // namespace

float make_bytes(const QuantizedFormat& f, const char* x, Dtype dtype, int64_t rows, int64_t row, const ByteRows& out) {
  float scale = 0;
  const int64_t quads = ByteRows::group_quads(f);
  int8_t* codes = thread_scratch().get<int8_t>(2 * (4 * quads + kLanes));
  int8_t* ordered = codes + 4 * quads + kLanes;
  with_type(dtype, [&](auto* type) {
    const auto* source = reinterpret_cast<decltype(type)>(const_cast<char*>(x));
    const RowScale scaling = row_scale(source, f.groups * f.group, RowFormat::int8);
    scale = scaling.scale;
    for (int64_t g = 0; g < f.groups; ++g) {
      IVec sum = {};
      for (int64_t k = 0; k < 4 * quads; k += kLanes) {
        const IVec next = rounded_codes(source + g * f.group, k, f.group, scaling, RowFormat::int8);
        sum += next;
        store_bytes(codes + k, next, kLanes);
      }
      int32_t total = 0;
      for (int i = 0; i < kLanes; ++i) total += sum[i];
      out.sums[g * rows + row] = f.offsets == Offsets::minimum ? bit_cast<int32_t>(float(total)) : total;
      if (f.bits() == 4) order_codes<Codes::int4>(codes, 4 * quads, ordered);
      else order_codes<Codes::int8>(codes, 4 * quads, ordered);
      int32_t* target = out.quads + g * quads * rows + row;
      for (int64_t i = 0; i < quads; ++i) target[i * rows] = load_bits<int32_t>(ordered + 4 * i);
    }
  });
  return scale;
}

void multiply_bytes(const QuantizedFormat& f, int64_t rows, const ByteRows& x, const char* panel, float* sums) {
  with_format(f, [&](auto codes, auto offsets) {
    if constexpr (codes.value == Codes::int4) {
      if (f.group_blocks() * f.block <= 4 * kSmallSteps)
        return kRowTable<Codes::int4, offsets.value, true>.of[rows - 1](f, x, panel, sums);
    }
    if constexpr (are_integers(codes.value))
      kRowTable<codes.value, offsets.value, false>.of[rows - 1](f, x, panel, sums);
  });
}

}  // namespace npu
