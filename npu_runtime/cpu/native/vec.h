// Vectors of floats as wide as the instruction set has them, and the storage types that convert to and from them.
//
// This is the only file that knows instruction sets: everything else is written in kLanes, kRegisters and the functions
// below. GNU vector extensions (g++, clang++) express what they can; intrinsics stand where the extensions have no
// efficient spelling, and the portable branches beside them give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define NPU_AVX512 1
#define NPU_X86(name) _mm512_##name
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NPU_AVX2 1
#define NPU_X86(name) _mm256_##name
#elif defined(__SSE4_1__)
#define NPU_X86(name) _mm_##name
#endif

// Whether one instruction multiplies and adds quads of bytes, or pairs of 16-bit integers (VNNI), and how it is called.
#if defined(NPU_AVX512) && defined(__AVX512VNNI__)
#define NPU_VNNI(name) _mm512_##name##_epi32
#elif defined(NPU_AVX2) && defined(__AVXVNNI__)
#define NPU_VNNI(name) _mm256_##name##_avx_epi32
#endif

#define NPU_INLINE inline __attribute__((always_inline))

namespace npu {

#if defined(NPU_AVX512)
inline constexpr int kLanes = 16, kRegisters = 32;
#elif defined(NPU_AVX2)
inline constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kLanes = 4, kRegisters = 32;
#else
inline constexpr int kLanes = 4, kRegisters = 16;
#endif

// The instruction sets that this was compiled for, by the name of the level (levels.py).
inline const char* level_name() {
#if defined(NPU_AVX512) && defined(__AVX512BF16__) && defined(__AMX_BF16__)
  return "amx";
#elif defined(NPU_AVX512) && defined(__AVX512BF16__)
  return "avx512-bf16";
#elif defined(NPU_AVX512) && defined(NPU_VNNI)
  return "avx512-vnni";
#elif defined(NPU_AVX512)
  return "x86-64-v4";
#elif defined(NPU_VNNI)
  return "avx-vnni";
#elif defined(NPU_AVX2)
  return "x86-64-v3";
#elif defined(__SSE4_1__)
  return "x86-64-v2";
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return "aarch64-bf16";
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "portable";
#endif
}

// Tells the core that the thread waits in a loop.
inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Storage types: structs, so that neither is taken for an arithmetic type by mistake.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfBits __attribute__((vector_size(2 * kLanes)));

template <class To, class From>
NPU_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

template <class T>
NPU_INLINE T load_bits(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

NPU_INLINE Vec abs(Vec x) { return bit_cast<Vec>(bit_cast<UVec>(x) & 0x7fffffffu); }

// The value, in a register from here on: g++ would rather load it at each use, or compute it later. Of sums to which one
// instruction multiplies and adds, it would keep copies, which no longer fit into the registers.
template <class V>
NPU_INLINE V in_register(V value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
  return value;
}

// sum + a * b, in the register of the sum: where few are left, g++ would rather write over a factor, and move the sum back.
template <class V>
NPU_INLINE V add_product(V sum, V a, V b) {
#if defined(NPU_AVX2)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#else
  return a * b + sum;
#endif
}

using LaneSequence = std::make_integer_sequence<int, kLanes>;
template <int... i>
NPU_INLINE Vec splat(float value, std::integer_sequence<int, i...>) {
  return Vec{(void(i), value)...};
}
NPU_INLINE Vec splat(float value) { return splat(value, LaneSequence()); }
template <int... i>
NPU_INLINE Vec lane_numbers(std::integer_sequence<int, i...>) {
  return Vec{float(i)...};
}
NPU_INLINE Vec lane_numbers() { return lane_numbers(LaneSequence()); }

// Lane i of the result is lane index(i) of a, or lane index(i) - kLanes of b. `index` is a lambda without captures.
template <class Index, int... i>
NPU_INLINE Vec shuffle(Vec a, Vec b, Index, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, Index{}(i)...);
}
template <class Index>
NPU_INLINE Vec shuffle(Vec a, Vec b, Index index) {
  return shuffle(a, b, index, LaneSequence());
}

// The second operand where they do not compare: max(limit, x) passes NaN on, max(x, limit) replaces it.
NPU_INLINE Vec max(Vec a, Vec b) {
#if defined(NPU_X86)
  return NPU_X86(max_ps)(a, b);
#else
  return a > b ? a : b;
#endif
}
NPU_INLINE Vec min(Vec a, Vec b) {
#if defined(NPU_X86)
  return NPU_X86(min_ps)(a, b);
#else
  return a < b ? a : b;
#endif
}

// Whether some lane's condition, all ones or zero as comparisons give it, holds.
NPU_INLINE bool any(IVec condition) {
#if defined(NPU_AVX512)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(condition), bit_cast<__m512i>(condition)) != 0;
#elif defined(NPU_AVX2)
  return !_mm256_testz_si256(bit_cast<__m256i>(condition), bit_cast<__m256i>(condition));
#elif defined(NPU_X86)
  return !_mm_testz_si128(bit_cast<__m128i>(condition), bit_cast<__m128i>(condition));
#else
  int32_t folded = 0;
  for (int i = 0; i < kLanes; ++i) folded |= condition[i];
  return folded != 0;
#endif
}

// Conversions of one vector; the memory need not be aligned.

// g++ would convert two halves of a vector and join them.
NPU_INLINE UVec widen(HalfBits bits) {
#if defined(NPU_AVX512)
  return bit_cast<UVec>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(bits)));
#elif defined(NPU_AVX2)
  return bit_cast<UVec>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(bits)));
#else
  return __builtin_convertvector(bits, UVec);
#endif
}
NPU_INLINE Vec widen(HalfBits bits, bf16) { return bit_cast<Vec>(widen(bits) << 16); }
NPU_INLINE Vec widen(HalfBits bits, f16) {
#if defined(NPU_AVX512)
  return _mm512_cvtph_ps(bit_cast<__m256i>(bits));
#elif defined(NPU_AVX2)
  return _mm256_cvtph_ps(bit_cast<__m128i>(bits));
#elif defined(__aarch64__)
  return vcvt_f32_f16(bit_cast<float16x4_t>(bits));
#else
  // The exponent moves from a bias of 15 to one of 127 by a multiplication, which is exact for subnormals too.
  const UVec h = __builtin_convertvector(bits, UVec), magnitude = (h & 0x7fffu) << 13;
  const UVec special = bit_cast<UVec>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return bit_cast<Vec>(bit_cast<UVec>(bit_cast<Vec>(magnitude) * 0x1p112f) | special | (h & 0x8000u) << 16);
#endif
}

// Whether conversions to T flush subnormals to zero, unless they are told apart.
#if defined(NPU_AVX512) && defined(__AVX512BF16__)
template <class T>
inline constexpr bool kFlushes = std::is_same_v<T, bf16>;
NPU_INLINE __mmask16 subnormal_lanes(Vec v) { return _mm512_fpclass_ps_mask(v, 0x20); }
NPU_INLINE bool any_subnormal(Vec v) { return __builtin_expect(subnormal_lanes(v) != 0, false); }
template <int kRows, int kVecs>
NPU_INLINE bool any_subnormal(const Vec (&rows)[kRows][kVecs]) {
  __mmask16 lanes = 0;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) lanes = _kor_mask16(lanes, subnormal_lanes(rows[r][v]));
  return __builtin_expect(lanes != 0, false);
}
#else
template <class T>
inline constexpr bool kFlushes = false;
template <int kRows, int kVecs>
bool any_subnormal(const Vec (&rows)[kRows][kVecs]);
#endif
// Rounds to nearest even.
NPU_INLINE HalfBits narrow(Vec v, bf16) {
#if defined(NPU_AVX512) && defined(__AVX512BF16__)
  if (!any_subnormal(v)) return bit_cast<HalfBits>(_mm512_cvtneps_pbh(v));
#endif
  const UVec bits = bit_cast<UVec>(v);
  const UVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UVec quiet_nan = (bits >> 16) | 0x40u;
  const UVec result = v == v ? rounded : quiet_nan;
#if defined(NPU_AVX2)
  const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(result), __m256i{});
  return bit_cast<HalfBits>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#elif defined(NPU_AVX512)
  return bit_cast<HalfBits>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(result)));
#else
  return __builtin_convertvector(result, HalfBits);
#endif
}
NPU_INLINE HalfBits narrow(Vec v, f16) {
#if defined(NPU_AVX512)
  return bit_cast<HalfBits>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(NPU_AVX2)
  return bit_cast<HalfBits>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  return bit_cast<HalfBits>(vcvt_f16_f32(v));
#else
  const UVec bits = bit_cast<UVec>(v), magnitude = bits & 0x7fffffffu;
  const UVec normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // A sum with 0.5 has its last fraction bit where a subnormal's is, and rounds there.
  const UVec subnormal = bit_cast<UVec>(bit_cast<Vec>(magnitude) + 0.5f) - 0x3f000000u;
  UVec result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? UVec{} + 0x7c00u : result;
  result = magnitude > 0x7f800000u ? (magnitude >> 13 & 0x3ffu) | 0x7e00u : result;
  return __builtin_convertvector(result | (bits >> 16 & 0x8000u), HalfBits);
#endif
}

NPU_INLINE Vec load(const float* p) { return load_bits<Vec>(p); }
NPU_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
template <class T>
NPU_INLINE Vec load(const T* p) {
  return widen(load_bits<HalfBits>(p), T());
}
template <class T>
NPU_INLINE void store(T* p, Vec v) {
  const HalfBits bits = narrow(v, T());
  std::memcpy(p, &bits, sizeof(bits));
}

// Two vectors, `distance` elements apart: kLanes, unless they are floats. kNormal: no element is subnormal.
template <bool kNormal = false, class T>
NPU_INLINE void store_both(T* p, int64_t distance, Vec first, Vec second) {
#if defined(NPU_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    const bool normal = _kortestz_mask16_u8(subnormal_lanes(first), subnormal_lanes(second));
    if (kNormal || __builtin_expect(normal, true)) {
      const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
      return void(std::memcpy(p, &both, sizeof(both)));
    }
  }
#endif
  store(p, first);
  store(p + distance, second);
}

// The first `count` elements only; the other lanes load as zero. A count beyond kLanes means all.
#if defined(NPU_AVX512)
NPU_INLINE __mmask16 first_lanes(int64_t count) { return (1u << count) - 1; }
template <class T>
NPU_INLINE Vec load_n(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps(first_lanes(count), p);
  else return widen(bit_cast<HalfBits>(_mm256_maskz_loadu_epi16(first_lanes(count), p)), T());
}
template <class T>
NPU_INLINE void store_n(T* p, Vec v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, first_lanes(count), v);
  else _mm256_mask_storeu_epi16(p, first_lanes(count), bit_cast<__m256i>(narrow(v, T())));
}
#else
template <class T>
NPU_INLINE void copy_first(const T* from, T* to, int64_t count) {
#pragma GCC unroll 4
  for (int piece = kLanes / 2; piece; piece /= 2)
    if (count & piece) {
      std::memcpy(to, from, piece * sizeof(T));
      from += piece;
      to += piece;
    }
}
template <class T>
NPU_INLINE Vec load_n(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
#if defined(NPU_AVX2)
  if constexpr (sizeof(T) == 4) return _mm256_maskload_ps(p, bit_cast<__m256i>(lane_numbers() < float(count)));
#endif
  T buffer[kLanes] = {};
  copy_first(p, buffer, count);
  return load(buffer);
}
template <class T>
NPU_INLINE void store_n(T* p, Vec v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  T buffer[kLanes];
  store(buffer, v);
  copy_first(buffer, p, count);
}
#endif

// Calls body(i) for vectors that cover [0, count), at least; the last one begins early enough to end there, and so may
// cover again what the one before it did.
template <class F>
NPU_INLINE void for_overlapping(int64_t count, const F& body) {
  for (int64_t i = 0; i < count; i += kLanes) body(std::max<int64_t>(0, std::min(i, count - kLanes)));
}

// Pairs of bfloat16, one in each half of a lane: sum + a.low * b.low + a.high * b.high in one instruction, where
// kHasPairs.
#if defined(NPU_AVX512) && defined(__AVX512BF16__)
inline constexpr bool kHasPairs = true, kPairsFlush = true;  // sums that are subnormal become zero
NPU_INLINE Vec add_pairs(Vec sum, Vec a, Vec b) {
  return in_register(_mm512_dpbf16_ps(sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline constexpr bool kHasPairs = true, kPairsFlush = false;
NPU_INLINE Vec add_pairs(Vec sum, Vec a, Vec b) {
  return vbfdotq_f32(sum, bit_cast<bfloat16x8_t>(a), bit_cast<bfloat16x8_t>(b));
}
#else
inline constexpr bool kHasPairs = false, kPairsFlush = false;
Vec add_pairs(Vec sum, Vec a, Vec b);
#endif

// The first half of a vector, and whether a product of halves takes less time than one of whole vectors.
typedef float HalfVec __attribute__((vector_size(2 * kLanes)));
inline constexpr bool kHasHalves = kLanes == 16;
template <int... i>
NPU_INLINE HalfVec first_half(Vec v, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(v, v, i...);
}
NPU_INLINE HalfVec first_half(Vec v) { return first_half(v, std::make_integer_sequence<int, kLanes / 2>()); }
template <int... i>
NPU_INLINE Vec followed_by_zeros(HalfVec v, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(v, HalfVec{}, i...);
}
NPU_INLINE Vec followed_by_zeros(HalfVec v) { return followed_by_zeros(v, LaneSequence()); }
#if defined(NPU_AVX512) && defined(__AVX512BF16__)
NPU_INLINE HalfVec add_pairs(HalfVec sum, HalfVec a, HalfVec b) {
  return in_register(_mm256_dpbf16_ps(sum, bit_cast<__m256bh>(a), bit_cast<__m256bh>(b)));
}
#else
HalfVec add_pairs(HalfVec sum, HalfVec a, HalfVec b);
#endif

// A register's bits, as the instructions on integers take them.
typedef long long Bits __attribute__((vector_size(4 * kLanes)));

// Pairs of 16-bit integers, one in each half of a lane: sum + a.low * b.low + a.high * b.high.
typedef int16_t ShortVec __attribute__((vector_size(4 * kLanes)));
// Whether these products of integers are faster than as many of floats.
#if defined(NPU_X86)
inline constexpr bool kHasIntegerPairs = true;
#else
inline constexpr bool kHasIntegerPairs = false;
#endif
NPU_INLINE IVec add_integer_pairs(IVec sum, ShortVec a, ShortVec b) {
#if defined(NPU_X86)
#if defined(NPU_VNNI)
  sum = bit_cast<IVec>(NPU_VNNI(dpwssd)(bit_cast<Bits>(sum), bit_cast<Bits>(a), bit_cast<Bits>(b)));
#elif defined(NPU_AVX512)
  sum += bit_cast<IVec>(_mm512_madd_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(NPU_AVX2)
  sum += bit_cast<IVec>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#else
  sum += bit_cast<IVec>(_mm_madd_epi16(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#endif
  return in_register(sum);
#elif defined(__aarch64__)
  const int16x8_t x = bit_cast<int16x8_t>(a), y = bit_cast<int16x8_t>(b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
  return sum + bit_cast<IVec>(vpaddq_s32(low, high));
#else
  const IVec x = bit_cast<IVec>(a), y = bit_cast<IVec>(b);
  return sum + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

NPU_INLINE IVec splat_bits(int32_t value) { return IVec{} + value; }

// Quads of bytes, one in each quarter of a lane, and the sums of their four products.
typedef int8_t ByteVec __attribute__((vector_size(4 * kLanes)));
NPU_INLINE IVec quad_products(ByteVec a, ByteVec b) {
  const IVec x = bit_cast<IVec>(a), y = bit_cast<IVec>(b);
  return (x << 24 >> 24) * (y << 24 >> 24) + (x << 16 >> 24) * (y << 16 >> 24) + (x << 8 >> 24) * (y << 8 >> 24) +
         (x >> 24) * (y >> 24);
}

// The entries of a table of 16 bytes that the bytes of `places`, from 0 to 15, choose.
NPU_INLINE ByteVec choose_bytes(const int8_t (&table)[16], ByteVec places) {
#if defined(NPU_AVX512)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return bit_cast<ByteVec>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), bit_cast<__m512i>(places)));
#elif defined(NPU_AVX2)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return bit_cast<ByteVec>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), bit_cast<__m256i>(places)));
#elif defined(NPU_X86)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return bit_cast<ByteVec>(_mm_shuffle_epi8(entries, bit_cast<__m128i>(places)));
#elif defined(__aarch64__)
  return bit_cast<ByteVec>(vqtbl1q_s8(vld1q_s8(table), bit_cast<uint8x16_t>(places)));
#else
  ByteVec bytes;
  for (int i = 0; i < 4 * kLanes; ++i) bytes[i] = table[places[i]];
  return bytes;
#endif
}

// sum + a * b over quads, the bytes of a from 0 to 255: in one instruction where kHasByteQuads.
#if defined(NPU_VNNI)
inline constexpr bool kHasByteQuads = true;
NPU_INLINE IVec add_byte_quads(IVec sum, ByteVec a, ByteVec b) {
  return in_register(bit_cast<IVec>(NPU_VNNI(dpbusd)(bit_cast<Bits>(sum), bit_cast<Bits>(a), bit_cast<Bits>(b))));
}
#elif defined(__ARM_FEATURE_MATMUL_INT8)
inline constexpr bool kHasByteQuads = true;
NPU_INLINE IVec add_byte_quads(IVec sum, ByteVec a, ByteVec b) {
  return vusdotq_s32(sum, bit_cast<uint8x16_t>(a), bit_cast<int8x16_t>(b));
}
#else
inline constexpr bool kHasByteQuads = false;
NPU_INLINE IVec add_byte_quads(IVec sum, ByteVec a, ByteVec b) {
  const UVec x = bit_cast<UVec>(a);
  const IVec y = bit_cast<IVec>(b);
  return sum + bit_cast<IVec>(x & 0xff) * (y << 24 >> 24) + bit_cast<IVec>(x >> 8 & 0xff) * (y << 16 >> 24) +
         bit_cast<IVec>(x >> 16 & 0xff) * (y << 8 >> 24) + bit_cast<IVec>(x >> 24) * (y >> 24);
}
#endif

// sum + (a + kQuadBias) * b over quads; no byte of b is -128.
#if defined(NPU_VNNI)
inline constexpr int32_t kQuadBias = 128;  // the instruction wants a as unsigned
NPU_INLINE IVec add_quads(IVec sum, ByteVec a, ByteVec b) {
  const ByteVec biased = bit_cast<ByteVec>(bit_cast<UVec>(a) ^ 0x80808080u);
  return add_byte_quads(sum, biased, b);
}
#else
inline constexpr int32_t kQuadBias = 0;
NPU_INLINE IVec add_quads(IVec sum, ByteVec a, ByteVec b) {
#if defined(NPU_AVX512)
  const __m512i x = bit_cast<__m512i>(a), y = bit_cast<__m512i>(b);
  const __m512i signed_b = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(x), _mm512_setzero_si512(), y);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(x), signed_b);
  return in_register(sum + bit_cast<IVec>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
#elif defined(NPU_AVX2)
  const __m256i x = bit_cast<__m256i>(a), y = bit_cast<__m256i>(b);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(y, x));
  return in_register(sum + bit_cast<IVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
#elif defined(NPU_X86)
  const __m128i x = bit_cast<__m128i>(a), y = bit_cast<__m128i>(b);
  const __m128i pairs = _mm_maddubs_epi16(_mm_abs_epi8(x), _mm_sign_epi8(y, x));
  return in_register(sum + bit_cast<IVec>(_mm_madd_epi16(pairs, _mm_set1_epi16(1))));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, bit_cast<int8x16_t>(a), bit_cast<int8x16_t>(b));
#else
  return sum + quad_products(a, b);
#endif
}
#endif

// sum + a * b over quads, for a from 0 to 15. Where sums of 16 bits are faster, kSmallSteps of them fit before
// whole_sums() has to make sums of quads of them.
#if defined(NPU_X86) && !defined(NPU_VNNI)
typedef ShortVec SmallSums;
inline constexpr int64_t kSmallSteps = 8;  // 8 * 2 * 15 * 127 is below 2^15
NPU_INLINE SmallSums add_small_quads(SmallSums sum, ByteVec a, ByteVec b) {
#if defined(NPU_AVX512)
  return in_register(sum + bit_cast<ShortVec>(_mm512_maddubs_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b))));
#elif defined(NPU_AVX2)
  return in_register(sum + bit_cast<ShortVec>(_mm256_maddubs_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b))));
#else
  return in_register(sum + bit_cast<ShortVec>(_mm_maddubs_epi16(bit_cast<__m128i>(a), bit_cast<__m128i>(b))));
#endif
}
NPU_INLINE IVec whole_sums(SmallSums sums) { return add_integer_pairs(IVec{}, sums, ShortVec{} + int16_t(1)); }
#else
typedef IVec SmallSums;
inline constexpr int64_t kSmallSteps = 1 << 20;
NPU_INLINE SmallSums add_small_quads(SmallSums sum, ByteVec a, ByteVec b) {
#if defined(NPU_VNNI)
  return add_byte_quads(sum, a, b);
#else
  return add_quads(sum, a, b);
#endif
}
NPU_INLINE IVec whole_sums(SmallSums sums) { return sums; }
#endif

template <class T, int kCount>
struct BytesOf {
  typedef T Type __attribute__((vector_size(kCount)));
};
template <class T, int kCount>
using Bytes = typename BytesOf<T, kCount>::Type;

// Bytes as int16. g++ would make two halves of a vector and join them.
template <class T>
NPU_INLINE ShortVec widen(Bytes<T, 2 * kLanes> bytes) {
#if defined(NPU_AVX512)
  const __m256i narrow = bit_cast<__m256i>(bytes);
#elif defined(NPU_AVX2)
  const __m128i narrow = bit_cast<__m128i>(bytes);
#endif
#if defined(NPU_AVX512) || defined(NPU_AVX2)
  return bit_cast<ShortVec>(std::is_signed_v<T> ? NPU_X86(cvtepi8_epi16)(narrow) : NPU_X86(cvtepu8_epi16)(narrow));
#else
  return __builtin_convertvector(bytes, ShortVec);
#endif
}

template <class T, int... i>
NPU_INLINE ShortVec pair_bytes(Bytes<T, kLanes> first, Bytes<T, kLanes> second, std::integer_sequence<int, i...>) {
  return widen<T>(
      __builtin_shufflevector(first, second, i / 2 + i % 2 * kLanes..., (kLanes + i) / 2 + i % 2 * kLanes...));
}

// The bytes of `first` and `second` in turns, kLanes of each, as pairs of int16.
template <class T>
NPU_INLINE ShortVec pair_bytes(const T* first, const T* second) {
  using Whole = Bytes<T, kLanes>;
  return pair_bytes<T>(load_bits<Whole>(first), load_bits<Whole>(second), LaneSequence());
}

// 2 * kLanes bytes as int16.
template <class T>
NPU_INLINE ShortVec widen_bytes(const T* p) {
  return widen<T>(load_bits<Bytes<T, 2 * kLanes>>(p));
}

// The first `count` bytes, fewer than kLanes.
NPU_INLINE void copy_bytes(const void* from, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
}

// How numbers counted from a zero point become codes that bytes hold.
struct ToCodes {
  int32_t zero, least;
#if defined(NPU_X86)
  // As int16, which takes numbers that are too small for it as the least.
  NPU_INLINE Bits operator()(IVec first, IVec second) const {
    const Bits pairs = NPU_X86(packs_epi32)(bit_cast<Bits>(first), bit_cast<Bits>(second));
    const Bits zeros = bit_cast<Bits>(ShortVec{} + int16_t(zero)), low = bit_cast<Bits>(ShortVec{} + int16_t(least));
    return NPU_X86(max_epi16)(NPU_X86(adds_epi16)(pairs, zeros), low);
  }
#else
  NPU_INLINE IVec operator()(IVec numbers) const { return numbers + zero; }
#endif
};

#if defined(NPU_X86)
template <class T>
NPU_INLINE Bits pack_bytes(Bits first, Bits second) {
  return std::is_signed_v<T> ? NPU_X86(packs_epi16)(first, second) : NPU_X86(packus_epi16)(first, second);
}
#endif

// The lanes of two vectors of numbers, one after the other, as codes.
template <class T>
NPU_INLINE void store_bytes(T* p, IVec first, IVec second, const ToCodes& codes) {
#if defined(NPU_X86)
  const Bits pairs = codes(first, second), packed = pack_bytes<T>(pairs, pairs);
#if defined(NPU_AVX512)
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
  const Bits bytes = _mm512_permutexvar_epi32(order, packed);
#elif defined(NPU_AVX2)
  const Bits bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
#else
  const Bits bytes = packed;
#endif
  std::memcpy(p, &bytes, 2 * kLanes);
#else
  typedef T Narrow __attribute__((vector_size(kLanes)));
  const Narrow low = __builtin_convertvector(codes(first), Narrow), high = __builtin_convertvector(codes(second), Narrow);
  std::memcpy(p, &low, kLanes);
  std::memcpy(p + kLanes, &high, kLanes);
#endif
}

// The same address; the compiler is not told that it is.
template <class T>
NPU_INLINE const T* not_known(const T* p) {
  asm("" : "+r"(p));
  return p;
}

// Keeps the compiler from reading memory for what follows any sooner.
NPU_INLINE void read_from_here_on() { asm volatile("" ::: "memory"); }

// Prefetches kBytes that are a page ahead of p: the hardware follows a stream up to the end of a page.
template <int kBytes>
NPU_INLINE void prefetch_page_ahead(const void* p) {
#pragma GCC unroll 2
  for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(static_cast<const char*>(p) + 4096 + line);
}

// The first `count` bytes, at most a vector of them; the others are 0.
NPU_INLINE ByteVec load_first(const void* p, int64_t count) {
#if defined(NPU_AVX512)
  return bit_cast<ByteVec>(_mm512_maskz_loadu_epi8(~__mmask64(0) >> (64 - count), p));
#else
  if (count >= 4 * kLanes) return load_bits<ByteVec>(p);
  ByteVec bytes{};
  copy_bytes(p, &bytes, count);
  return bytes;
#endif
}

// The bytes of four vectors in turns. Byte 16 i + 4 v + j of each is in quads[v], lane 4 i + j.
NPU_INLINE void interleave_quads(ByteVec a, ByteVec b, ByteVec c, ByteVec d, ByteVec* quads) {
#if defined(NPU_X86)
  const Bits first = bit_cast<Bits>(a), second = bit_cast<Bits>(b), third = bit_cast<Bits>(c), last = bit_cast<Bits>(d);
  const Bits low = NPU_X86(unpacklo_epi8)(first, second), high = NPU_X86(unpackhi_epi8)(first, second);
  const Bits low_rest = NPU_X86(unpacklo_epi8)(third, last), high_rest = NPU_X86(unpackhi_epi8)(third, last);
  quads[0] = bit_cast<ByteVec>(NPU_X86(unpacklo_epi16)(low, low_rest));
  quads[1] = bit_cast<ByteVec>(NPU_X86(unpackhi_epi16)(low, low_rest));
  quads[2] = bit_cast<ByteVec>(NPU_X86(unpacklo_epi16)(high, high_rest));
  quads[3] = bit_cast<ByteVec>(NPU_X86(unpackhi_epi16)(high, high_rest));
#else
  int8_t columns[4][4 * kLanes];
  for (int n = 0; n < 4 * kLanes; ++n) {
    int8_t* quad = columns[n / 4 % 4] + 4 * (n / 16 * 4 + n % 4);
    quad[0] = a[n], quad[1] = b[n], quad[2] = c[n], quad[3] = d[n];
  }
  std::memcpy(quads, columns, sizeof(columns));
#endif
}

// Four vectors of numbers in that order as codes; the first `count` of them.
template <class T>
NPU_INLINE void store_interleaved(T* p, const IVec* v, int64_t count, const ToCodes& codes) {
#if defined(NPU_X86)
  const Bits bytes = pack_bytes<T>(codes(v[0], v[1]), codes(v[2], v[3]));
#else
  T bytes[4 * kLanes];
  for (int n = 0; n < 4 * kLanes; ++n) bytes[n] = T(codes(v[n / 4 % 4])[n / 16 * 4 + n % 4]);
#endif
  if (count >= 4 * kLanes) std::memcpy(p, &bytes, sizeof(bytes));
  else if (count == 2 * kLanes) std::memcpy(p, &bytes, 2 * kLanes);
  else copy_bytes(&bytes, p, count);
}

// Lanes of integers as bytes, of which they are; the first `count` of them.
template <class T>
NPU_INLINE void store_bytes(T* p, IVec v, int64_t count) {
  typedef T Narrow __attribute__((vector_size(kLanes)));
#if defined(NPU_AVX2)
  const __m256i whole = bit_cast<__m256i>(v);
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  const __m128i packed = std::is_signed_v<T> ? _mm_packs_epi16(pairs, pairs) : _mm_packus_epi16(pairs, pairs);
  const Narrow bytes = bit_cast<Narrow>(_mm_cvtsi128_si64(packed));
#else
  const Narrow bytes = __builtin_convertvector(v, Narrow);
#endif
  if (count >= kLanes) std::memcpy(p, &bytes, kLanes);
  else copy_bytes(&bytes, p, count);
}
template <class T>
NPU_INLINE IVec load_bytes(const T* p) {
#if defined(NPU_AVX512)
  const __m128i bytes = load_bits<__m128i>(p);
#elif defined(NPU_AVX2)
  const __m128i bytes = _mm_cvtsi64_si128(load_bits<int64_t>(p));
#elif defined(NPU_X86)
  const __m128i bytes = _mm_cvtsi32_si128(load_bits<int32_t>(p));
#endif
#if defined(NPU_X86)
  return bit_cast<IVec>(std::is_signed_v<T> ? NPU_X86(cvtepi8_epi32)(bytes) : NPU_X86(cvtepu8_epi32)(bytes));
#else
  typedef T Narrow __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load_bits<Narrow>(p), IVec);
#endif
}
template <class T>
NPU_INLINE IVec load_bytes(const T* p, int64_t count) {
  if (count >= kLanes) return load_bytes(p);
  T bytes[kLanes] = {};
  copy_bytes(p, bytes, count);
  return load_bytes(bytes);
}

NPU_INLINE Vec to_floats(IVec v) { return __builtin_convertvector(v, Vec); }
// The nearest integers, ties to even, of floats between -2^22 and 2^22.
NPU_INLINE IVec to_nearest(Vec v) {
#if defined(NPU_X86)
  return bit_cast<IVec>(NPU_X86(cvtps_epi32)(v));
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction bits left
  return bit_cast<IVec>(v + kRound) - bit_cast<IVec>(splat(kRound));
#endif
}

// The nearest integers of floats for ToCodes, limited from below only where that does not do it. On x86, what is below all
// integers, or no number, becomes the least one.
NPU_INLINE IVec to_numbers(Vec v, Vec low, Vec high) {
#if defined(NPU_X86)
  (void)low;
  return to_nearest(min(high, v));
#else
  return to_nearest(min(high, max(v, low)));
#endif
}

// Tiles: products of 32 rows by 32 columns of bfloat16 pairs, or of four bytes, in a matrix unit, where kHasTiles. A thread
// may multiply while it has a TileState for that many steps, and the process only if tiles_allowed().
inline constexpr int64_t kTileRows = 32, kTileSteps = 16;
#if defined(NPU_AVX512) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
inline constexpr bool kHasTiles = true;
inline bool tiles_allowed() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl: the kernel saves tiles only on request
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}
// The shapes of the eight tiles: four of sums, and four of operands, in which x has 16 rows and a panel 64 bytes a row. All
// four are as deep as the steps, a whole tile at most; where more steps are no whole tiles, two are as deep as the rest.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16};

  explicit TileConfig(int64_t steps) {
    const bool mixed = has_rest(steps);
    const int64_t depth = std::clamp<int64_t>(steps, 1, kTileSteps), rest = mixed ? steps % kTileSteps : depth;
    set(4, 16, depth);
    mixed ? set(5, depth, 16) : set(5, 16, depth);
    mixed ? set(6, 16, rest) : set(6, depth, 16);
    set(7, rest, 16);
  }
  static bool has_rest(int64_t steps) { return steps > kTileSteps && steps % kTileSteps; }

 private:
  void set(int tile, int64_t height, int64_t width) { rows[tile] = height, row_bytes[tile] = 4 * width; }
};
struct TileState {
  // All of it lies in memory: g++ 12's intrinsic tells the compiler that 8 of its bytes are read, and it left out stores.
  explicit TileState(int64_t steps = kTileSteps) {
    const TileConfig config(steps);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileState() { _tile_release(); }
};
// sums[32][32] = the first four tiles, each with 16 rows of 16 sums of four bytes.
template <class T>
inline void store_tiles(T* sums) {
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}
// Sums += x · panel for steps of the depth that all tiles of operands have. Loads stand between products, which they wait for.
inline void add_tiles(const bf16* x, int64_t x_stride, const bf16* panel) {
  _tile_loadd(6, panel, 128);
  _tile_loadd(4, x, 2 * x_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, panel + 32, 128);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, x + 16 * x_stride, 2 * x_stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}
// The same for a whole tile, and for the rest of the steps, beside each other.
inline void add_whole_tiles(const bf16* x, int64_t x_stride, const bf16* panel) {
  _tile_loadd(4, x, 2 * x_stride);
  _tile_loadd(5, panel, 128);
  _tile_dpbf16ps(0, 4, 5);
  _tile_loadd(5, panel + 32, 128);
  _tile_dpbf16ps(1, 4, 5);
  _tile_loadd(4, x + 16 * x_stride, 2 * x_stride);
  _tile_dpbf16ps(3, 4, 5);
  _tile_loadd(5, panel, 128);
  _tile_dpbf16ps(2, 4, 5);
}
inline void add_rest_of_tiles(const bf16* x, int64_t x_stride, const bf16* panel) {
  _tile_loadd(6, x, 2 * x_stride);
  _tile_loadd(7, panel, 128);
  _tile_dpbf16ps(0, 6, 7);
  _tile_loadd(7, panel + 32, 128);
  _tile_dpbf16ps(1, 6, 7);
  _tile_loadd(6, x + 16 * x_stride, 2 * x_stride);
  _tile_dpbf16ps(3, 6, 7);
  _tile_loadd(7, panel, 128);
  _tile_dpbf16ps(2, 6, 7);
}
// sums[32][32] = x · panel; x is a plain matrix with rows x_stride values apart. Its columns lie in `parts` places, each
// offsets[i] values from x on, of `steps` steps each. Calls between() after the products of each depth of tiles: the vector
// units have time for other work.
template <class Between>
NPU_INLINE void multiply_tile_parts(const bf16* x, int64_t x_stride, const int64_t* offsets, int64_t parts, const bf16* panel,
                                    int64_t steps, float* sums, const Between& between) {
  read_from_here_on();  // g++ is not told that tiles are loaded from memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t depth = std::min(steps, kTileSteps), rest = TileConfig::has_rest(steps) ? steps % kTileSteps : 0;
  for (int64_t part = 0; part < parts; ++part) {
    const bf16 *from = x + offsets[part], *end = from + 2 * (steps - rest);
    for (; from < end; from += 2 * depth, panel += 64 * depth) {
      rest ? add_whole_tiles(from, x_stride, panel) : add_tiles(from, x_stride, panel);
      between();
    }
    if (!rest) continue;
    add_rest_of_tiles(from, x_stride, panel);
    between();
    panel += 64 * rest;
  }
  store_tiles(sums);
}
// The same for x from 0 to 255 and a panel from -128 to 127. Every row's sums begin with the 32 of `start`.
inline void multiply_byte_tiles(const uint8_t* x, int64_t x_stride, const int8_t* panel, int64_t steps,
                                const int32_t* start, int32_t* sums) {
  read_from_here_on();
  _tile_loadd(0, start, 0);
  _tile_loadd(1, start + 16, 0);
  _tile_loadd(2, start, 0);
  _tile_loadd(3, start + 16, 0);
  for (int64_t s = 0; s < steps; s += kTileSteps, x += 4 * kTileSteps, panel += 128 * kTileSteps) {
    _tile_loadd(4, x, x_stride);
    _tile_loadd(5, x + 16 * x_stride, x_stride);
    _tile_loadd(6, panel, 128);
    _tile_loadd(7, panel + 64, 128);
    // Two turns ahead: the loads of one turn fill the window in which the processor looks for others.
#pragma GCC unroll 32
    for (int line = 0; line < 128 * kTileSteps; line += 64) __builtin_prefetch(panel + 2 * 128 * kTileSteps + line);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  store_tiles(sums);
}
#else
inline constexpr bool kHasTiles = false;
inline bool tiles_allowed() { return false; }
struct TileState {
  explicit TileState(int64_t = kTileSteps) {}
};
template <class Between>
void multiply_tile_parts(const bf16*, int64_t, const int64_t*, int64_t, const bf16*, int64_t, float*, const Between&) {}
void multiply_byte_tiles(const uint8_t* x, int64_t x_stride, const int8_t* panel, int64_t steps, const int32_t* start,
                         int32_t* sums);
#endif

// The same as multiply_tile_parts for an x whose columns follow each other.
template <class Between>
NPU_INLINE void multiply_tiles(const bf16* x, int64_t x_stride, const bf16* panel, int64_t steps, float* sums,
                               const Between& between) {
  const int64_t offset = 0;
  multiply_tile_parts(x, x_stride, &offset, 1, panel, steps, sums, between);
}

// p * 2^k for an integral k, right below the normal range too.
NPU_INLINE Vec scale_by_power(Vec p, Vec k) {
#if defined(NPU_AVX512)
  return _mm512_scalef_ps(p, k);
#else
  // Two exact steps: 2^k itself may be out of range.
  const IVec exponent = __builtin_convertvector(k, IVec), half = exponent >> 1;
  return p * bit_cast<Vec>((half + 127) << 23) * bit_cast<Vec>((exponent - half + 127) << 23);
#endif
}

// Everything below is written in the functions above.

template <class T>
inline constexpr Dtype dtype_of = std::is_same_v<T, float>  ? Dtype::f32
                                  : std::is_same_v<T, bf16> ? Dtype::bf16
                                                            : Dtype::f16;

// Calls body with a null pointer of the storage type that `dtype` names.
template <class F>
NPU_INLINE void with_type(Dtype dtype, const F& body) {
  switch (dtype) {
    case Dtype::f32: return body(static_cast<float*>(nullptr));
    case Dtype::bf16: return body(static_cast<bf16*>(nullptr));
    case Dtype::f16: return body(static_cast<f16*>(nullptr));
  }
}

// As load_n and store_n, for operands whose type is only known at run time: element `index` of `data` onwards.
NPU_INLINE Vec load_any(const char* data, Dtype dtype, int64_t index, int64_t count) {
  switch (dtype) {
    case Dtype::bf16: return load_n(reinterpret_cast<const bf16*>(data) + index, count);
    case Dtype::f16: return load_n(reinterpret_cast<const f16*>(data) + index, count);
    default: return load_n(reinterpret_cast<const float*>(data) + index, count);
  }
}
NPU_INLINE void store_any(char* data, Dtype dtype, int64_t index, Vec v, int64_t count) {
  switch (dtype) {
    case Dtype::bf16: return store_n(reinterpret_cast<bf16*>(data) + index, v, count);
    case Dtype::f16: return store_n(reinterpret_cast<f16*>(data) + index, v, count);
    default: return store_n(reinterpret_cast<float*>(data) + index, v, count);
  }
}

// Elements 0, kStride, 2 * kStride, ...: `count` of them, kLanes at most; nothing after the last of them is touched.
// kStride 0 stands for a `stride` known only at run time.
template <int kStride, class T>
NPU_INLINE Vec load_strided(const T* p, int64_t stride, int64_t count) {
  if constexpr (kStride == 1) return load_n(p, count);
  if constexpr (kStride == 2 || kStride == 4) {
    if (count >= kLanes) {
      // The second vector begins one element early, so that it ends at the last one needed.
      constexpr int kHalf = kStride / 2;
      const Vec low = load_strided<kHalf>(p, kHalf, kLanes);
      const Vec high = load_strided<kHalf>(p + (kLanes - 1) * kHalf, kHalf, kLanes);
      return shuffle(low, high, [](int i) { return 2 * i < kLanes ? 2 * i : 2 * i + 1; });
    }
  }
  T picked[kLanes] = {};
  for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i) picked[i] = p[i * stride];
  return load(picked);
}

// Reductions over the lanes, in a fixed order.

template <int kDistance = kLanes / 2, class F>
NPU_INLINE float fold_lanes(Vec v, const F& combine) {
  v = combine(v, shuffle(v, v, [](int i) { return i ^ kDistance; }));
  if constexpr (kDistance > 1) return fold_lanes<kDistance / 2>(v, combine);
  else return v[0];
}
NPU_INLINE float sum_lanes(Vec v) {
  return fold_lanes(v, [](Vec a, Vec b) __attribute__((always_inline)) { return a + b; });
}
NPU_INLINE float max_lanes(Vec v) {
  return fold_lanes(v, [](Vec a, Vec b) __attribute__((always_inline)) { return max(a, b); });
}

// Lane i of the result is the sum of rows[i]'s lanes, for about three operations a row.
template <int kDistance = kLanes / 2>
NPU_INLINE Vec sum_rows(Vec* rows) {
#pragma GCC unroll 8
  for (int i = 0; i < kDistance; ++i) {
    const Vec a = rows[i], b = rows[i + kDistance];
    rows[i] = shuffle(a, b, [](int lane) { return lane & kDistance ? kLanes + (lane ^ kDistance) : lane; }) +
              shuffle(a, b, [](int lane) { return lane & kDistance ? kLanes + lane : lane ^ kDistance; });
  }
  if constexpr (kDistance > 1) return sum_rows<kDistance / 2>(rows);
  else return rows[0];
}

// The lanes of two vectors in turns: a0 b0 a1 b1 ... of their first halves and of their second ones.
NPU_INLINE Vec zip_low(Vec a, Vec b) {
  return shuffle(a, b, [](int i) { return i / 2 + (i % 2 ? kLanes : 0); });
}
NPU_INLINE Vec zip_high(Vec a, Vec b) {
  return shuffle(a, b, [](int i) { return kLanes / 2 + i / 2 + (i % 2 ? kLanes : 0); });
}

// Turns kLanes rows into columns, in place.
template <int kDistance = kLanes / 2>
NPU_INLINE void transpose(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kDistance) continue;
    const Vec a = rows[i], b = rows[i + kDistance];
    rows[i] = shuffle(a, b, [](int lane) { return lane & kDistance ? kLanes + (lane ^ kDistance) : lane; });
    rows[i + kDistance] = shuffle(a, b, [](int lane) { return lane & kDistance ? kLanes + lane : lane ^ kDistance; });
  }
  if constexpr (kDistance > 1) transpose<kDistance / 2>(rows);
}

// Turns a square of kLanes rows, `from_stride` apart, into columns `to_stride` apart.
NPU_INLINE void transpose_floats(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Vec rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = load(from + i * from_stride);
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(to + i * to_stride, rows[i]);
}

// e^x within about 1 ulp: x = k ln2 + r and a degree-6 polynomial in r. NaN stays NaN.
NPU_INLINE Vec exp(Vec x) {
  const Vec clamped = min(splat(89.0f), max(splat(-110.0f), x));
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction bits left
  const Vec k = clamped * 1.44269504088896341f + kRound - kRound;
  Vec r = clamped - k * 0.693359375f;
  r = r + k * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return scale_by_power(p, k);
}

// 2^y for -126 <= y <= 127, within a relative error of 1e-7.
NPU_INLINE Vec exp2_normal(Vec y) {
  constexpr float kRound = 12582912.0f;  // as above; the sum's lowest bits are then the integer
  const Vec rounded = y + kRound, r = y - (rounded - kRound);
  Vec p = r * 1.326472721e-3f + 9.671512813e-3f;
  p = p * r + 5.550733745e-2f;
  p = p * r + 2.402224208e-1f;
  p = p * r + 6.931469776e-1f;
  p = p * r + 1.0f;
  return bit_cast<Vec>(bit_cast<UVec>(p) + (bit_cast<UVec>(rounded) << 23));
}

// x times the logistic function of y. Below about -87 that is 0, as a division by infinity has it.
NPU_INLINE Vec times_sigmoid(Vec x, Vec y) {
  const Vec whole = 1.0f + exp(-y);
#if defined(NPU_AVX512)
  // Within 2 ulp: a division would take longer than all the rest. Reciprocals of more than 2^126 would be subnormal.
  const Vec estimate = _mm512_rcp14_ps(whole);
  return x * (whole > 0x1p126f ? Vec{} : estimate + estimate * (1.0f - whole * estimate));
#else
  return x / whole;
#endif
}
NPU_INLINE Vec sigmoid(Vec x) { return times_sigmoid(splat(1.0f), x); }

}  // namespace npu
