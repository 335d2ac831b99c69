// Rows rounded to bytes with a scale of their own: `quantize_rows` in npu_compiler/graph/quantization.py, bit for bit. Expects
// `to_int8`: whether codes are int8, else float8 e4m3.

constexpr float largest_code = to_int8 ? 127.0f : 448.0f;

// The nearest float8 e4m3 number, ties to even, of a float between -464 and 464.
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
    float factor;  // of elements
    bool finite;

    // `largest`: the bits of the largest magnitude, of which those of what is not finite are the greatest.
    __device__ __forceinline__ RowRounding(unsigned largest) {
        constexpr float least_normal = 1.1754943508222875e-38f;
        finite = largest < 0x7f800000u;
        scale = finite ? __fdiv_rn(__uint_as_float(largest), largest_code) : NAN_F;
        scale = scale < least_normal ? 0.0f : scale;
        factor = scale >= least_normal ? __frcp_rn(scale) : 0.0f;
    }

    // An element as a multiple of the scale. It may exceed the largest code by a rounding error, which rounding it removes.
    __device__ __forceinline__ float in_scale(float value) const { return finite ? __fmul_rn(value, factor) : 0.0f; }

    // The number that a code stands for, as a multiple of the scale.
    __device__ __forceinline__ float number(float value) const {
        return to_int8 ? rintf(in_scale(value)) : float8_number(in_scale(value));
    }

    template <int N>
    __device__ __forceinline__ void codes(Pack<unsigned char, N> &codes, const float (&values)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            constexpr int last = N - 1;
            const int next = smaller(i + 1, last);
            const unsigned pair = two_codes(in_scale(values[i]), in_scale(values[next]));
            codes.item[i] = (unsigned char)(pair);
            codes.item[next] = (unsigned char)(next > i ? pair >> 8 : pair);
        }
    }

private:
    // The codes of two multiples of the scale.
    __device__ __forceinline__ static unsigned two_codes(float left, float right) {
        if constexpr (to_int8) {
            // Behind the point of this number there is no bit, so a sum with it holds an integer in its last bits.
            constexpr float integral = 12582912.0f;
            return __byte_perm(
                __float_as_uint(__fadd_rn(left, integral)), __float_as_uint(__fadd_rn(right, integral)), 0x0040
            ) & 0xffffu;
        } else {
#if __CUDA_ARCH__ >= 890
            unsigned short pair;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(right), "f"(left));
            return pair;
#else
            return float8_code(left) | unsigned(float8_code(right)) << 8;
#endif
        }
    }
};
