// Reading weights in few bits as floats, `pack` elements at a time. Expects `pack`, `param::k`,
// `param::groups`, `param::codes`, `param::offsets`, and the operands `data`, `scales`, `offset`.

#include "common/code_kinds.cuh"

constexpr bool has_minimum = param::offsets == param::OffsetsKind::minimum_;
constexpr bool has_zero_point = param::offsets == param::OffsetsKind::zero_point_;
constexpr bool is_shifted = is_int4 || has_minimum || has_zero_point;  // codes stand for multiples of a scale and more
constexpr int pack_bytes = in_nibbles ? pack / 2 : pack;
constexpr index_t group = param::k / param::groups;
constexpr bool in_one_group = group % pack == 0;  // all elements of a pack

// A float8 value: exponent and mantissa moved to their places, and multiplied with 2 to the power of the biases' difference.
__device__ __forceinline__ float float8_value(unsigned code) {
    return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * __uint_as_float(0x7b800000u);
}

// What codes stand for: scale · code + minimum, or scale · (code - zero).
// Of the byte of a zero point. Minimums are floats and never get here, but their code is compiled, too.
__device__ __forceinline__ float zero_point(unsigned char offset) {
    return is_int8 ? float((signed char)(offset)) : float(offset);
}
template <class Minimum> __device__ __forceinline__ float zero_point(Minimum) {
    return 0.0f;
}

struct Group {
    float scale;
    float minimum = 0.0f;
    float zero = is_int4 && !has_minimum ? 8.0f : 0.0f;

    // Of an element.
    __device__ __forceinline__ Group(
        const Scales::type *scales, const Offset::type *offset, index_t row, index_t column
    ) {
        const index_t place = row * Offset::stride(0) + column / group;
        scale = to_float(scales[row * Scales::stride(0) + column / group]);
        if constexpr (has_minimum) {
            minimum = to_float(offset[place]);
        } else if constexpr (has_zero_point) {
            zero = zero_point(offset[place]);
        }
    }

    __device__ __forceinline__ float operator()(float code) const { return fmaf(scale, code - zero, minimum); }
};

using Codes = Pack<unsigned char, pack_bytes>;

__device__ __forceinline__ const unsigned char *codes_at(const unsigned char *data, index_t row, index_t column) {
    return data + row * Data::stride(0) + (in_nibbles ? column / 2 : column);
}

// Four bytes between 0 and 255 as floats.
__device__ __forceinline__ void bytes_to_floats(float (&values)[4], unsigned bytes, float zero) {
    constexpr unsigned integral = 0x4b000000u;  // of 2^23, behind whose last bit there is no other
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[i] = __uint_as_float(__byte_perm(bytes, integral, 0x7440 + i)) - (8388608.0f + zero);
    }
}

// Two codes of float8.
__device__ __forceinline__ void float8_values(float (&values)[2], unsigned codes) {
#if __CUDA_ARCH__ >= 890
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)(codes)));
    values[0] = to_float(f16{(unsigned short)(halves)});
    values[1] = to_float(f16{(unsigned short)(halves >> 16)});
#else
    values[0] = float8_value(codes & 0xffu);
    values[1] = float8_value(codes >> 8 & 0xffu);
#endif
}

__device__ __forceinline__ void to_codes(float (&values)[pack], const Codes &codes) {
    if constexpr (pack_bytes % 4 == 0) {
        const unsigned *words = reinterpret_cast<const unsigned *>(&codes);
#pragma unroll
        for (int word = 0; word < pack_bytes / 4; word++) {
            constexpr int codes_of_word = in_nibbles ? 8 : 4;
            float found[2][4];
            if constexpr (is_int4) {
                bytes_to_floats(found[0], words[word] & 0x0f0f0f0fu, 0.0f);
                bytes_to_floats(found[1], words[word] >> 4 & 0x0f0f0f0fu, 0.0f);
            } else if constexpr (has_table) {
                bytes_to_floats(found[0], table_bytes(words[word]) ^ 0x80808080u, 128.0f);
                bytes_to_floats(found[1], table_bytes(words[word] >> 16) ^ 0x80808080u, 128.0f);
            } else if constexpr (is_int8) {
                bytes_to_floats(found[0], words[word] ^ 0x80808080u, 128.0f);
            } else {
                float8_values(reinterpret_cast<float(&)[2]>(found[0][0]), words[word]);
                float8_values(reinterpret_cast<float(&)[2]>(found[0][2]), words[word] >> 16);
            }
#pragma unroll
            for (int i = 0; i < codes_of_word; i++) {
                values[codes_of_word * word + i] = is_int4 ? found[i % 2][i / 2] : found[i / 4][i % 4];
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < pack; i++) {
        const unsigned byte = codes.item[in_nibbles ? i / 2 : i];
        if constexpr (is_int4) {
            values[i] = float(i % 2 ? byte >> 4 : byte & 15u);
        } else if constexpr (has_table) {
            values[i] = float((signed char)(table_bytes(byte >> i % 2 * 4)));
        } else if constexpr (is_int8) {
            values[i] = float((signed char)(byte));
        } else {
            values[i] = float8_value(byte);
        }
    }
}

// Codes from one column of a row on → the elements themselves.
__device__ __forceinline__ void to_elements(
    float (&values)[pack], const Scales::type *scales, const Offset::type *offset, index_t row, index_t column
) {
#pragma unroll
    for (int i = 0; i < pack; i++) {
        values[i] = Group(scales, offset, row, in_one_group ? column : column + i)(values[i]);
    }
}

__device__ __forceinline__ void load_elements(
    float (&values)[pack], const unsigned char *data, const Scales::type *scales, const Offset::type *offset, index_t row,
    index_t column
) {
    to_codes(values, load_pack<pack_bytes>(codes_at(data, row, column)));
    to_elements(values, scales, offset, row, column);
}
