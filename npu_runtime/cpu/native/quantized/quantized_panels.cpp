// What products with packed weights in few bits are made of (see quantized.h for the layout).
#include "quantized/quantized_groups.h"

namespace npu {
namespace {

// The codes of k = 2 * pair and 2 * pair + 1 within a unit.
template <Codes kCodes>
NPU_INLINE ShortVec pair_of(UVec unit, int pair) {
  if constexpr (kCodes == Codes::int4) {
    typedef uint16_t UShortVec __attribute__((vector_size(4 * kLanes)));
    const UShortVec shifted = bit_cast<UShortVec>(unit) >> 4 * pair;
    return bit_cast<ShortVec>(pair == 3 ? shifted : shifted & 15);
  } else if constexpr (have_table(kCodes)) {
    return pair_of<Codes::int8>(bit_cast<UVec>(half_bytes<kCodes>(unit, pair % 2)), pair / 2);
  } else {
    const ShortVec halves = bit_cast<ShortVec>(unit);
    return (pair == 0 ? halves << 8 : halves) >> 8;
  }
}

// The number that code k of a unit stands for, without its scale.
template <Codes kCodes>
NPU_INLINE Vec number_of(UVec unit, int k, IVec zero) {
  const int half = k % 2 * 16, position = k / 2;
  if constexpr (kCodes == Codes::int4) {
    return __builtin_convertvector(bit_cast<IVec>(unit >> (half + 4 * position) & 15u) - zero, Vec);
  } else if constexpr (have_table(kCodes)) {
    const UVec numbers = bit_cast<UVec>(half_bytes<kCodes>(unit, position % 2));
    return number_of<Codes::int8>(numbers, k % 2 + position / 2 * 2, zero);
  } else {
    const IVec top = bit_cast<IVec>(unit << (24 - half - 8 * position));
    if constexpr (kCodes == Codes::int8) return __builtin_convertvector((top >> 24) - zero, Vec);
    // The sign stays at the top, exponent and fraction go to where a float has them; the bias grows from 7 to 127.
    else return bit_cast<Vec>(top >> 4 & int32_t(0x87f00000)) * 0x1p120f;
  }
}

NPU_INLINE ShortVec splat_pair(const int16_t* x) { return bit_cast<ShortVec>(IVec{} + load_bits<int32_t>(x)); }

template <Codes kCodes, Offsets kOffsets, int kRows>
void stream_rows_of(const QuantizedFormat& f, const IntegerRows& x, const char* panel, float* sums) {
  const int16_t* values = x.values;
  const IntegerRows::Block* block = x.blocks;
  const int64_t units = f.block / kUnit<kCodes>, group_blocks = f.group_blocks();
  Vec total[kRows][2] = {};
  for (int64_t g = 0; g < f.groups; ++g) {
    const GroupScales<kCodes, kOffsets> group(f, panel);
    panel += f.header_bytes();
    for (int64_t b = 0; b < group_blocks; ++b, block += kRows) {
      IVec sum[kRows][2];
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const IVec x_sum = IVec{} + int32_t(block[r].sum);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sum[r][v] = group.zero[v] * -x_sum;
      }
      for (int64_t u = 0; u < units; ++u, panel += kUnitBytes, values += kUnit<kCodes> * kRows) {
        const UVec unit[2] = {in_register(load_bits<UVec>(panel)), in_register(load_bits<UVec>(panel + kUnitBytes / 2))};
#pragma GCC unroll 4
        for (int pair = 0; pair < kUnit<kCodes> / 2; ++pair) {
          const ShortVec low = pair_of<kCodes>(unit[0], pair), high = pair_of<kCodes>(unit[1], pair);
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) {
            const ShortVec value = splat_pair(values + (pair * kRows + r) * 2);
            sum[r][0] = add_integer_pairs(sum[r][0], low, value);
            sum[r][1] = add_integer_pairs(sum[r][1], high, value);
          }
        }
        // A stream from memory.
        prefetch_page_ahead<64>(panel);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          Vec scaled = __builtin_convertvector(sum[r][v], Vec) * group.scale[v];
          if constexpr (kOffsets == Offsets::minimum) scaled += group.minimum[v] * block[r].sum;
          total[r][v] += scaled * block[r].scale;
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(sums + r * kPanel + v * kLanes, total[r][v]);
}

using Stream = void (*)(const QuantizedFormat&, const IntegerRows&, const char*, float*);
struct Streams {
  Stream of[kMaxStreamRows];
};
template <Codes kCodes, Offsets kOffsets, int... i>
constexpr Streams make_streams(std::integer_sequence<int, i...>) {
  return {{stream_rows_of<kCodes, kOffsets, i + 1>...}};
}
template <Codes kCodes, Offsets kOffsets>
constexpr Streams kStreams = make_streams<kCodes, kOffsets>(std::make_integer_sequence<int, kMaxStreamRows>());

template <Codes kCodes, Offsets kOffsets>
void unpack_blocks_of(const QuantizedFormat& f, const char* panel, int64_t first, int64_t count, IntegerPanel& out) {
  int16_t* values = out.values;
  for (int64_t b = 0; b < count; ++b) {
    const char* start = panel + (first + b) / f.group_blocks() * f.group_bytes();
    const GroupScales<kCodes, kOffsets> group(f, start);
    ShortVec zero[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      store(out.scales + b * kPanel + v * kLanes, group.scale[v]);
      store(out.minimums + b * kPanel + v * kLanes, group.minimum[v]);
      zero[v] = bit_cast<ShortVec>(group.zero[v] << 16 | (group.zero[v] & 0xffff));
    }
    const char* codes = start + f.header_bytes() + (first + b) % f.group_blocks() * f.block_bytes();
    for (int64_t u = 0; u < f.block / kUnit<kCodes>; ++u, codes += kUnitBytes) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const UVec unit = load_bits<UVec>(codes + v * kUnitBytes / 2);
#pragma GCC unroll 4
        for (int pair = 0; pair < kUnit<kCodes> / 2; ++pair) {
          const ShortVec value = pair_of<kCodes>(unit, pair) - zero[v];
          std::memcpy(values + 2 * kPanel * pair + 2 * v * kLanes, &value, sizeof(value));
        }
      }
      values += kUnit<kCodes> * kPanel;
    }
  }
}

template <int kRows, bool kMinimums>
void multiply_blocks_of(const QuantizedFormat& f, const IntegerRows& x, const IntegerPanel& panel, int64_t first,
                        int64_t count, float* sums) {
  const int16_t *values = x.values + first * f.block * kRows, *w = panel.values;
  const IntegerRows::Block* blocks = x.blocks + first * kRows;
  const float *scales = panel.scales, *minimums = panel.minimums;
  Vec total[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) total[r][v] = load(sums + r * kPanel + v * kLanes);
  for (int64_t b = 0; b < count; ++b, blocks += kRows, scales += kPanel, minimums += kPanel) {
    IVec sum[kRows][2] = {};
    for (const int16_t* end = values + f.block * kRows; values < end; values += 8 * kRows, w += 8 * kPanel) {
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const ShortVec low = in_register(load_bits<ShortVec>(w + pair * 2 * kPanel));
        const ShortVec high = in_register(load_bits<ShortVec>(w + pair * 2 * kPanel + kPanel));
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const ShortVec value = splat_pair(values + (pair * kRows + r) * 2);
          sum[r][0] = add_integer_pairs(sum[r][0], low, value);
          sum[r][1] = add_integer_pairs(sum[r][1], high, value);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        Vec scaled = __builtin_convertvector(sum[r][v], Vec) * load(scales + v * kLanes);
        if constexpr (kMinimums) scaled += load(minimums + v * kLanes) * blocks[r].sum;
        total[r][v] += scaled * blocks[r].scale;
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(sums + r * kPanel + v * kLanes, total[r][v]);
}

struct Table {
  decltype(&multiply_blocks_of<1, false>) multiply[2][kMaxIntegerRows];
};
template <int... i>
constexpr Table make_table(std::integer_sequence<int, i...>) {
  return {{{multiply_blocks_of<i + 1, false>...}, {multiply_blocks_of<i + 1, true>...}}};
}
constexpr Table kMultiplies = make_table(std::make_integer_sequence<int, kMaxIntegerRows>());

template <Codes kCodes, Offsets kOffsets, class W>
void dequantize_blocks_of(const QuantizedFormat& f, const char* panel, int64_t first, int64_t count, W* out) {
  constexpr bool kPairs = Step<W>::kWidth == 2;
  for (int64_t b = first; b < first + count; ++b) {
    const char* start = panel + b / f.group_blocks() * f.group_bytes();
    const GroupScales<kCodes, kOffsets> group(f, start);
    const char* codes = start + f.header_bytes() + b % f.group_blocks() * f.block_bytes();
    for (int64_t left = f.length(b); left > 0; left -= kUnit<kCodes>, codes += kUnitBytes) {
      const UVec unit[2] = {load_bits<UVec>(codes), load_bits<UVec>(codes + kUnitBytes / 2)};
      const auto number = [&](int v, int k) __attribute__((always_inline)) {
        return number_of<kCodes>(unit[v], k, group.zero[v]) * group.scale[v] + group.minimum[v];
      };
#pragma GCC unroll 8
      for (int k = 0; k < kUnit<kCodes>; k += 1 + kPairs) {
        if (k >= left) break;
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          if constexpr (kPairs) {
            const UVec low = __builtin_convertvector(narrow(number(v, k), W()), UVec);
            const UVec high = __builtin_convertvector(narrow(number(v, k + 1), W()), UVec);
            store(reinterpret_cast<float*>(out + 2 * v * kLanes), bit_cast<Vec>(low | high << 16));
          } else {
            store(out + v * kLanes, number(v, k));
          }
        }
        out += kPanel * (1 + kPairs);
      }
    }
  }
}

// The bits of `count` codes, from number `first` on; zeros follow.
uint32_t codes_at(const QuantizedFormat& f, const uint8_t* row, int64_t first, int64_t count) {
  uint32_t word = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t bit = (first + i) * f.bits();
    word |= uint32_t(row[bit / 8] >> bit % 8 & ((1 << f.bits()) - 1)) << i * f.bits();
  }
  return word;
}

// Codes one after the other as a unit: those of even k into the low half.
uint32_t unit_of(Codes codes, uint32_t x) {
  if (code_bits(codes) == 8) return (x & 0xff0000ffu) | (x >> 8 & 0xff00u) | (x << 8 & 0xff0000u);
  const auto evens = [](uint32_t y) {
    y &= 0x0f0f0f0fu;
    y = (y | y >> 4) & 0x00ff00ffu;
    return (y | y >> 8) & 0xffffu;
  };
  return evens(x) | evens(x >> 4) << 16;
}

bool has_nan(uint32_t x) {
  for (int i = 0; i < 4; ++i)
    if ((x >> 8 * i & 0x7f) == 0x7f) return true;
  return false;
}

// A float8 NaN makes its output NaN by way of the scale: the kernels take the code for a number.
void set_nan(char* scales, Dtype dtype, int64_t index) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    store_n(reinterpret_cast<T*>(scales) + index, splat(std::numeric_limits<float>::quiet_NaN()), 1);
  });
}

}  // namespace

void pack_quantized_panel(const QuantizedFormat& f, const QuantizedRows& w, int64_t columns, char* panel) {
  const int64_t row_bytes = f.groups * f.group * f.bits() / 8, size = item_size(f.scales), width = f.offset_size();
  for (int64_t g = 0; g < f.groups; ++g, panel += f.group_bytes()) {
    std::memset(panel, 0, f.group_bytes());
    for (int64_t c = 0; c < columns; ++c) {
      std::memcpy(panel + c * size, w.scales + (c * f.groups + g) * size, size);
      if (width) std::memcpy(panel + kPanel * size + c * width, w.offsets + (c * f.groups + g) * width, width);
    }
    char* target = panel + f.header_bytes();
    for (int64_t b = g * f.group_blocks(); b < (g + 1) * f.group_blocks(); ++b) {
      const int64_t begin = f.begin(b), length = f.length(b);
      for (int64_t k = 0; k < f.block; k += f.unit(), target += kUnitBytes) {
        const int64_t count = std::min(f.unit(), length - k), bit = (begin + k) * f.bits();
        if (count <= 0) continue;
        for (int64_t c = 0; c < columns; ++c) {
          const uint8_t* row = w.codes + c * row_bytes;
          const bool whole = count == f.unit() && bit % 8 == 0;
          const uint32_t codes = whole ? load_bits<uint32_t>(row + bit / 8) : codes_at(f, row, begin + k, count);
          if (f.codes == Codes::float8_e4m3 && has_nan(codes)) set_nan(panel, f.scales, c);
          const uint32_t unit = unit_of(f.codes, codes);
          std::memcpy(target + 4 * c, &unit, sizeof(unit));
        }
      }
    }
  }
}

void make_integers(const QuantizedFormat& f, const char* x, Dtype dtype, int64_t rows, int64_t row, const IntegerRows& out) {
  with_type(dtype, [&](auto* type) {
    const auto* source = reinterpret_cast<decltype(type)>(const_cast<char*>(x));
    int16_t* values = out.values + 2 * row;
    IntegerRows::Block* block = out.blocks + row;
    for (int64_t b = 0; b < f.blocks(); ++b, values += f.block * rows, block += rows) {
      const int64_t begin = f.begin(b), length = f.length(b);
      IVec bits = {};
      for (int64_t k = 0; k < length; k += kLanes) {
        const IVec next = bit_cast<IVec>(abs(load_n(source + begin + k, length - k)));
        bits = next > bits ? next : bits;  // which NaN is greater than anything
      }
      int32_t largest = 0;
      for (int i = 0; i < kLanes; ++i) largest = std::max(largest, bits[i]);
      const bool finite = largest < 0x7f800000;
      // With this power of two the largest is 2^14 at the least, and 2^15 - 1 at the most since x has 16 bits; less where
      // the power itself would not be a normal number.
      const int exponent = std::max(largest >> 23, 15) - 127 - 14;
      const Vec factor = splat(finite ? bit_cast<float>((127 - exponent) << 23) : 0.0f);
      constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the lowest bits of a sum with it are the integer
      Vec sum = {};
      int16_t integers[kMaxBlock + kLanes];
      for (int64_t k = 0; k < f.block; k += kLanes) {
        const Vec value = k < length ? load_n(source + begin + k, length - k) : Vec{};
        const Vec rounded = (finite ? value * factor : Vec{}) + kRound;
        sum += rounded - kRound;
        const HalfBits low = __builtin_convertvector(bit_cast<UVec>(rounded), HalfBits);
        std::memcpy(integers + k, &low, sizeof(low));
      }
      for (int64_t k = 0; k < f.block; k += 2) std::memcpy(values + k * rows, integers + k, 2 * sizeof(int16_t));
      block->scale = finite ? bit_cast<float>((127 + exponent) << 23) : std::numeric_limits<float>::quiet_NaN();
      block->sum = sum_lanes(sum);
    }
  });
}

void stream_rows(const QuantizedFormat& f, int64_t rows, const IntegerRows& x, const char* panel, float* sums) {
  with_format(f, [&](auto codes, auto offsets) {
    if constexpr (are_integers(codes.value))
      kStreams<codes.value, offsets.value>.of[rows - 1](f, x, panel, sums);
  });
}

void unpack_blocks(const QuantizedFormat& f, const char* panel, int64_t first, int64_t count, IntegerPanel& out) {
  with_format(f, [&](auto codes, auto offsets) {
    if constexpr (are_integers(codes.value))
      unpack_blocks_of<codes.value, offsets.value>(f, panel, first, count, out);
  });
}

void multiply_blocks(const QuantizedFormat& f, int64_t rows, const IntegerRows& x, const IntegerPanel& panel,
                     int64_t first, int64_t count, float* sums) {
  kMultiplies.multiply[f.offsets == Offsets::minimum][rows - 1](f, x, panel, first, count, sums);
}

template <class W>
void dequantize_blocks(const QuantizedFormat& f, const char* panel, int64_t first, int64_t count, W* out) {
  with_format(f, [&](auto codes, auto offsets) {
    dequantize_blocks_of<codes.value, offsets.value>(f, panel, first, count, out);
  });
}
template void dequantize_blocks<float>(const QuantizedFormat&, const char*, int64_t, int64_t, float*);
template void dequantize_blocks<bf16>(const QuantizedFormat&, const char*, int64_t, int64_t, bf16*);

}  // namespace npu
