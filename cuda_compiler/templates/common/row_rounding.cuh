// Rows rounded to bytes with a scale of their own: `quantize_rows` in npu_compiler/graph/quantization.py, bit for bit. Expects
// `to_int8`: whether codes are int8, else float8 e4m3.

constexpr float largest_code = to_int8 ? 127.0f : 448.0f;

// The nearest float8 e4m3 number, ties to even, of a float between -448 and 448.
__device__ __forceinline__ float float8_number(float value) {
    const unsigned bits = __float_as_uint(value);
    const float normal = __uint_as_float((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
    constexpr float multiples = 24576.0f;  // 1.5 · 2^14: a sum with it is a multiple of 2^-9
    const float subnormal = __fsub_rn(__fadd_rn(value, multiples), multiples);
    return fabsf(value) < 0.015625f ? subnormal : normal;
}

// Its code. Multiplied so, a number has float8's bias in its exponent, and a subnormal one is a subnormal float.
__device__ __forceinline__ unsigned char float8_code(float value) {
    const unsigned magnitude = __float_as_uint(fabsf(float8_number(value)) * __uint_as_float(0x03800000u)) >> 20;
    return (unsigned char)(magnitude | (__float_as_uint(value) >> 24 & 0x80u));
}

// What makes the codes of a row.
struct RowRounding {
    float scale;  // NaN for a row with an element that is not finite, whose codes are 0
    float divisor;
    float low_inverse;
    float high_inverse;
    bool finite;
    bool is_usual;

    // `largest`: the bits of the largest magnitude, of which those of what is not finite are the greatest.
    __device__ __forceinline__ RowRounding(unsigned largest) {
        finite = largest < 0x7f800000u;
        scale = finite ? __fdiv_rn(__uint_as_float(largest), largest_code) : NAN_F;
        divisor = finite && scale != 0.0f ? scale : 1.0f;
        // Off by 2^-22, which is more than all roundings up to a product: one is below, the other above.
        low_inverse = __frcp_rn(divisor) * (1.0f - 2.3841858e-7f);
        high_inverse = __frcp_rn(divisor) * (1.0f + 2.3841858e-7f);
        // Between 2^-80 and 2^100, where nothing that decides about a code is subnormal.
        is_usual = finite && divisor >= 8.271806e-25f && divisor <= 1.2676506e30f;
    }

    // An element as a multiple of the scale, within what the format holds.
    __device__ __forceinline__ float in_scale(float value) const {
        return finite ? fminf(fmaxf(__fdiv_rn(value, divisor), -largest_code), largest_code) : 0.0f;
    }

    // The number that a code stands for, as a multiple of the scale.
    __device__ __forceinline__ float number(float value) const {
        const float wanted = in_scale(value);
        return to_int8 ? rintf(wanted) : float8_number(wanted);
    }

    __device__ __forceinline__ unsigned exact_code(float value) const {
        const float wanted = in_scale(value);
        return to_int8 ? unsigned(__float2int_rn(wanted)) & 0xffu : float8_code(wanted);
    }

    // Products with the two inverses enclose the quotient; where they leave a choice of codes, it decides.
    template <int N>
    __device__ __forceinline__ void codes(Pack<unsigned char, N> &codes, const float (&values)[N]) const {
        if constexpr (N % 2 == 0) {
            unsigned pairs[N / 2];
            unsigned differing = is_usual ? 0 : 1;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float left = values[2 * i];
                const float right = values[2 * i + 1];
                pairs[i] = near_codes(left * low_inverse, right * low_inverse);
                differing |= pairs[i] ^ near_codes(left * high_inverse, right * high_inverse);
            }
            if (differing == 0) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    codes.item[i] = (unsigned char)(pairs[i / 2] >> i % 2 * 8);
                }
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            codes.item[i] = (unsigned char)(exact_code(values[i]));
        }
    }

private:
    // The codes of two multiples of the scale, of at most a little more than the largest.
    __device__ __forceinline__ static unsigned near_codes(float left, float right) {
        if constexpr (to_int8) {
            // Behind the point of this number there is no bit, so a sum with it holds an integer in its last bits.
            constexpr float integral = 12582912.0f;
            return __byte_perm(__float_as_uint(left + integral), __float_as_uint(right + integral), 0x0040) & 0xffffu;
        } else {
#if __CUDA_ARCH__ >= 890
            unsigned short pair;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(right), "f"(left));
            return pair;
#else
            const float last = largest_code;
            left = fminf(fmaxf(left, -last), last);
            right = fminf(fmaxf(right, -last), last);
            return float8_code(left) | unsigned(float8_code(right)) << 8;
#endif
        }
    }
};
