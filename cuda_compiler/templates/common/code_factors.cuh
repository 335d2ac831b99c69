// Codes of a weight in few bits as operands of the tensor cores: pairs of 16-bit floats, exact. Expects `tensor_cores.cuh`.
#include "common/stored_codes.cuh"

static_assert(sizeof(Half) == 2, "");

constexpr bool brain = IsBrain<Half>::value;
constexpr unsigned one = brain ? 0x3f803f80u : 0x3c003c00u;
constexpr unsigned minus_one = one | 0x80008000u;
// 128 or 1024: the last bits of a number like it count ones, so an integer in their place is added to it.
constexpr unsigned integral = brain ? 0x43004300u : 0x64006400u;

// What is subtracted from codes, negative: of 4-bit codes in their places the zero point and `integral`, of others the zero point.
__device__ __forceinline__ unsigned less_zero(unsigned char zero) {
    if constexpr (is_int4) {
        return (integral | 0x80008000u) | unsigned(zero) * 0x00010001u;
    } else {
        // -zero as a 16-bit float.
        const unsigned bits = from<Half>(-float((signed char)(zero))).bits;
        return bits * 0x00010001u;
    }
}

// The codes of eight terms as pairs of 16-bit floats: of 4-bit codes terms i and i + 4, of others neighbours.
struct Factors {
    unsigned pair[4];

    __device__ __forceinline__ Factors(const unsigned char *codes, unsigned zero) {
        if constexpr (is_int4) {
            const unsigned word = *reinterpret_cast<const unsigned *>(codes);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                pair[i] = multiply_add_pairs((word >> 4 * i & 0x000f000fu) | integral, one, zero);
            }
        } else {
            uint2 words;
            if constexpr (has_table) {
                const unsigned word = *reinterpret_cast<const unsigned *>(codes);
                words = make_uint2(table_bytes(word), table_bytes(word >> 16));
            } else {
                words = *reinterpret_cast<const uint2 *>(codes);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned word = i < 2 ? words.x : words.y;
                pair[i] = is_int8 || has_table ? of_int8(word, i % 2) : of_float8(word, i % 2);
                if constexpr (has_zero_point) {
                    pair[i] = multiply_add_pairs(pair[i], one, zero);
                }
            }
        }
    }

    // With the last seven bits of a code, less what its sign counts.
    __device__ __forceinline__ static unsigned of_int8(unsigned word, int half) {
        const unsigned placed = __byte_perm(word, integral, half ? 0x7372 : 0x7170);
        if constexpr (brain) {
            return multiply_add_pairs(placed & 0xff80ff80u, minus_one, placed & 0xff7fff7fu);
        } else {
            // A code with its sign bit flipped is 128 more.
            return multiply_add_pairs(placed ^ 0x00800080u, one, 0xe480e480u);
        }
    }

    // Exponent and mantissa moved to their places, and multiplied with 2 to the power of the difference of the exponents' biases.
    __device__ __forceinline__ static unsigned of_float8(unsigned word, int half) {
        const unsigned placed = __byte_perm(word, 0, half ? 0x3424 : 0x1404);
        const unsigned magnitude = brain ? placed >> 4 & 0x07f007f0u : placed >> 1 & 0x3f803f80u;
        return multiply_add_pairs((placed & 0x80008000u) | magnitude, brain ? 0x7b807b80u : 0x5c005c00u, 0x80008000u);
    }
};

// Eight terms of a row of x, as pairs in the order of `Factors`.
__device__ __forceinline__ Words in_order_of_factors(const Words &x) {
    if constexpr (is_int4) {
        return Words{{__byte_perm(x.at[0], x.at[2], 0x5410), __byte_perm(x.at[0], x.at[2], 0x7632),
                      __byte_perm(x.at[1], x.at[3], 0x5410), __byte_perm(x.at[1], x.at[3], 0x7632)}};
    } else {
        return x;
    }
}

// `less_zero` of a group: of its zero point, or of the one that all groups have.
__device__ __forceinline__ unsigned less_zero_of(const void *offsets, index_t at) {
    if constexpr (has_zero_point) {
        return less_zero(static_cast<const unsigned char *>(offsets)[at]);
    } else {
        return less_zero((unsigned char)(has_minimum ? 0 : 8));
    }
}
