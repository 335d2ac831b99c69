// Results of integer kernels: codes rint(y / out_scale) + out_zero_point within limits, where they are stored in bytes, else
// floats. Each operation is rounded by itself, as the reference rounds it: products and sums are not contracted.

template <typename T>
struct IsByte { static constexpr bool value = false; };
template <>
struct IsByte<signed char> { static constexpr bool value = true; };
template <>
struct IsByte<unsigned char> { static constexpr bool value = true; };

// The byte in the lowest bits.
template <typename T>
__device__ __forceinline__ T low_byte(int bits) {
    if constexpr (IsByte<T>::value) {
        return T(bits);
    } else {
        return T{};
    }
}

constexpr bool CODED = IsByte<Out::type>::value;

// A result as it is stored; `inverse` is 1 / out_scale.
__device__ __forceinline__ Out::type stored(float y, float inverse) {
    if constexpr (CODED) {
        constexpr float least = float(param::low - param::out_zero_point);
        constexpr float most = float(param::high - param::out_zero_point);
        // Limits are integers, so limiting before rounding changes nothing; 1.5 · 2^23 leaves the integer in the low bits.
        const float near = fminf(fmaxf(__fmul_rn(y, inverse), least), most);
        return low_byte<Out::type>(__float_as_int(__fadd_rn(near, 12582912.0f)) + param::out_zero_point);
    } else {
        return from<Out::type>(y);
    }
}

// Whether codes are all integers of their dtype, so that saturating is all the limiting there is.
constexpr bool SATURATES = CODED && param::out_zero_point == 0 && param::high - param::low == 255;

// Two results side by side.
__device__ __forceinline__ Pack<Out::type, 2> stored(float first, float second, float inverse) {
    Pack<Out::type, 2> pair;
#if __CUDA_ARCH__ >= 720
    if constexpr (SATURATES) {
        const int left = __float2int_rn(__fmul_rn(first, inverse));
        const int right = __float2int_rn(__fmul_rn(second, inverse));
        unsigned packed;
        if constexpr (param::low < 0) {
            asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(right), "r"(left), "r"(0));
        } else {
            asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(right), "r"(left), "r"(0));
        }
        pair.item[0] = low_byte<Out::type>(int(packed));
        pair.item[1] = low_byte<Out::type>(int(packed >> 8));
        return pair;
    }
#endif
    pair.item[0] = stored(first, inverse);
    pair.item[1] = stored(second, inverse);
    return pair;
}
