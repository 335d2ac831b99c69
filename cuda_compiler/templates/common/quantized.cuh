// Weights in few bits as operands of the tensor cores, and x as the other one. Expects `param::codes`, `param::offsets`,
// `Offset`, and `tensor_cores.cuh`.

#include "common/code_kinds.cuh"

constexpr bool has_minimum = param::offsets == param::OffsetsKind::minimum_;
constexpr bool has_zero_point = param::offsets == param::OffsetsKind::zero_point_;
constexpr int symmetric_zero = is_int4 && param::offsets == param::OffsetsKind::none_ ? 8 : 0;

constexpr int codes_per_byte = in_nibbles ? 2 : 1;
constexpr int span = 16 * codes_per_byte;  // elements of 16 bytes of codes
constexpr int span_packs = span / 8;
constexpr int span_words = span / 2;  // of x: two bytes for each element
constexpr bool integers = in_nibbles || is_int8;
constexpr int lane_words = integers ? span_words / 2 : span_words;  // of the one plane that a lane has

// What is common to a span of x as integers: what they are multiples of, and their sum: -8 times it for symmetric 4-bit codes,
// and what it stands for where codes have a minimum.
struct SpanScale {
    float scale;
    int sum;
};

// An offset as it is used: a minimum, or a zero point.
using OffsetValue = Either<has_zero_point, int, float>::type;
template <typename T>
__device__ __forceinline__ OffsetValue offset_value(T minimum) { return to_float(minimum); }
__device__ __forceinline__ OffsetValue offset_value(unsigned char zero) { return is_int8 ? (signed char)(zero) : zero; }

__device__ __forceinline__ unsigned chosen_bytes(unsigned low, unsigned high, unsigned which) {
    return __byte_perm(low, high, which);
}

// Eight elements of x on their way into a span. All lanes of a warp make one at the same time.
template <typename Element>
struct SpanPack {
    unsigned words[4];  // two of the high plane and two of the low one, or all in pairs that are two apart
    SpanScale whole;

    __device__ __forceinline__ SpanPack(const Pack<Element, 8> &values) {
        const unsigned *pairs = reinterpret_cast<const unsigned *>(&values);
        if constexpr (!integers) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                words[i] = chosen_bytes(pairs[i], pairs[i + 1], 0x5410);
                words[i + 1] = chosen_bytes(pairs[i], pairs[i + 1], 0x7632);
            }
            whole = {1.0f, 0};
        } else {
            float of[8];
            to_floats(of, values);
            unsigned largest = 0;
#pragma unroll
            for (float value : of) {
                largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
            }
#pragma unroll
            for (int step = 1; step < span_packs; step *= 2) {
                largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
            }
            // The largest is between 2^(exponent - 127) and twice that, and becomes at most 2^14.
            const int exponent = larger(int(largest >> 23), 14);
            const float inverse = __uint_as_float((267 - exponent) << 23);
            // Behind the point of this number there is no bit, so a sum with it holds an integer, and here 128 more than it.
            constexpr float integral = 12582912.0f + 128.0f;
            unsigned shifted[8];
            int sum = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                shifted[i] = __float_as_uint(fmaf(of[i], inverse, integral));
                sum += int(shifted[i] - __float_as_uint(integral));
            }
#pragma unroll
            for (int step = 1; step < span_packs; step *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            }
            // What is not a number, or infinite, makes the whole span so.
            whole.scale = exponent == 255 ? NAN_F : __uint_as_float((exponent - 13) << 23);
            whole.sum = has_minimum ? __float_as_int(float(sum) * whole.scale) : symmetric_zero ? -symmetric_zero * sum : sum;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // A word of 4-bit codes has elements 0, 2, 4, 6 in the low halves of its bytes.
                const int first = is_int4 ? i : 4 * i;
                constexpr int step = is_int4 ? 2 : 1;
                const unsigned front = chosen_bytes(shifted[first], shifted[first + step], 0x5140);
                const unsigned back = chosen_bytes(shifted[first + 2 * step], shifted[first + 3 * step], 0x5140);
                words[i] = chosen_bytes(front, back, 0x7632);
                words[2 + i] = chosen_bytes(front, back, 0x5410) ^ 0x80808080u;
            }
        }
    }

    __device__ __forceinline__ void store(unsigned (&target)[span_words], SpanScale &scale, int number) const {
        if constexpr (integers) {
            *reinterpret_cast<uint2 *>(&target[2 * number]) = make_uint2(words[0], words[1]);
            *reinterpret_cast<uint2 *>(&target[lane_words + 2 * number]) = make_uint2(words[2], words[3]);
        } else {
            *reinterpret_cast<uint4 *>(&target[4 * number]) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        if (number == 0) {
            scale = whole;
        }
    }
};

// A plane of a span, 0 being the high one; zeros unless it is `wanted`. Floats have one.
__device__ __forceinline__ void load_plane(
    unsigned (&at)[lane_words], const unsigned (&words)[span_words], int plane, bool wanted
) {
    wanted = wanted && (integers || plane == 0);
    const unsigned *from = words + (integers ? plane * lane_words : 0);
#pragma unroll
    for (int i = 0; i < lane_words; i += 4) {
        const uint4 read = wanted ? *reinterpret_cast<const uint4 *>(from + i) : make_uint4(0, 0, 0, 0);
        at[i] = read.x;
        at[i + 1] = read.y;
        at[i + 2] = read.z;
        at[i + 3] = read.w;
    }
}

// 16 bytes of codes of two rows as operands of the products that they take. Codes of float4 are two operands, the positive numbers and
// the magnitudes of negative ones: these are one instruction each for four codes, and tensor cores have time for twice as many products.
struct Operand {
    static constexpr int products = is_int8 ? 2 : 4;
    static constexpr int signs = is_float4 ? 2 : 1;
    unsigned of[signs][products][4];

    __device__ __forceinline__ Operand(const Words &top, const Words &bottom) {
#pragma unroll
        for (int i = 0; i < products; i++) {
            if constexpr (is_int8) {
                of[0][i][0] = top.at[2 * i];
                of[0][i][1] = bottom.at[2 * i];
                of[0][i][2] = top.at[2 * i + 1];
                of[0][i][3] = bottom.at[2 * i + 1];
            } else {
#pragma unroll
                for (int sign = 0; sign < signs; sign++) {
                    // The sign of a code becomes that of the number that is wanted.
                    const unsigned turned = sign == 0 ? 0 : 0x88888888u;
                    take_apart(top.at[i] ^ turned, of[sign][i][0], of[sign][i][2]);
                    take_apart(bottom.at[i] ^ turned, of[sign][i][1], of[sign][i][3]);
                }
            }
        }
    }

    // The two halves of a word's elements: elements 0, 2, … and 1, 3, …; of codes with a table the first four and the last four.
    __device__ __forceinline__ static void take_apart(unsigned word, unsigned &even, unsigned &odd) {
        if constexpr (is_int4) {
            even = word & 0x0f0f0f0fu;
            odd = word >> 4 & 0x0f0f0f0fu;
        } else if constexpr (is_float4) {
            even = positive_bytes(word);
            odd = positive_bytes(word >> 16);
        } else if constexpr (has_table) {
            even = table_bytes(word);
            odd = table_bytes(word >> 16);
        } else {
            even = wide_floats(word << 8);
            odd = wide_floats(word);
        }
    }

    // The float8 values in the upper bytes of both halves of a word as 16-bit floats: exponent and mantissa moved to their places,
    // and multiplied with 2 to the power of the difference of the exponents' biases.
    __device__ __forceinline__ static unsigned wide_floats(unsigned word) {
        constexpr bool brain = IsBrain<Half>::value;
        const unsigned moved = (word & 0x80008000u) | (brain ? word >> 4 & 0x07f007f0u : word >> 1 & 0x3f803f80u);
        unsigned result = 0;
#if __CUDA_ARCH__ >= 800
        if constexpr (brain) {
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(moved), "r"(0x7b807b80u), "r"(0x80008000u));
        } else {
            asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(moved), "r"(0x5c005c00u));
        }
#endif
        return result;
    }
};

#if __CUDA_ARCH__ >= 800
// sums[16 × 8] += a[16 × 32] · b[32 × 8] in bytes, in the fragments of mma.m16n8k32.
__device__ __forceinline__ void multiply(int (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
__device__ __forceinline__ void multiply(int (&)[4], const unsigned (&)[4], unsigned, unsigned) {}
#endif

__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply(sums, a[0], a[1], a[2], a[3], b0, b1);
}

// The sums of a lane's span with two rows, in two planes each.
struct SpanSums {
    Either<integers, int, float>::type of[Operand::signs][4] = {};

    __device__ __forceinline__ SpanSums(const SpanScale &own) {
        if constexpr (integers && symmetric_zero != 0) {
            of[0][1] = of[0][3] = own.sum;
        }
    }

    // The products of the whole span, or of one of its equal parts.
    template <int parts = 1>
    __device__ __forceinline__ void add(const Operand &operand, const unsigned (&x)[lane_words], int part = 0) {
        constexpr int products = Operand::products / parts;
#pragma unroll
        for (int i = 0; i < products; i++) {
            const int at = part * products + i;
#pragma unroll
            for (int sign = 0; sign < Operand::signs; sign++) {
                multiply(of[sign], operand.of[sign][at], x[2 * at], x[2 * at + 1]);
            }
        }
    }

    // `before` and what the weight's elements add to it.
    __device__ __forceinline__ float scaled(
        int half, const SpanScale &own, float scale, OffsetValue offset, float before
    ) const {
        if constexpr (!integers) {
            return fmaf(of[0][2 * half], scale, before);
        } else {
            int sum = 256 * of[0][2 * half] + of[0][2 * half + 1];
            if constexpr (Operand::signs == 2) {
                sum -= 256 * of[1][2 * half] + of[1][2 * half + 1];
            }
            if constexpr (has_zero_point) {
                sum -= offset * own.sum;
            }
            if constexpr (has_minimum) {
                before = fmaf(offset, __int_as_float(own.sum), before);
            }
            return fmaf(float(sum) * own.scale, scale, before);
        }
    }
};
